#include "net/verbs/verbs_endpoint.h"

#include <endian.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "base/check.h"
#include "net/record.h"
#include "net/verbs/device.h"
#include "net/verbs/immediate.h"
#include "net/verbs/queue_pairs.h"
#include "net/verbs/registration.h"
#include "plan/plan.h"
#include "plan/topology.h"

namespace mkernel {
namespace {

constexpr int kMaxChain = 32;  // writes per doorbell: a long chain keeps its first completion waiting
constexpr int kEntriesPerRead = 32;
constexpr Nanos kFirstRetryNs = 1'000;  // as in the proxy
constexpr Nanos kLastRetryNs = 1'000'000;
constexpr std::int64_t kStampBytes = 4;
constexpr std::size_t kShuffled = 24;  // arrivals that are held to be shuffled
// See FabricEndpoint: a wait becomes at most an eighth longer, and an idle network costs a look per millisecond.
constexpr Nanos kIdleShare = 8;
constexpr Nanos kLongestPauseNs = 1'000'000;
constexpr std::int32_t kNone = -1;

// Nothing was posted, and the same may succeed later.
bool is_momentary(int code) { return code == ENOMEM || code == EAGAIN || code == EBUSY || code == EINTR; }

class VerbsEndpoint final : public ProcessEndpoint {
 public:
  VerbsEndpoint(std::int32_t rank, std::int32_t world, const VerbsOptions& options);
  Status open();

  const std::string& address() const override { return address_; }
  Status connect(std::int32_t peer, std::string_view address) override;
  Result<RemoteHeap> add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) override;
  void set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) override;
  void remove_heap(std::uint32_t op) override;
  std::string name() const override;
  std::int64_t bytes_sent(std::uint32_t op) const override {
    return bytes_sent_[op].load(std::memory_order_relaxed);  // order: none needed, the counter is a statistic
  }
  std::string last_error() const override { return last_error_; }

  PostStatus post(const Put& put, Nanos now) override;
  void flush(Nanos now) override { pump_all(now); }
  int poll(Nanos now, std::span<TransportEvent> events) override;
  Nanos next_event() const override;
  int arrivals_per_put() const override { return counted() ? options_.pieces : 0; }

 private:
  struct Heap {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    Registration registration;
    std::uint64_t last_epoch = 0;     // of an arrival; only the polling thread touches it
    std::vector<RemoteHeap> remotes;  // by rank
  };
  // A put in flight.
  struct Flight {
    Put put;
    std::int32_t writes_left = 0;  // posted or not, whose completion has not come
    bool failed = false;
  };
  // What of a put goes over one lane: all of it (ordered), or a piece. Its writes are fragments of at most the longest
  // message, the last of which brings the immediate; without `notify` the stamp comes after them, and no immediate.
  struct Unit {
    std::int32_t writes = 0;
    std::int32_t posted = 0;
    std::int32_t done = 0;
    std::int32_t lane = 0;
    std::int32_t next = kNone;  // in the queue of its lane
  };
  // A queue pair, and the units that wait for it.
  struct Lane {
    std::int32_t head = kNone;
    std::int32_t tail = kNone;
    std::vector<std::int32_t> flying;  // ordered: units of the writes in flight, a ring
    std::uint32_t next_number = 0;     // of a write; the ring's place is number % depth
    std::int32_t in_flight = 0;        // writes
    std::int32_t since_signal = 0;     // writes since the last that asked for a completion
    bool busy = false;                 // is in busy_
    bool dead = false;                 // its queue pair has failed; what it still completes is known to be lost
    Nanos stalled_since = kNever;      // when posting first failed for the moment
    Nanos retry_at = 0;
    Nanos retry_delay_ns = 0;
  };

  bool counted() const { return options_.mode != VerbsMode::kOrdered; }
  // Ordered: the NIC writes stamps; else the receiver's endpoint does, when it is told of a put.
  bool nic_stamps() const { return !counted() && !options_.notify; }
  // The counted mode knows nothing of order, on whatever queue pairs.
  bool completes_in_order() const { return !counted(); }
  Lane& lane(std::int32_t index) { return lanes_[static_cast<std::size_t>(index)]; }
  Unit& unit(std::int32_t index) { return units_[static_cast<std::size_t>(index)]; }
  Flight& flight(std::int32_t index) { return flights_[static_cast<std::size_t>(index)]; }
  Flight& flight_of(std::int32_t unit_index) { return flight(unit_index / options_.pieces); }
  std::int32_t slot_of(std::int32_t lane_index) const { return lane_index / options_.lanes; }
  // order: with the pointer comes the whole heap; pairs with add_heap().
  Heap* find_heap(std::uint32_t op) const { return heaps_[op].load(std::memory_order_acquire); }
  std::size_t random_below(std::size_t bound) { return engine_() % bound; }

