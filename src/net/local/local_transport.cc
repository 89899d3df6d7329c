#include "net/local/local_transport.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/check.h"
#include "plan/topology.h"

namespace mkernel {
namespace {

constexpr Nanos kReceiverNotReadyNs = 1'000;  // until a piece tries again to get into a full arrival queue

// What a destination learns of a piece that has landed.
struct Arrival {
  Nanos when = 0;
  std::int32_t peer = -1;
  std::uint32_t op = 0;
  std::uint64_t epoch = 0;
  std::int64_t flag = 0;
};

// Bounded queue with many pushers and one popper, like CommandRing; here the entries are too large for one word, so
// each has a turn beside it: position + 1 of the arrival that it holds.
class ArrivalQueue {
 public:
  explicit ArrivalQueue(std::size_t depth) : entries_(depth) {}

  bool try_push(const Arrival& arrival) {
    std::uint64_t position = head_.load(std::memory_order_relaxed);
    // Every round that fails is one in which another thread reserved a position.
    do {
      // order: the popper has read the entry before we overwrite it; pairs with pop().
      if (static_cast<std::int64_t>(position - tail_.load(std::memory_order_acquire)) >=
          static_cast<std::int64_t>(entries_.size())) {
        return false;
      }
    } while (!head_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed));
    Entry& entry = entries_[position % entries_.size()];
    entry.arrival = arrival;
    // order: the entry, and the piece's bytes that we have landed before; pairs with front().
    entry.turn.store(position + 1, std::memory_order_release);
    return true;
  }

  const Arrival* front() const {
    const std::uint64_t position = tail_.load(std::memory_order_relaxed);
    const Entry& entry = entries_[position % entries_.size()];
    // order: the entry and the bytes it stands for; pairs with try_push().
    return entry.turn.load(std::memory_order_acquire) == position + 1 ? &entry.arrival : nullptr;
  }

  void pop() {
    // order: we have read the entry; pairs with try_push().
    tail_.store(tail_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

 private:
  struct Entry {
    std::atomic<std::uint64_t> turn = 0;
    Arrival arrival;
  };
  std::vector<Entry> entries_;
  alignas(64) std::atomic<std::uint64_t> head_ = 0;
  alignas(64) std::atomic<std::uint64_t> tail_ = 0;
};

// Asserts that one thread at a time is inside an endpoint: a network's queues have a single poster.
class SingleUser {
 public:
  explicit SingleUser(std::atomic<bool>& inside) : inside_(inside) {
    // order: whatever the user before us did; pairs with the destructor, in case users take turns.
    MK_CHECK(!inside_.exchange(true, std::memory_order_acquire));
  }
  ~SingleUser() { inside_.store(false, std::memory_order_release); }  // order: pairs with the constructor
  SingleUser(const SingleUser&) = delete;
  SingleUser& operator=(const SingleUser&) = delete;

 private:
  std::atomic<bool>& inside_;
};

}  // namespace

class LocalNetwork::LocalEndpoint final : public Endpoint {
 public:
  LocalEndpoint(LocalNetwork& network, std::int32_t rank, std::int32_t world, std::pmr::memory_resource* memory);

  PostStatus post(const Put& put, Nanos now) override;
  int poll(Nanos now, std::span<TransportEvent> events) override;
  Nanos next_event() const override;
  int arrivals_per_put() const override { return link().unordered ? link().pieces : 0; }

  // order: none needed, the counter is a statistic.
  std::int64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 private:
  // A put in flight. Aligned so that it lies in two cache lines.
  struct alignas(64) Flight {
    Put put;
    std::int32_t pieces_left = 0;
    bool failed = false;
    Nanos copied_at = 0;  // when all its bytes have been moved by what stands beside the link
  };
  // What is to be done with a piece of a flight.
  enum class Stage : std::uint8_t {
    kDepart,  // the egress is free for it: book the ingress
    kLand,    // move its bytes and raise its arrival
    kArrive,  // the bytes are there, only the arrival is to be raised
    kLose,    // the destination is dead, and now we know
  };
  // A piece and the time when something is to be done with it. Small, as a heap of them is walked for every put.
  struct Due {
    Nanos when = 0;
    std::uint32_t number = 0;  // equal times: first booked, first served; wraps, as few are booked at a time
    std::int32_t piece = 0;    // flight * pieces per put + piece of the flight
  };
  struct Later {
    bool operator()(const Due& a, const Due& b) const {
      return a.when != b.when ? a.when > b.when : static_cast<std::int32_t>(a.number - b.number) > 0;
    }
  };

