#include "net/rails_endpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "net/address_bytes.h"

namespace mkernel {

// Spreads any run of flags evenly, also every second or fourth one, as plans with one flag per chunk and node have
// them: multiples of 2^32 / golden ratio (Knuth, The Art of Computer Programming 3, 6.4).
std::size_t rail_of(std::int64_t flag, std::uint32_t rails) {
  const std::uint32_t mixed = static_cast<std::uint32_t>(flag) * 0x9e3779b1u;
  return static_cast<std::size_t>(std::uint64_t{mixed} * rails >> 32);
}

namespace {

constexpr std::uint32_t kAddressMagic = 0x3152526d;  // "mRR1"

class RailsEndpoint final : public ProcessEndpoint {
 public:
  RailsEndpoint(std::int32_t world, int queue_depth, std::vector<std::unique_ptr<ProcessEndpoint>> rails);

  const std::string& address() const override { return address_; }
  Status connect(std::int32_t peer, std::string_view address) override;
  Result<RemoteHeap> add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) override;
  void set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) override;
  void remove_heap(std::uint32_t op) override;
  std::string name() const override;
  std::int64_t bytes_sent(std::uint32_t op) const override;
  std::string last_error() const override;

  PostStatus post(const Put& put, Nanos now) override;
  void flush(Nanos now) override {
    for (auto& rail : rails_) rail->flush(now);
  }
  int poll(Nanos now, std::span<TransportEvent> events) override;
  Nanos next_event() const override;
  int arrivals_per_put() const override { return rails_.front()->arrivals_per_put(); }

 private:
  struct Peer {
    std::uint32_t rails = 0;  // that both sides have; 0: not connected
    bool lost = false;        // over one of them, and so over all
  };

  std::vector<std::unique_ptr<ProcessEndpoint>> rails_;
  std::string address_;
  std::vector<Peer> peers_;      // by rank
  std::size_t failed_rail_ = 0;  // over which a put last failed
  std::size_t turn_ = 0;         // the rail that is polled first, so that none is always the last to be heard
  int room_ = 0;                 // for puts in flight
};

RailsEndpoint::RailsEndpoint(std::int32_t world, int queue_depth, std::vector<std::unique_ptr<ProcessEndpoint>> rails)
    : rails_(std::move(rails)), peers_(static_cast<std::size_t>(world)), room_(queue_depth) {
  MK_CHECK(!rails_.empty() && rails_.size() <= kMaxRails && queue_depth >= 1);
  append_bytes(address_, kAddressMagic);
  append_bytes(address_, static_cast<std::uint32_t>(rails_.size()));
  for (const auto& rail : rails_) {
    MK_CHECK_OP(rail->arrivals_per_put(), ==, arrivals_per_put());
    append_bytes(address_, static_cast<std::uint32_t>(rail->address().size()));
    address_ += rail->address();
  }
}

Status RailsEndpoint::connect(std::int32_t peer, std::string_view address) {
  std::uint32_t magic = 0;
  std::uint32_t count = 0;
  if (!take_bytes(address, magic) || magic != kAddressMagic || !take_bytes(address, count) || count == 0) {
    return Error{ErrorKind::kIo, fmt::format("rank {} sent no address of rails: does it use another network?", peer)};
  }
  const std::size_t common = std::min<std::size_t>(rails_.size(), count);
  for (std::size_t rail = 0; rail < common; ++rail) {
    std::uint32_t bytes = 0;
    if (!take_bytes(address, bytes) || address.size() < bytes) {
      return Error{ErrorKind::kIo,
                   fmt::format("the address that rank {} sent ends in the middle of rail {}", peer, rail)};
    }
    if (Status status = rails_[rail]->connect(peer, address.substr(0, bytes)); !status.ok()) return status;
    address.remove_prefix(bytes);
  }
  peers_.at(static_cast<std::size_t>(peer)).rails = static_cast<std::uint32_t>(common);
  return Ok{};
}

Result<RemoteHeap> RailsEndpoint::add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) {
  RemoteHeap told;
  for (auto& rail : rails_) {
    Result<RemoteHeap> one = rail->add_heap(op, memory, start_epoch);
    if (!one.ok()) {
      for (std::size_t made = 0; made < told.rails.size(); ++made) rails_[made]->remove_heap(op);
      return one.error();
    }
    told.rails.push_back(std::move(one).value());
  }
  return told;
}

void RailsEndpoint::set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) {
  const std::size_t common = std::min(rails_.size(), heap.rails.size());
  for (std::size_t rail = 0; rail < common; ++rail) rails_[rail]->set_remote(op, peer, heap.rails[rail]);
}

void RailsEndpoint::remove_heap(std::uint32_t op) {
  for (auto& rail : rails_) rail->remove_heap(op);
}

std::string RailsEndpoint::name() const {
  std::string text;
  for (const auto& rail : rails_) text += (text.empty() ? "" : " and ") + rail->name();
  return text;
}

std::int64_t RailsEndpoint::bytes_sent(std::uint32_t op) const {
  std::int64_t bytes = 0;
  for (const auto& rail : rails_) bytes += rail->bytes_sent(op);
  return bytes;
}

std::string RailsEndpoint::last_error() const {
  std::string text = rails_[failed_rail_]->last_error();
  return rails_.size() == 1 || text.empty() ? text : fmt::format("{}: {}", rails_[failed_rail_]->name(), text);
}

PostStatus RailsEndpoint::post(const Put& put, Nanos now) {
  Peer& peer = peers_.at(static_cast<std::size_t>(put.dst_rank));
  MK_CHECK_OP(peer.rails, >, 0u);
  if (peer.lost) return PostStatus::kFatal;
  if (room_ == 0) return PostStatus::kFull;
  // By the flag: the receiving rail knows the epoch of an arrival by the one before, so a rail that is used at all must
  // be used in every epoch of a parity, and every flag is (plans signal also with zero bytes).
  const std::size_t rail = rail_of(put.flag, peer.rails);
  const PostStatus status = rails_[rail]->post(put, now);
  MK_CHECK(status != PostStatus::kFull);
  if (status == PostStatus::kPosted) --room_;
  if (status == PostStatus::kFatal) {
    peer.lost = true;
    failed_rail_ = rail;
  }
  return status;
}

int RailsEndpoint::poll(Nanos now, std::span<TransportEvent> events) {
  std::size_t count = 0;
  for (std::size_t looked = 0; looked < rails_.size() && count < events.size(); ++looked) {
    const std::size_t rail = turn_;
    turn_ = (turn_ + 1) % rails_.size();
    const std::size_t end = count + static_cast<std::size_t>(rails_[rail]->poll(now, events.subspan(count)));
    for (; count < end; ++count) {
      const TransportEvent& event = events[count];
      if (event.kind == EventKind::kSent || event.kind == EventKind::kFailed) ++room_;
      if (event.kind != EventKind::kFailed) continue;
      peers_[static_cast<std::size_t>(event.peer)].lost = true;
      failed_rail_ = rail;
    }
  }
  return static_cast<int>(count);
}

Nanos RailsEndpoint::next_event() const {
  Nanos next = kNever;
  for (const auto& rail : rails_) next = std::min(next, rail->next_event());
  return next;
}

}  // namespace

std::unique_ptr<ProcessEndpoint> create_rails_endpoint(std::int32_t world, int queue_depth,
                                                       std::vector<std::unique_ptr<ProcessEndpoint>> rails) {
  return std::make_unique<RailsEndpoint>(world, queue_depth, std::move(rails));
}

}  // namespace mkernel
