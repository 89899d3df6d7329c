#include "net/libfabric/fabric_endpoint.h"

#include <fmt/format.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "net/libfabric/immediate.h"
#include "net/libfabric/library.h"
#include "net/record.h"
#include "plan/topology.h"

namespace mkernel {
namespace {

constexpr std::uint32_t kApiVersion = FI_VERSION(1, 17);  // the oldest that was tried: Debian 12
constexpr const char* kProviders[] = {"tcp", "shm"};
constexpr std::uint64_t kMrAccess = FI_WRITE | FI_REMOTE_WRITE;
constexpr int kEntriesPerRead = 32;
// An endpoint cannot know when something arrives, so it is looked at again after an eighth of the time for which
// nothing has come: a wait becomes at most that much longer, and an idle network costs a look per millisecond.
constexpr Nanos kIdleShare = 8;
constexpr Nanos kLongestPauseNs = 1'000'000;

struct Close {
  template <class T>
  void operator()(T* object) const {
    fi_close(&object->fid);
  }
};
template <class T>
using Fid = std::unique_ptr<T, Close>;

struct FreeInfo {
  void operator()(fi_info* info) const { fabric_library().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

std::string error_text(int code) { return fabric_library().strerror(code < 0 ? -code : code); }

// What the provider must be able to do. Null with `code` when it is not there, or cannot.
Info find_provider(const std::string& provider, const std::string& local_address, int& code) {
  const Info hints(fabric_library().dupinfo(nullptr));
  if (!hints) {
    code = -FI_ENOMEM;
    return nullptr;
  }
  hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->domain_attr->threading = FI_THREAD_SAFE;  // heaps are registered while another thread polls
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = sizeof(std::uint64_t);
  hints->fabric_attr->prov_name = strdup(provider.c_str());  // freed with the hints
  fi_info* found = nullptr;
  code = fabric_library().getinfo(kApiVersion, local_address.empty() ? nullptr : local_address.c_str(), nullptr,
                                  local_address.empty() ? 0 : FI_SOURCE, hints.get(), &found);
  return Info(code == 0 ? found : nullptr);
}

class LibfabricEndpoint final : public ProcessEndpoint {
 public:
  LibfabricEndpoint(std::int32_t rank, std::int32_t world, const FabricOptions& options);
  Status open();

  const std::string& address() const override { return address_; }
  Status connect(std::int32_t peer, std::string_view address) override;
  Result<RemoteHeap> add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) override;
  void set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) override;
  void remove_heap(std::uint32_t op) override;
  std::int64_t bytes_sent(std::uint32_t op) const override {
    return bytes_sent_[op].load(std::memory_order_relaxed);  // order: none needed, the counter is a statistic
  }
  std::string name() const override { return "libfabric's " + options_.provider; }
  std::string last_error() const override { return last_error_; }

  PostStatus post(const Put& put, Nanos now) override;
  int poll(Nanos now, std::span<TransportEvent> events) override;
  Nanos next_event() const override;
  int arrivals_per_put() const override { return pieces_; }

 private:
  struct Heap {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    Fid<fid_mr> region;
    std::uint64_t last_epoch = 0;     // of an arrival; only the polling thread touches it
    std::vector<RemoteHeap> remotes;  // by rank
  };
  // A put in flight.
  struct Flight {
    Put put;
    std::int32_t next = 0;  // the first write that is not posted
    std::int32_t left = 0;  // writes, posted or not, whose completion has not come
    bool failed = false;
  };
  // What libfabric hands back with a completion. Its own part comes first, as FI_CONTEXT2 demands.
  struct Write {
    fi_context2 context;
    std::int32_t flight = 0;
  };

  Flight& flight(std::int32_t index) { return flights_[static_cast<std::size_t>(index)]; }
  // Of a put: one per piece, or two, its bytes and then what says that they have come.
  std::int32_t writes_per_put() const { return pieces_ * (bytes_first_ ? 2 : 1); }
  ssize_t post_write(std::int32_t index);
  void post_waiting();
  bool write_done(std::int32_t index, TransportEvent& event);
  bool handle(const fi_cq_data_entry& entry, TransportEvent& event);
  bool handle_error(TransportEvent& event);
  // order: with the pointer comes the whole heap; pairs with add_heap().
  Heap* find_heap(std::uint32_t op) const { return heaps_[op].load(std::memory_order_acquire); }