  void enqueue(std::int32_t unit_index);
  WriteRequest make_write(std::int32_t unit_index, std::int32_t number);
  std::size_t make_chain(Lane& from, std::span<WriteRequest> chain, std::span<std::int32_t> units);
  void pump_all(Nanos now);
  void pump(std::int32_t lane_index, Nanos now);
  void commit(Lane& from, std::span<const WriteRequest> chain, std::span<const std::int32_t> units);
  bool stall(Lane& from, Nanos now);
  void lose(std::int32_t slot, const std::string& why);

  bool poll_sends();
  void complete(const ibv_wc& completion);
  void write_done(std::int32_t unit_index, bool failed);
  void finish(Flight& f, std::int32_t writes);
  bool poll_receives(std::span<TransportEvent> events, std::size_t& count);
  bool arrive(const ibv_wc& completion, TransportEvent& event);
  void write_stamp(const Heap& heap, const TransportEvent& event);
  void deliver(const TransportEvent& event, std::span<TransportEvent> events, std::size_t& count);
  void shuffle_out(std::span<TransportEvent> events, std::size_t& count, bool one);
  void drain(std::span<TransportEvent> events, std::size_t& count);

  std::int32_t rank_;
  VerbsOptions options_;
  std::string address_;
  std::string last_error_;
  // Closed from the bottom up: what is opened later uses what was opened before.
  VerbsDevice device_;
  VerbsObject<ibv_cq> send_completions_{nullptr};
  VerbsObject<ibv_cq> receive_completions_{nullptr};
  std::array<std::unique_ptr<Heap>, kMaxOperators> owned_heaps_;
  std::unique_ptr<QueuePairs> pairs_;
  std::array<std::atomic<Heap*>, kMaxOperators> heaps_ = {};
  std::array<std::atomic<std::int64_t>, kMaxOperators> bytes_sent_ = {};

  std::vector<std::int32_t> slots_;  // by rank; kNone: no peer of ours
  std::vector<bool> lost_;           // by slot
  std::vector<Lane> lanes_;          // slot * lanes + lane
  std::vector<Flight> flights_;
  std::vector<Unit> units_;  // flight * pieces + piece
  std::vector<std::int32_t> free_flights_;
  std::vector<std::int32_t> busy_;   // lanes with units that wait
  std::vector<std::int32_t> ready_;  // flights that are done, a ring
  std::size_t ready_first_ = 0;
  std::size_t ready_count_ = 0;
  int send_depth_ = 0;
  int receives_missing_ = 0;
  std::int32_t in_flight_ = 0;  // writes, over all lanes
  std::int32_t max_in_flight_ = 0;
  std::vector<TransportEvent> shuffled_;  // arrivals that wait to be told
  std::minstd_rand engine_;
  Nanos last_poll_ = 0;
  Nanos last_news_ = 0;
};

VerbsEndpoint::VerbsEndpoint(std::int32_t rank, std::int32_t world, const VerbsOptions& options)
    : rank_(rank),
      options_(options),
      slots_(static_cast<std::size_t>(world), kNone),
      engine_(static_cast<unsigned>(options.shuffle_seed + 1)) {
  MK_CHECK(rank >= 0 && rank < world && world <= 1 << 16);
  MK_CHECK(options.queue_depth >= 1 && options.pieces >= 1 && options.lanes >= 1 && options.lanes <= 255);
  MK_CHECK(options.send_depth >= 1 && options.receive_depth >= 1 && options.signal_every >= 1);
  MK_CHECK(counted() || options.shuffle_seed == 0);
  if (!counted()) options_.pieces = 1;
  if (options_.mode == VerbsMode::kEfa) options_.lanes = 1;
  if (options.peers.empty()) {
    for (std::int32_t peer = 0; peer < world; ++peer) {
      if (peer != rank) options_.peers.push_back(peer);
    }
  }
  for (std::size_t slot = 0; slot < options_.peers.size(); ++slot) {
    slots_.at(static_cast<std::size_t>(options_.peers[slot])) = static_cast<std::int32_t>(slot);
  }
  lost_.resize(options_.peers.size());
  flights_.resize(static_cast<std::size_t>(options_.queue_depth));
  units_.resize(flights_.size() * static_cast<std::size_t>(options_.pieces));
  ready_.resize(flights_.size());
  free_flights_.reserve(flights_.size());
  for (std::int32_t i = options_.queue_depth; i-- > 0;) free_flights_.push_back(i);
  shuffled_.reserve(kShuffled);
}