  const LinkModel& link() const { return network_.link_; }
  Port& port(std::int32_t rank) const { return network_.ports_[static_cast<std::size_t>(rank)]; }
  // order: none needed. Death has no happens-before.
  bool dead(std::int32_t rank) const { return port(rank).dead.load(std::memory_order_relaxed); }
  double random();
  Nanos wire_ns(std::int64_t bytes) const;
  std::int64_t piece_bytes(std::int32_t piece) const;
  void leave(std::int32_t piece, Nanos now);
  Nanos book_copier(std::int64_t bytes, Nanos now);
  Nanos book_ingress(const Flight& flight, std::int64_t bytes, Nanos departure);
  std::int32_t flight_of(std::int32_t piece) const { return piece / pieces(); }
  std::int32_t pieces() const { return link().unordered ? link().pieces : 1; }
  void schedule(std::int32_t piece, Nanos when, Stage stage);
  bool carry(const Due& due, Nanos now);

  LocalNetwork& network_;
  std::int32_t rank_;
  std::linear_congruential_engine<std::uint64_t, 6364136223846793005, 1442695040888963407, 0> engine_;  // Knuth's MMIX
  std::atomic<bool> inside_ = false;
  std::pmr::vector<Flight> flights_;
  std::pmr::vector<std::int32_t> free_flights_;
  std::pmr::vector<Stage> stages_;  // by piece, see Due
  std::pmr::vector<Due> due_;       // a heap, soonest first
  std::uint32_t next_number_ = 0;
  Nanos egress_free_ = 0;
  Nanos copier_free_ = 0;
  std::vector<Nanos> last_arrival_;  // by destination; only for jitter that must keep order