  std::int32_t rank_;
  std::int32_t pieces_;
  // The provider keeps writes in order. Then a piece's bytes go without an immediate, and an empty write brings it: the
  // tcp of libfabric 1.17 crashes when a connection ends in the middle of an arriving write that has one.
  bool bytes_first_ = false;
  FabricOptions options_;
  std::string address_;
  std::string last_error_;
  // Closed from the bottom up: what is opened later uses what was opened before.
  Info info_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> peers_table_;
  Fid<fid_cq> completions_;
  std::array<std::unique_ptr<Heap>, kMaxOperators> owned_heaps_;
  Fid<fid_ep> endpoint_;
  std::array<std::atomic<Heap*>, kMaxOperators> heaps_ = {};
  std::array<std::atomic<std::int64_t>, kMaxOperators> bytes_sent_ = {};
  std::uint64_t next_key_ = 1;
  std::vector<fi_addr_t> peers_;  // by rank
  std::vector<Flight> flights_;
  std::vector<Write> contexts_;  // flight * writes_per_put() + write
  std::vector<std::int32_t> free_flights_;
  std::vector<std::int32_t> waiting_flights_;  // accepted, but not all writes posted
  std::vector<std::int32_t> lost_flights_;     // have a write that cannot be posted, and nobody has been told yet
  Nanos last_poll_ = 0;
  Nanos last_news_ = 0;
};

LibfabricEndpoint::LibfabricEndpoint(std::int32_t rank, std::int32_t world, const FabricOptions& options)
    : rank_(rank),
      pieces_(options.pieces),
      options_(options),
      peers_(static_cast<std::size_t>(world), FI_ADDR_UNSPEC),
      flights_(static_cast<std::size_t>(options.queue_depth)) {
  MK_CHECK(options.queue_depth >= 1 && options.pieces >= 1);
  MK_CHECK(rank >= 0 && rank < world && world <= 1 << 16);
  free_flights_.reserve(flights_.size());
  waiting_flights_.reserve(flights_.size());
  lost_flights_.reserve(flights_.size());
  for (std::int32_t i = options.queue_depth; i-- > 0;) free_flights_.push_back(i);
}

Status LibfabricEndpoint::open() {
  const std::string where = options_.local_address.empty() ? "" : " on address " + options_.local_address;
  const auto failed = [&](const char* step, int code) {
    return Error{ErrorKind::kIo, fmt::format("libfabric's provider {} does not start{}: {} says {}", options_.provider,
                                             where, step, error_text(code))};
  };
  if (!fabric_library().obstacle.empty()) return Error{ErrorKind::kUnsupported, fabric_library().obstacle};
  int code = 0;
  info_ = find_provider(options_.provider, options_.local_address, code);
  if (!info_) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("libfabric has no provider {} with remote writes and immediates of 8 bytes{}: {} (fi_info "
                             "-l lists what there is)",
                             options_.provider, where, error_text(code))};
  }
  bytes_first_ = (info_->tx_attr->msg_order & info_->rx_attr->msg_order & FI_ORDER_RMA_WAW) != 0 &&
                 info_->ep_attr->max_order_waw_size == std::numeric_limits<std::size_t>::max();
  contexts_.resize(flights_.size() * static_cast<std::size_t>(writes_per_put()));
  for (std::size_t i = 0; i < contexts_.size(); ++i) {
    contexts_[i].flight = static_cast<std::int32_t>(i / static_cast<std::size_t>(writes_per_put()));
  }
  fid_fabric* fabric = nullptr;
  if ((code = fabric_library().fabric(info_->fabric_attr, &fabric, nullptr)) != 0) return failed("fi_fabric", code);
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  if ((code = fi_domain(fabric, info_.get(), &domain, nullptr)) != 0) return failed("fi_domain", code);
  domain_.reset(domain);
  fi_av_attr av_attr = {};
  av_attr.type = FI_AV_UNSPEC;
  av_attr.count = peers_.size();
  fid_av* av = nullptr;
  if ((code = fi_av_open(domain, &av_attr, &av, nullptr)) != 0) return failed("fi_av_open", code);
  peers_table_.reset(av);
  fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.size = std::max<std::size_t>(4096, contexts_.size());
  fid_cq* cq = nullptr;
  if ((code = fi_cq_open(domain, &cq_attr, &cq, nullptr)) != 0) return failed("fi_cq_open", code);
  completions_.reset(cq);
  fid_ep* ep = nullptr;
  if ((code = fi_endpoint(domain, info_.get(), &ep, nullptr)) != 0) return failed("fi_endpoint", code);
  endpoint_.reset(ep);
  if ((code = fi_ep_bind(ep, &av->fid, 0)) != 0) return failed("fi_ep_bind", code);
  if ((code = fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV)) != 0) return failed("fi_ep_bind", code);
  if ((code = fi_enable(ep)) != 0) return failed("fi_enable", code);
  std::array<char, 1024> name;
  std::size_t length = name.size();
  if ((code = fi_getname(&ep->fid, name.data(), &length)) != 0) return failed("fi_getname", code);
  address_.assign(name.data(), length);
  return Ok{};
}