Status VerbsEndpoint::open() {
  const VerbsLibrary& library = options_.library != nullptr ? *options_.library : verbs_library();
  if (!library.obstacle.empty()) return Error{ErrorKind::kUnsupported, library.obstacle};
  Result<VerbsDevice> opened = open_device(library, options_.sysfs, options_.nic, options_.gid_index);
  if (!opened.ok()) return opened.error();
  device_ = std::move(opened).value();

  const auto lane_count = options_.peers.size() * static_cast<std::size_t>(options_.lanes);
  const int most = device_.attributes.max_cqe;
  options_.receive_depth = std::min(options_.receive_depth, most);
  const auto wanted = static_cast<int>(std::min<std::size_t>(lane_count * static_cast<std::size_t>(options_.send_depth),
                                                             static_cast<std::size_t>(most)));
  const auto create_queue = [&](int entries, VerbsObject<ibv_cq>& queue) {
    ibv_cq* made = library.create_cq(device_.context.get(), std::max(1, entries), nullptr, nullptr, 0);
    queue = {made, {library.destroy_cq}};
    return made != nullptr;
  };
  if (!create_queue(wanted, send_completions_) || !create_queue(options_.receive_depth, receive_completions_)) {
    return device_.error("ibv_create_cq", errno);
  }
  QueuePairsConfig config;
  config.device = &device_;
  config.send_completions = send_completions_.get();
  config.receive_completions = receive_completions_.get();
  config.rank = rank_;
  config.peers = options_.peers;
  config.lanes = options_.lanes;
  config.send_depth = options_.send_depth;
  config.receive_depth = options_.receive_depth;
  config.timeout = options_.timeout;
  config.retry_count = options_.retry_count;
  config.traffic_class = options_.traffic_class;
  config.service_level = options_.service_level;
  config.mode = static_cast<std::uint32_t>(options_.mode) | (options_.notify ? 16u : 0u) |
                static_cast<std::uint32_t>(options_.pieces) << 8;
  auto pairs = options_.mode == VerbsMode::kEfa ? create_efa_queue_pairs(config) : create_rc_queue_pairs(config);
  if (!pairs.ok()) return pairs.error();
  pairs_ = std::move(pairs).value();

  send_depth_ = pairs_->send_depth();
  // Every write in flight may end in a completion, for which there must be a place.
  max_in_flight_ = std::min(wanted, pairs_->max_in_flight());
  lanes_.resize(lane_count);
  for (Lane& each : lanes_) each.flying.resize(completes_in_order() ? static_cast<std::size_t>(send_depth_) : 0);
  busy_.reserve(lane_count);
  receives_missing_ = options_.receive_depth - pairs_->post_receives(options_.receive_depth);
  address_ = pairs_->address();
  return Ok{};
}

std::string VerbsEndpoint::name() const {
  const char* mode = options_.mode == VerbsMode::kOrdered   ? "verbs"
                     : options_.mode == VerbsMode::kCounted ? "verbs (counted)"
                                                            : "efa";
  return fmt::format("{} on {}", mode, options_.nic.name());
}

Status VerbsEndpoint::connect(std::int32_t peer, std::string_view address) {
  const std::int32_t slot = slots_.at(static_cast<std::size_t>(peer));
  if (slot == kNone) return Ok{};
  return pairs_->connect(slot, peer, address);
}