  std::atomic<std::int64_t> bytes_sent_ = 0;
  ArrivalQueue arrivals_;  // other ranks' threads push
};

LocalNetwork::LocalEndpoint::LocalEndpoint(LocalNetwork& network, std::int32_t rank, std::int32_t world,
                                           std::pmr::memory_resource* memory)
    : network_(network),
      rank_(rank),
      flights_(static_cast<std::size_t>(network.link_.queue_depth), memory),
      free_flights_(memory),
      stages_(memory),
      due_(memory),
      arrivals_(static_cast<std::size_t>(network.link_.unordered ? network.link_.arrival_depth : 1)) {
  std::seed_seq seeds{static_cast<std::uint32_t>(link().seed), static_cast<std::uint32_t>(link().seed >> 32),
                      static_cast<std::uint32_t>(rank)};
  engine_.seed(seeds);
  free_flights_.reserve(flights_.size());
  for (std::int32_t i = link().queue_depth; i-- > 0;) free_flights_.push_back(i);
  stages_.resize(flights_.size() * static_cast<std::size_t>(pieces()));
  due_.reserve(stages_.size());
  if (!link().unordered && link().jitter_ns > 0) last_arrival_.resize(static_cast<std::size_t>(world));
}

PostStatus LocalNetwork::LocalEndpoint::post(const Put& put, Nanos now) {
  const SingleUser user(inside_);
  if (dead(rank_)) return PostStatus::kFatal;
  // Before the put is looked at: a full endpoint is asked for many puts in a row, and none of them is in the cache.
  if (free_flights_.empty()) return PostStatus::kFull;
  MK_CHECK_OP(put.src_rank, ==, rank_);
  MK_CHECK(put.dst_rank >= 0 && put.dst_rank < static_cast<std::int32_t>(network_.ports_.size()));
  MK_CHECK_OP(put.bytes, >=, 0);
  if (link().again_probability > 0 && random() < link().again_probability) return PostStatus::kAgain;

  const std::int32_t index = free_flights_.back();
  free_flights_.pop_back();
  Flight& flight = flights_[static_cast<std::size_t>(index)];
  flight = {put, 1, false, book_copier(put.bytes, now)};
  // order: none needed, see bytes_sent().
  bytes_sent_.store(bytes_sent() + put.bytes, std::memory_order_relaxed);
  if (dead(put.dst_rank)) {
    schedule(index * pieces(), now + link().dead_detect_ns, Stage::kLose);
    return PostStatus::kPosted;
  }
  egress_free_ = std::max(now, egress_free_) + link().post_ns;
  flight.pieces_left = pieces();
  for (std::int32_t piece = 0; piece < pieces(); ++piece) leave(index * pieces() + piece, now);
  return PostStatus::kPosted;
}

int LocalNetwork::LocalEndpoint::poll(Nanos now, std::span<TransportEvent> events) {
  const SingleUser user(inside_);
  if (dead(rank_)) return 0;
  std::size_t count = 0;
  while (link().unordered && count < events.size()) {
    const Arrival* arrival = arrivals_.front();
    if (arrival == nullptr) break;
    events[count++] = {EventKind::kArrived, arrival->peer, 0, arrival->op, arrival->epoch, arrival->flag};
    arrivals_.pop();
  }
  while (count < events.size() && !due_.empty() && due_.front().when <= now) {
    std::pop_heap(due_.begin(), due_.end(), Later());
    const Due due = due_.back();
    due_.pop_back();
    if (!carry(due, now)) continue;
    const std::int32_t index = flight_of(due.piece);
    Flight& flight = flights_[static_cast<std::size_t>(index)];
    flight.failed |= stages_[static_cast<std::size_t>(due.piece)] == Stage::kLose;
    if (--flight.pieces_left > 0) continue;
    const Put& put = flight.put;
    events[count++] = {
        flight.failed ? EventKind::kFailed : EventKind::kSent, put.dst_rank, put.id, put.op, put.epoch, put.flag};
    free_flights_.push_back(index);
  }
  return static_cast<int>(count);
}

Nanos LocalNetwork::LocalEndpoint::next_event() const {
  if (dead(rank_)) return kNever;
  Nanos next = due_.empty() ? kNever : due_.front().when;
  if (!link().unordered) return next;
  if (const Arrival* arrival = arrivals_.front()) next = std::min(next, arrival->when);
  return next;
}

double LocalNetwork::LocalEndpoint::random() {
  return static_cast<double>(engine_() >> 11) * 0x1p-53;  // the upper bits are the good ones
}

Nanos LocalNetwork::LocalEndpoint::wire_ns(std::int64_t bytes) const {
  const double rate = link().bytes_per_ns;
  return rate > 0 ? static_cast<Nanos>(std::ceil(static_cast<double>(bytes) / rate)) : 0;
}

std::int64_t LocalNetwork::LocalEndpoint::piece_bytes(std::int32_t piece) const {
  return Split{flights_[static_cast<std::size_t>(flight_of(piece))].put.bytes, pieces()}.size(piece % pieces());
}

// Books the egress for a piece, and the ingress too when it departs at once.
void LocalNetwork::LocalEndpoint::leave(std::int32_t piece, Nanos now) {
  const Nanos departure = egress_free_;
  egress_free_ += wire_ns(piece_bytes(piece));
  if (departure > now) return schedule(piece, departure, Stage::kDepart);
  schedule(piece, book_ingress(flights_[static_cast<std::size_t>(flight_of(piece))], piece_bytes(piece), departure),
           Stage::kLand);
}

// When what moves the bytes beside the link will have moved those of a put that is posted now.
Nanos LocalNetwork::LocalEndpoint::book_copier(std::int64_t bytes, Nanos now) {
  if (link().copy_bytes_per_ns <= 0) return 0;
  const double ns = static_cast<double>(bytes) / link().copy_bytes_per_ns;
  copier_free_ = std::max(now, copier_free_) + link().copy_ns + static_cast<Nanos>(std::ceil(ns));
  return copier_free_;
}

// Books the ingress for `bytes` that depart at `departure`; returns when they arrive.
Nanos LocalNetwork::LocalEndpoint::book_ingress(const Flight& flight, std::int64_t bytes, Nanos departure) {
  const Nanos wire = wire_ns(bytes);
  const Nanos earliest = departure + wire + link().latency_ns;

  // order: none needed. The word is a clock that senders push on; it publishes nothing. Every round that fails is one
  // in which another sender booked.
  std::atomic<Nanos>& ingress = port(flight.put.dst_rank).ingress_free;
  Nanos ingress_free = ingress.load(std::memory_order_relaxed);
  Nanos arrival = std::max(earliest, ingress_free + wire);
  while (!ingress.compare_exchange_weak(ingress_free, arrival, std::memory_order_relaxed)) {
    arrival = std::max(earliest, ingress_free + wire);
  }

  arrival = std::max(arrival, flight.copied_at);
  if (link().jitter_ns > 0) arrival += static_cast<Nanos>(random() * static_cast<double>(link().jitter_ns + 1));
  if (!last_arrival_.empty()) {
    Nanos& last = last_arrival_[static_cast<std::size_t>(flight.put.dst_rank)];
    last = arrival = std::max(arrival, last);
  }
  return arrival;
}

void LocalNetwork::LocalEndpoint::schedule(std::int32_t piece, Nanos when, Stage stage) {
  MK_CHECK_OP(due_.size(), <, due_.capacity());
  stages_[static_cast<std::size_t>(piece)] = stage;
  due_.push_back({when, next_number_++, piece});
  std::push_heap(due_.begin(), due_.end(), Later());
}

// Does what is due; false when it was put off.
bool LocalNetwork::LocalEndpoint::carry(const Due& due, Nanos now) {
  const Stage stage = stages_[static_cast<std::size_t>(due.piece)];
  if (stage == Stage::kLose) return true;
  const Flight& flight = flights_[static_cast<std::size_t>(flight_of(due.piece))];
  const Put& put = flight.put;
  if (dead(put.dst_rank)) {
    schedule(due.piece, now + link().dead_detect_ns, Stage::kLose);
    return false;
  }
  if (stage == Stage::kDepart) {
    schedule(due.piece, book_ingress(flight, piece_bytes(due.piece), due.when), Stage::kLand);
    return false;
  }
  if (stage == Stage::kLand) {
    const Split split{put.bytes, pieces()};
    const std::int32_t piece = due.piece % pieces();
    if (split.size(piece) > 0) network_.landing_->land(put, split.begin(piece), split.size(piece));
  }
  if (!link().unordered) {
    network_.landing_->stamp(put.dst_rank, put.op, put.flag, put.value);
    return true;
  }
  LocalEndpoint& to = *network_.endpoints_[static_cast<std::size_t>(put.dst_rank)];
  if (!to.arrivals_.try_push({due.when, rank_, put.op, put.epoch, put.flag})) {
    schedule(due.piece, now + kReceiverNotReadyNs, Stage::kArrive);
    return false;
  }
  if (network_.on_wake_) network_.on_wake_(put.dst_rank, due.when);
  return true;
}

LocalNetwork::LocalNetwork(std::int32_t world, const LinkModel& link, Landing* landing, Wake on_wake,
                           std::pmr::memory_resource* memory)
    : link_(link), landing_(landing), on_wake_(std::move(on_wake)) {
  MK_CHECK_OP(world, >=, 1);
  MK_CHECK(landing != nullptr);
  MK_CHECK(link.bytes_per_ns >= 0 && link.latency_ns >= 0 && link.jitter_ns >= 0 && link.post_ns >= 0);
  MK_CHECK(link.pieces >= 1 && link.queue_depth >= 1 && link.arrival_depth >= 1);
  ports_ = std::vector<Port>(static_cast<std::size_t>(world));
  endpoints_.reserve(static_cast<std::size_t>(world));
  for (std::int32_t rank = 0; rank < world; ++rank) {
    endpoints_.push_back(std::make_unique<LocalEndpoint>(*this, rank, world, memory));
  }
}

LocalNetwork::~LocalNetwork() = default;

Endpoint* LocalNetwork::endpoint(std::int32_t rank) { return endpoints_.at(static_cast<std::size_t>(rank)).get(); }

void LocalNetwork::kill(std::int32_t rank) {
  ports_.at(static_cast<std::size_t>(rank)).dead.store(true, std::memory_order_relaxed);  // order: none needed
}

std::int64_t LocalNetwork::bytes_sent(std::int32_t rank) const {
  return endpoints_.at(static_cast<std::size_t>(rank))->bytes_sent();
}

}  // namespace mkernel