Status LibfabricEndpoint::connect(std::int32_t peer, std::string_view address) {
  MK_CHECK(peer >= 0 && peer < static_cast<std::int32_t>(peers_.size()));
  // Providers read a whole address of their kind, whatever was sent.
  if (address.size() != address_.size()) {
    return Error{ErrorKind::kIo, fmt::format("rank {} has an address of {} bytes and rank {} one of {}: their "
                                             "libfabrics or providers differ",
                                             peer, address.size(), rank_, address_.size())};
  }
  fi_addr_t& entry = peers_[static_cast<std::size_t>(peer)];
  const int code = fi_av_insert(peers_table_.get(), address.data(), 1, &entry, 0, nullptr);
  if (code == 1) return Ok{};
  return Error{ErrorKind::kIo,
               fmt::format("the address of rank {} cannot be used: fi_av_insert says {}", peer, error_text(code))};
}

Result<RemoteHeap> LibfabricEndpoint::add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) {
  void* const data = memory.data;
  const std::int64_t bytes = memory.bytes;
  MK_CHECK_OP(op, <, kMaxOperators);
  MK_CHECK(owned_heaps_[op] == nullptr && data != nullptr && bytes > 0);
  if (memory.gpu) return Error{ErrorKind::kUnsupported, name() + " is used for the host's memory only"};
  fid_mr* region = nullptr;
  const int code =
      fi_mr_reg(domain_.get(), data, static_cast<std::size_t>(bytes), kMrAccess, 0, next_key_++, 0, &region, nullptr);
  if (code != 0) {
    return Error{ErrorKind::kIo,
                 fmt::format("{} bytes of workspace cannot be registered with the network: fi_mr_reg says {}", bytes,
                             error_text(code))};
  }
  auto heap = std::make_unique<Heap>();
  heap->region.reset(region);
  heap->data = static_cast<std::byte*>(data);
  heap->bytes = bytes;
  heap->last_epoch = start_epoch;
  heap->remotes.resize(peers_.size());
  owned_heaps_[op] = std::move(heap);
  // order: the heap is complete when a put or an arrival finds it; pairs with find_heap().
  heaps_[op].store(owned_heaps_[op].get(), std::memory_order_release);
  const bool by_address = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  return RemoteHeap{fi_mr_key(region), by_address ? reinterpret_cast<std::uint64_t>(data) : 0};
}

void LibfabricEndpoint::set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) {
  MK_CHECK(owned_heaps_[op] != nullptr);
  owned_heaps_[op]->remotes.at(static_cast<std::size_t>(peer)) = heap;
}

void LibfabricEndpoint::remove_heap(std::uint32_t op) {
  // order: pairs with find_heap(). Nobody uses the heap now: the executor has removed the operator, and the thread that
  // polls has begun another round since (HostNetwork::remove_operator()).
  heaps_[op].store(nullptr, std::memory_order_release);
  owned_heaps_[op].reset();
}