Result<RemoteHeap> VerbsEndpoint::add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) {
  MK_CHECK_OP(op, <, kMaxOperators);
  MK_CHECK(owned_heaps_[op] == nullptr && memory.data != nullptr && memory.bytes > 0);
  Result<Registration> registration = register_memory(device_, memory);
  if (!registration.ok()) return registration.error();
  auto heap = std::make_unique<Heap>();
  heap->registration = std::move(registration).value();
  heap->data = static_cast<std::byte*>(memory.data);
  heap->bytes = memory.bytes;
  heap->last_epoch = start_epoch;
  heap->remotes.resize(slots_.size());
  const RemoteHeap told{heap->registration.region->rkey, reinterpret_cast<std::uint64_t>(memory.data)};
  owned_heaps_[op] = std::move(heap);
  // order: the heap is complete when a put or an arrival finds it; pairs with find_heap().
  heaps_[op].store(owned_heaps_[op].get(), std::memory_order_release);
  return told;
}

void VerbsEndpoint::set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) {
  MK_CHECK(owned_heaps_[op] != nullptr);
  owned_heaps_[op]->remotes.at(static_cast<std::size_t>(peer)) = heap;
}

void VerbsEndpoint::remove_heap(std::uint32_t op) {
  // order: pairs with find_heap(). Nobody uses the heap now: the executor has removed the operator, and the thread that
  // polls has begun another round since (HostNetwork::remove_operator()).
  heaps_[op].store(nullptr, std::memory_order_release);
  owned_heaps_[op].reset();
}

// Posts.

PostStatus VerbsEndpoint::post(const Put& put, Nanos now) {
  MK_CHECK_OP(put.src_rank, ==, rank_);
  const std::int32_t slot = slots_.at(static_cast<std::size_t>(put.dst_rank));
  MK_CHECK(slot != kNone);
  if (lost_[static_cast<std::size_t>(slot)]) return PostStatus::kFatal;
  if (free_flights_.empty()) return PostStatus::kFull;
  const Heap* heap = find_heap(put.op);
  MK_CHECK(heap != nullptr);
  // Every rank's heap has the same layout, so the peer's ends where ours does.
  MK_CHECK(put.bytes >= 0 && put.src_offset >= 0 && put.src_offset + put.bytes <= heap->bytes);
  MK_CHECK(put.dst_offset >= 0 && put.dst_offset + put.bytes <= heap->bytes);
  MK_CHECK(put.flag >= 0 && (counted() || (put.flag + 1) * kStampBytes <= heap->bytes));
  // The receiver knows the epoch, and makes the stamp of it.
  MK_CHECK(nic_stamps() || put.value == use_of_epoch(put.epoch));
  if (put.flag >= kShortFlags && !nic_stamps()) {
    last_error_ = fmt::format(
        "the operator has more than {} flags, which an immediate of 32 bits cannot name: take "
        "larger tiles or chunks",
        kShortFlags);
    return PostStatus::kFatal;
  }
  const std::int32_t index = free_flights_.back();
  free_flights_.pop_back();
  Flight& f = flight(index);
  f = {put, 0, false};
  bytes_sent_[put.op].fetch_add(put.bytes, std::memory_order_relaxed);
  last_news_ = now;
  const Split split{put.bytes, options_.pieces};
  for (std::int32_t piece = 0; piece < options_.pieces; ++piece) {
    const auto fragments = static_cast<std::int32_t>(ceil_div(split.size(piece), pairs_->max_message()));
    Unit& u = unit(index * options_.pieces + piece);
    u = {};
    u.writes = nic_stamps() ? fragments + 1 : std::max(1, fragments);
    const std::size_t choice = options_.shuffle_seed != 0
                                   ? random_below(static_cast<std::size_t>(options_.lanes))
                                   : static_cast<std::size_t>((put.flag + piece) % options_.lanes);
    u.lane = slot * options_.lanes + static_cast<std::int32_t>(choice);
    f.writes_left += u.writes;
  }
  for (std::int32_t piece = 0; piece < options_.pieces; ++piece) enqueue(index * options_.pieces + piece);
  return PostStatus::kPosted;
}

// Puts a unit into the queue of its lane.
void VerbsEndpoint::enqueue(std::int32_t unit_index) {
  Unit& u = unit(unit_index);
  Lane& to = lane(u.lane);
  u.next = kNone;
  const bool jumps =
      options_.shuffle_seed != 0 && to.head != kNone && unit(to.head).posted == 0 && random_below(2) == 0;
  if (to.head == kNone) {
    to.head = to.tail = unit_index;
  } else if (jumps) {
    u.next = to.head;
    to.head = unit_index;
  } else {
    unit(to.tail).next = unit_index;
    to.tail = unit_index;
  }
  if (to.busy) return;
  to.busy = true;
  busy_.push_back(u.lane);
}

// Write `number` of a unit.
WriteRequest VerbsEndpoint::make_write(std::int32_t unit_index, std::int32_t number) {
  const Unit& u = unit(unit_index);
  const Put& put = flight_of(unit_index).put;
  const Heap& heap = *find_heap(put.op);
  const RemoteHeap& remote = heap.remotes[static_cast<std::size_t>(put.dst_rank)];
  const bool last = number == u.writes - 1;
  WriteRequest write;
  write.destination_key = static_cast<std::uint32_t>(remote.key);
  write.has_immediate = last && !nic_stamps();
  write.immediate =
      encode(ShortImmediate{put.op, static_cast<std::uint32_t>(put.epoch & 0xf), static_cast<std::uint32_t>(put.flag)});
  if (last && nic_stamps()) {
    // order: the same queue pair writes the payload first, and so the stamp is seen after it.
    write.source = &put.value;
    write.bytes = kStampBytes;
    write.copied = true;
    write.destination = remote.address + static_cast<std::uint64_t>(put.flag * kStampBytes);
    return write;
  }
  const Split split{put.bytes, options_.pieces};
  const std::int32_t piece = unit_index % options_.pieces;
  const std::int64_t begin = number * pairs_->max_message();
  const std::int64_t offset = split.begin(piece) + begin;
  // order: the source's bytes were written before the put's record was published, which our thread has acquired
  // (CommandRing::peek()); the provider's doorbell orders them before the NIC's read.
  write.source = heap.data + put.src_offset + offset;
  write.bytes = static_cast<std::uint32_t>(std::min(split.size(piece) - begin, pairs_->max_message()));
  write.source_key = heap.registration.region->lkey;
  // The processor reads a few bytes sooner than the NIC does, unless they are a GPU's.
  write.copied = write.bytes > 0 && write.bytes <= pairs_->max_copied() && heap.registration.way == MemoryWay::kHost;
  write.destination = remote.address + static_cast<std::uint64_t>(put.dst_offset + offset);
  return write;
}

// What a lane's queue would send next, as much as there is room for.
std::size_t VerbsEndpoint::make_chain(Lane& from, std::span<WriteRequest> chain, std::span<std::int32_t> units) {
  // On SRD all lanes share one queue pair, whose depth is that of all together.
  const std::int32_t free = std::min(send_depth_ - from.in_flight, max_in_flight_ - in_flight_);
  const std::size_t room = std::min(chain.size(), static_cast<std::size_t>(std::max(0, free)));
  std::size_t count = 0;
  for (std::int32_t index = from.head; index != kNone && count < room; index = unit(index).next) {
    const Unit& u = unit(index);
    for (std::int32_t number = u.posted; number < u.writes && count < room; ++number) {
      // Without order the immediate waits until all other fragments of its piece are known to be there.
      if (counted() && number == u.writes - 1 && u.done < number) break;
      chain[count] = make_write(index, number);
      units[count++] = index;
    }
  }
  return count;
}

void VerbsEndpoint::pump_all(Nanos now) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < busy_.size(); ++i) {
    const std::int32_t index = busy_[i];
    pump(index, now);
    lane(index).busy = lane(index).head != kNone;
    if (lane(index).busy) busy_[kept++] = index;
  }
  busy_.resize(kept);
}