PostStatus LibfabricEndpoint::post(const Put& put, Nanos now) {
  if (free_flights_.empty()) return PostStatus::kFull;
  MK_CHECK_OP(put.src_rank, ==, rank_);
  const Heap* heap = find_heap(put.op);
  MK_CHECK(heap != nullptr);
  // Every rank's heap has the same layout, so the peer's ends where ours does.
  MK_CHECK(put.bytes >= 0 && put.src_offset >= 0 && put.src_offset + put.bytes <= heap->bytes);
  MK_CHECK(put.dst_offset >= 0 && put.dst_offset + put.bytes <= heap->bytes);
  const std::int32_t index = free_flights_.back();
  flight(index) = {put, 0, writes_per_put(), false};
  const ssize_t code = post_write(index);
  // Nothing was posted: its queue to this peer is full, or the connection to it is still being made.
  if (code == -FI_EAGAIN) return PostStatus::kAgain;
  if (code != 0) {
    last_error_ = fmt::format("posting a write says {}", error_text(static_cast<int>(code)));
    return PostStatus::kFatal;
  }
  free_flights_.pop_back();
  bytes_sent_[put.op].fetch_add(put.bytes, std::memory_order_relaxed);
  last_news_ = now;
  if (flight(index).next < writes_per_put()) {
    waiting_flights_.push_back(index);
    post_waiting();
  }
  return PostStatus::kPosted;
}

// Posts the next write of a flight. Returns what libfabric says; unless that is 0, nothing happened.
ssize_t LibfabricEndpoint::post_write(std::int32_t index) {
  Flight& f = flight(index);
  const Put& put = f.put;
  Heap& heap = *find_heap(put.op);
  const Split split{put.bytes, pieces_};
  const std::int32_t writes_per_piece = bytes_first_ ? 2 : 1;
  const std::int32_t piece = f.next / writes_per_piece;
  const std::int64_t begin = split.begin(piece);
  const auto bytes = static_cast<std::size_t>(split.size(piece));
  if (bytes_first_ && f.next % 2 == 0 && bytes == 0) {
    ++f.next;
    --f.left;
  }
  const bool only_bytes = bytes_first_ && f.next % 2 == 0;
  const std::uint64_t data = encode(Immediate{put.op, static_cast<std::uint32_t>(put.epoch & 0xff),
                                              static_cast<std::uint32_t>(rank_), static_cast<std::uint64_t>(put.flag)});
  Write& write = contexts_[static_cast<std::size_t>(index) * static_cast<std::size_t>(writes_per_put()) +
                           static_cast<std::size_t>(f.next)];
  std::byte* const from = heap.data + put.src_offset + begin;
  const RemoteHeap& remote = heap.remotes[static_cast<std::size_t>(put.dst_rank)];
  const std::uint64_t to = remote.address + static_cast<std::uint64_t>(put.dst_offset + begin);
  const fi_addr_t peer = peers_[static_cast<std::size_t>(put.dst_rank)];
  void* const region = fi_mr_desc(heap.region.get());
  // order: the source's bytes were written before the put's record was published, which our thread has acquired
  // (CommandRing::peek()), and libfabric reads them on this thread or hands them to hardware with its own fence.
  const ssize_t code = only_bytes ? fi_write(endpoint_.get(), from, bytes, region, peer, to, remote.key, &write.context)
                                  : fi_writedata(endpoint_.get(), from, bytes_first_ ? 0 : bytes, region, data, peer,
                                                 to, remote.key, &write.context);
  if (code == 0) ++f.next;
  return code;
}

// Posts what is left of puts that were accepted before all their writes had room.
void LibfabricEndpoint::post_waiting() {
  std::size_t kept = 0;
  for (const std::int32_t index : waiting_flights_) {
    Flight& f = flight(index);
    ssize_t code = 0;
    while (f.next < writes_per_put() && (code = post_write(index)) == 0) {
    }
    if (f.next == writes_per_put()) continue;
    if (code != -FI_EAGAIN) {
      last_error_ = fmt::format("posting a write says {}", error_text(static_cast<int>(code)));
      // The writes that are posted still complete; one of the others stands for all that never will be.
      f.failed = true;
      f.left -= writes_per_put() - f.next - 1;
      lost_flights_.push_back(index);
      continue;
    }
    waiting_flights_[kept++] = index;
  }
  waiting_flights_.resize(kept);
}