// Posts what waits in a lane, in order, with one doorbell per chain.
void VerbsEndpoint::pump(std::int32_t lane_index, Nanos now) {
  Lane& from = lane(lane_index);
  if (from.stalled_since != kNever && now < from.retry_at) return;
  std::array<WriteRequest, kMaxChain> chain;
  std::array<std::int32_t, kMaxChain> units;
  while (from.head != kNone) {
    const std::size_t count = make_chain(from, chain, units);
    if (count == 0) return;
    std::int32_t since = from.since_signal;
    for (std::size_t i = 0; i < count; ++i) {
      // Completions cost more than writes, so one stands for many. The chain's last has one, lest nothing be heard of
      // it.
      chain[i].signaled = !completes_in_order() || ++since >= options_.signal_every || i + 1 == count;
      if (chain[i].signaled) since = 0;
      const std::uint32_t low = completes_in_order() ? from.next_number + static_cast<std::uint32_t>(i)
                                                     : static_cast<std::uint32_t>(units[i]);
      chain[i].id = std::uint64_t{static_cast<std::uint32_t>(lane_index)} << 32 | low;
    }
    std::size_t accepted = 0;
    const int code = pairs_->post(slot_of(lane_index), lane_index % options_.lanes, {chain.data(), count}, accepted);
    commit(from, {chain.data(), accepted}, {units.data(), accepted});
    if (code == 0) {
      from.stalled_since = kNever;
      continue;
    }
    if (accepted > 0) from.stalled_since = kNever;
    if (is_momentary(code) && !stall(from, now)) return;
    return lose(slot_of(lane_index), fmt::format("ibv_post_send says {}", std::strerror(code)));
  }
}

// The writes of `chain` are posted.
void VerbsEndpoint::commit(Lane& from, std::span<const WriteRequest> chain, std::span<const std::int32_t> units) {
  for (std::size_t i = 0; i < chain.size(); ++i) {
    Unit& u = unit(units[i]);
    if (completes_in_order()) {
      from.flying[from.next_number % static_cast<std::uint32_t>(send_depth_)] = units[i];
      ++from.next_number;
      from.since_signal = chain[i].signaled ? 0 : from.since_signal + 1;
    }
    ++from.in_flight;
    ++in_flight_;
    ++u.posted;
    // A piece that waits for its fragments comes back from write_done().
    const bool waits = counted() && u.posted == u.writes - 1 && u.done < u.posted;
    if (u.posted < u.writes && !waits) continue;
    MK_CHECK_OP(from.head, ==, units[i]);
    from.head = u.next;
    if (from.head == kNone) from.tail = kNone;
  }
}

// True when posting has failed for the moment for too long.
bool VerbsEndpoint::stall(Lane& from, Nanos now) {
  if (from.stalled_since == kNever) {
    from.stalled_since = now;
    from.retry_delay_ns = kFirstRetryNs;
  } else if (now - from.stalled_since >= options_.max_post_failures_ns) {
    return true;
  } else {
    from.retry_delay_ns = std::min(2 * from.retry_delay_ns, kLastRetryNs);
  }
  from.retry_at = now + from.retry_delay_ns;
  return false;
}

// Nothing is posted to a peer any more. What is in flight still completes.
void VerbsEndpoint::lose(std::int32_t slot, const std::string& why) {
  const auto peer = static_cast<std::size_t>(slot);
  if (!lost_[peer]) {
    last_error_ = fmt::format("writing to rank {}: {}", options_.peers[peer], why);
    lost_[peer] = true;
  }
  for (std::int32_t l = 0; l < options_.lanes; ++l) {
    Lane& from = lane(slot * options_.lanes + l);
    while (from.head != kNone) {
      const std::int32_t index = from.head;
      Unit& u = unit(index);
      from.head = u.next;
      const std::int32_t unposted = u.writes - u.posted;
      u.posted = u.writes;
      flight_of(index).failed = true;
      finish(flight_of(index), unposted);
    }
    from.tail = kNone;
  }
}

// Completions.

int VerbsEndpoint::poll(Nanos now, std::span<TransportEvent> events) {
  last_poll_ = now;
  if (!busy_.empty()) pump_all(now);
  std::size_t count = 0;
  drain(events, count);
  for (bool more = true; more && count < events.size();) {
    more = poll_sends();
    drain(events, count);
  }
  while (count < events.size() && poll_receives(events, count)) {
  }
  if (!shuffled_.empty()) shuffle_out(events, count, false);
  // What has completed may have made room.
  if (!busy_.empty()) pump_all(now);
  if (count > 0) last_news_ = now;
  return static_cast<int>(count);
}

// Tells of puts that are done.
void VerbsEndpoint::drain(std::span<TransportEvent> events, std::size_t& count) {
  while (count < events.size() && ready_count_ > 0) {
    const std::int32_t index = ready_[ready_first_];
    ready_first_ = (ready_first_ + 1) % ready_.size();
    --ready_count_;
    const Flight& f = flight(index);
    const Put& put = f.put;
    events[count++] = {
        f.failed ? EventKind::kFailed : EventKind::kSent, put.dst_rank, put.id, put.op, put.epoch, put.flag};
    free_flights_.push_back(index);
  }
}

// True when there may be more.
bool VerbsEndpoint::poll_sends() {
  std::array<ibv_wc, kEntriesPerRead> completions;
  const int found = ibv_poll_cq(send_completions_.get(), kEntriesPerRead, completions.data());
  for (int i = 0; i < found; ++i) complete(completions[static_cast<std::size_t>(i)]);
  return found == kEntriesPerRead;
}

void VerbsEndpoint::complete(const ibv_wc& completion) {
  const auto lane_index = static_cast<std::int32_t>(completion.wr_id >> 32);
  const auto low = static_cast<std::uint32_t>(completion.wr_id);
  Lane& from = lane(lane_index);
  if (from.dead) return;
  const bool failed = completion.status != IBV_WC_SUCCESS;
  if (completes_in_order()) {
    // All writes before this one are done; when it has failed, so have all after it: the queue pair is in error.
    const auto depth = static_cast<std::uint32_t>(send_depth_);
    while (from.in_flight > 0) {
      const std::uint32_t number = from.next_number - static_cast<std::uint32_t>(from.in_flight);
      const auto ahead = static_cast<std::int32_t>(number - low);
      if (ahead > 0 && !failed) break;
      --from.in_flight;
      --in_flight_;
      // Those that are flushed complete too, for which there must still be a place.
      if (ahead > 0) --max_in_flight_;
      write_done(from.flying[number % depth], failed && ahead >= 0);
    }
    from.dead = failed;
  } else {
    --from.in_flight;
    --in_flight_;
    write_done(static_cast<std::int32_t>(low), failed);
  }
  if (!failed) return;
  lose(slot_of(lane_index), device_.library->wc_status_str(completion.status));
}

void VerbsEndpoint::write_done(std::int32_t unit_index, bool failed) {
  Unit& u = unit(unit_index);
  Flight& f = flight_of(unit_index);
  f.failed |= failed;
  ++u.done;
  if (counted() && u.posted == u.writes - 1 && u.done == u.posted) {
    if (f.failed || lost_[static_cast<std::size_t>(slot_of(u.lane))]) {
      f.failed = true;
      u.posted = u.writes;
      finish(f, 1);
    } else {
      enqueue(unit_index);  // its fragments are there: now the immediate
    }
  }
  finish(f, 1);
}

void VerbsEndpoint::finish(Flight& f, std::int32_t writes) {
  if (writes == 0) return;
  MK_CHECK_OP(f.writes_left, >=, writes);
  f.writes_left -= writes;
  if (f.writes_left > 0) return;
  MK_CHECK_OP(ready_count_, <, ready_.size());
  ready_[(ready_first_ + ready_count_) % ready_.size()] = static_cast<std::int32_t>(&f - flights_.data());
  ++ready_count_;
}

// True when there may be more.
bool VerbsEndpoint::poll_receives(std::span<TransportEvent> events, std::size_t& count) {
  std::array<ibv_wc, kEntriesPerRead> completions;
  const int room = static_cast<int>(std::min<std::size_t>(kEntriesPerRead, events.size() - count));
  const int found = ibv_poll_cq(receive_completions_.get(), room, completions.data());
  for (int i = 0; i < found; ++i) {
    TransportEvent event;
    if (arrive(completions[static_cast<std::size_t>(i)], event)) deliver(event, events, count);
  }
  receives_missing_ += std::max(0, found);
  // Few at a time would cost a doorbell each, many would let the queue run dry.
  if (receives_missing_ > 0 && receives_missing_ >= options_.receive_depth / 4) {
    receives_missing_ -= pairs_->post_receives(receives_missing_);
  }
  return found == room;
}