int LibfabricEndpoint::poll(Nanos now, std::span<TransportEvent> events) {
  last_poll_ = now;
  if (!waiting_flights_.empty()) post_waiting();
  std::size_t count = 0;
  while (count < events.size() && !lost_flights_.empty()) {
    if (write_done(lost_flights_.back(), events[count])) ++count;
    lost_flights_.pop_back();
  }
  std::array<fi_cq_data_entry, kEntriesPerRead> entries;
  while (count < events.size()) {
    const std::size_t room = std::min<std::size_t>(entries.size(), events.size() - count);
    const ssize_t read = fi_cq_read(completions_.get(), entries.data(), room);
    if (read == -FI_EAVAIL) {
      // One error per call: where there is none to read after all, this is not the place to wait for it.
      if (handle_error(events[count])) ++count;
      break;
    }
    if (read <= 0) break;
    for (ssize_t i = 0; i < read; ++i) {
      if (handle(entries[static_cast<std::size_t>(i)], events[count])) ++count;
    }
    if (read < static_cast<ssize_t>(room)) break;
  }
  if (count > 0) last_news_ = now;
  return static_cast<int>(count);
}

// Turns a completion into an event; false when it is none yet.
bool LibfabricEndpoint::handle(const fi_cq_data_entry& entry, TransportEvent& event) {
  if ((entry.flags & FI_REMOTE_CQ_DATA) == 0) {
    return write_done(static_cast<const Write*>(entry.op_context)->flight, event);
  }
  const Immediate immediate = decode_immediate(entry.data);
  Heap* heap = find_heap(immediate.op);
  std::uint64_t epoch = immediate.epoch;
  if (heap != nullptr) {
    epoch = full_epoch(immediate.epoch, heap->last_epoch);
    if (static_cast<std::int64_t>(epoch - heap->last_epoch) > 0) heap->last_epoch = epoch;
  }
  // order: libfabric reports a remote write when its bytes are in memory, to the thread that reads the completion,
  // which is the one that stamps; pairs with post_write() on the sender.
  event = {EventKind::kArrived,
           static_cast<std::int32_t>(immediate.sender),
           0,
           immediate.op,
           epoch,
           static_cast<std::int64_t>(immediate.flag)};
  return true;
}

bool LibfabricEndpoint::write_done(std::int32_t index, TransportEvent& event) {
  Flight& f = flight(index);
  MK_CHECK_OP(f.left, >, 0);
  if (--f.left > 0) return false;
  const Put& put = f.put;
  event = {f.failed ? EventKind::kFailed : EventKind::kSent, put.dst_rank, put.id, put.op, put.epoch, put.flag};
  free_flights_.push_back(index);
  return true;
}

bool LibfabricEndpoint::handle_error(TransportEvent& event) {
  fi_cq_err_entry error = {};
  if (fi_cq_readerr(completions_.get(), &error, 0) <= 0) return false;
  std::array<char, 256> text = {};
  const char* detail = fi_cq_strerror(completions_.get(), error.prov_errno, error.err_data, text.data(), text.size());
  last_error_ = error_text(error.err);
  if (detail != nullptr && last_error_ != detail) last_error_ += fmt::format(" ({})", detail);
  const auto* write = static_cast<const Write*>(error.op_context);
  // An error that belongs to no write of ours: a peer's connection that broke. Its own puts fail by themselves.
  if (write < contexts_.data() || write >= contexts_.data() + contexts_.size()) return false;
  flight(write->flight).failed = true;
  return write_done(write->flight, event);
}

Nanos LibfabricEndpoint::next_event() const {
  return last_poll_ + std::min((last_poll_ - last_news_) / kIdleShare, kLongestPauseNs);
}

}  // namespace

Result<std::unique_ptr<ProcessEndpoint>> create_fabric_endpoint(std::int32_t rank, std::int32_t world,
                                                                const FabricOptions& options) {
  auto endpoint = std::make_unique<LibfabricEndpoint>(rank, world, options);
  if (Status status = endpoint->open(); !status.ok()) return status.error();
  return std::unique_ptr<ProcessEndpoint>(std::move(endpoint));
}

std::vector<std::string> fabric_providers() {
  std::vector<std::string> found;
  if (!fabric_library().obstacle.empty()) return found;
  for (const char* provider : kProviders) {
    int code = 0;
    if (find_provider(provider, "", code)) found.emplace_back(provider);
  }
  return found;
}

std::string fabric_obstacle() {
  if (!fabric_library().obstacle.empty()) return fabric_library().obstacle;
  return fabric_providers().empty() ? "libfabric finds neither of its providers tcp and shm on this machine" : "";
}

}  // namespace mkernel