// Turns an immediate into an event; false when it is nobody's.
bool VerbsEndpoint::arrive(const ibv_wc& completion, TransportEvent& event) {
  if (completion.status != IBV_WC_SUCCESS) {
    // A peer's queue pair has broken; its own writes fail there, and ours to it fail here.
    if (completion.status != IBV_WC_WR_FLUSH_ERR) {
      last_error_ = fmt::format("receiving from rank {}: {}", pairs_->peer_of(completion),
                                device_.library->wc_status_str(completion.status));
    }
    return false;
  }
  const ShortImmediate immediate = decode_short_immediate(be32toh(completion.imm_data));
  Heap* heap = find_heap(immediate.op);
  // An aborted operator's heap goes while peers still write.
  if (heap == nullptr && !counted()) return false;
  std::uint64_t epoch = immediate.epoch;
  if (heap != nullptr) {
    epoch = full_short_epoch(immediate.epoch, heap->last_epoch);
    if (static_cast<std::int64_t>(epoch - heap->last_epoch) > 0) heap->last_epoch = epoch;
  }
  // order: a receive completes when the bytes of its write are in memory, and polling it acquires them (the provider's
  // barrier between a completion and what it stands for); pairs with make_write() on the sender.
  event = {counted() ? EventKind::kArrived : EventKind::kStamped,
           pairs_->peer_of(completion),
           0,
           immediate.op,
           epoch,
           static_cast<std::int64_t>(immediate.flag)};
  if (!counted()) write_stamp(*heap, event);
  return true;
}

// Ordered, told: one write has brought payload and news, and the stamp is ours to write.
void VerbsEndpoint::write_stamp(const Heap& heap, const TransportEvent& event) {
  // One that no heap has room for is a peer's mistake, which the proxy reports.
  if ((event.flag + 1) * kStampBytes > heap.bytes) return;
  // order: whoever acquires the stamp sees the payload, which arrive() has acquired; pairs with the executor's wait.
  std::atomic_ref<std::uint32_t>(reinterpret_cast<std::uint32_t*>(heap.data)[event.flag])
      .store(use_of_epoch(event.epoch), std::memory_order_release);
}

void VerbsEndpoint::deliver(const TransportEvent& event, std::span<TransportEvent> events, std::size_t& count) {
  if (options_.shuffle_seed == 0) {
    events[count++] = event;
    return;
  }
  if (shuffled_.size() == kShuffled) shuffle_out(events, count, true);
  shuffled_.push_back(event);
}

// Tells of held arrivals in any order: of one, or of as many as chance will have it, so that some wait for the next
// poll.
void VerbsEndpoint::shuffle_out(std::span<TransportEvent> events, std::size_t& count, bool one) {
  do {
    if (shuffled_.empty() || count == events.size()) return;
    std::swap(shuffled_[random_below(shuffled_.size())], shuffled_.back());
    events[count++] = shuffled_.back();
    shuffled_.pop_back();
  } while (!one && random_below(8) != 0);
}

Nanos VerbsEndpoint::next_event() const {
  if (!shuffled_.empty() || ready_count_ > 0 || !busy_.empty()) return last_poll_;
  return last_poll_ + std::min((last_poll_ - last_news_) / kIdleShare, kLongestPauseNs);
}

}  // namespace

Result<std::unique_ptr<ProcessEndpoint>> create_verbs_endpoint(std::int32_t rank, std::int32_t world,
                                                               const VerbsOptions& options) {
  auto endpoint = std::make_unique<VerbsEndpoint>(rank, world, options);
  if (Status status = endpoint->open(); !status.ok()) return status.error();
  return std::unique_ptr<ProcessEndpoint>(std::move(endpoint));
}

namespace {

// Why no port can be used; `obstacle_of` has the last word about one that opens.
std::string first_obstacle(const std::function<std::string(const VerbsDevice&)>& obstacle_of) {
  if (!verbs_library().obstacle.empty()) return verbs_library().obstacle;
  const std::vector<Nic> nics = find_nics("/sys");
  if (nics.empty()) return "this machine has no RDMA device (/sys/class/infiniband is empty)";
  std::string why;
  for (const Nic& nic : nics) {
    if (!nic.active) {
      why = fmt::format("{} is not active", nic.name());
      continue;
    }
    const Result<VerbsDevice> device = open_device(verbs_library(), "/sys", nic, -1);
    why = device.ok() ? obstacle_of(*device) : device.error().message;
    if (why.empty()) return why;
  }
  return why;
}

}  // namespace

std::string verbs_obstacle() {
  return first_obstacle([](const VerbsDevice&) { return std::string(); });
}

std::string efa_obstacle() { return first_obstacle(efa_device_obstacle); }

}  // namespace mkernel
