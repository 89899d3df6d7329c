// The proxy: takes command records from a rank's rings, makes network writes of them and posts these.
//
// It knows no thread and no clock: whoever drives it calls step(now), with the steady clock or in virtual time.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "net/ring.h"
#include "net/transport.h"
#include "plan/heap_layout.h"
#include "plan/plan.h"

namespace mkernel {

inline constexpr int kMaxProxyQueue = 32'767;

struct ProxyConfig {
  std::int32_t rank = 0;
  Topology topo;
  std::vector<CommandRing*> rings;  // one per destination node; null for the own node, or for nodes never sent to
  Endpoint* endpoint = nullptr;     // the proxy is its only user
  Landing* landing = nullptr;       // publishes arrivals; needed only when endpoint->arrivals_per_put() > 0
  int queue_depth = 8;              // puts per destination that wait to be posted, 1..kMaxProxyQueue
  int window = 64;                  // and in flight, 1..kMaxProxyQueue: none can use up the endpoint alone
  int batch = 8;                    // records taken per ring and step, at least 1
  Nanos max_post_failures_ns = 60'000'000'000;  // how long posting may fail for the moment; 0: for ever
  // False: step() looks at every ring. True: only at those that ring_filled() has named since they were last found
  // empty; for drivers with one thread and many nodes, where looking at every ring would cost more than all else.
  bool hinted = false;
  std::pmr::memory_resource* memory = std::pmr::get_default_resource();  // for queues and tables; outlives the proxy
};

// Why a rank cannot go on. Plain data, so that reporting it allocates nothing.
struct ProxyFailure {
  bool own_bug = false;  // not the network: a record or an arrival that no correct executor or plan makes
  std::int32_t rank = 0;
  std::int32_t peer = -1;
  std::uint32_t op = 0;
  std::uint64_t epoch = 0;
  std::int64_t task = -1;  // send_id() of the put; -1 when it is about an arrival
  const char* text = "";   // a clause: "the network gave the put up"

  // One sentence.
  std::string message() const;
};

struct ProxyStats {
  std::int64_t records = 0;   // taken from rings
  std::int64_t posts = 0;     // accepted by the endpoint
  std::int64_t bytes = 0;     // in these
  std::int64_t batches = 0;   // steps that posted something, each followed by one flush
  std::int64_t retries = 0;   // posts that failed for the moment
  std::int64_t sent = 0;      // puts completed
  std::int64_t failed = 0;    // puts that will never arrive
  std::int64_t arrivals = 0;  // stamps published by counting, or written by the network and told
};

// One rank's proxy. All members are for one thread at a time, except add_operator(), which may run beside step().
// After construction only add_operator() allocates.
class Proxy {
 public:
  explicit Proxy(const ProxyConfig& config);

  // Makes operator number `op` known before its first record is pushed; `source` must outlive the proxy.
  // `start_epoch` is any epoch fewer than 100 before or after the first one that will be run.
  void add_operator(std::uint32_t op, const PlanSource* source, const HeapLayout& layout, std::uint64_t start_epoch);

  // Handles completions and arrivals, takes records, posts puts. Bounded work, never waits. True if it did something.
  bool step(Nanos now);
  // When step() would next have something to do, apart from records that are pushed from now on; kNever: only then.
  Nanos next_event() const;
  // See ProxyConfig::hinted; call it after a push to the ring of `node`.
  void ring_filled(std::int32_t node);

  // The first thing that went wrong. Nothing is posted to its peer any more; other destinations go on.
  const std::optional<ProxyFailure>& failure() const { return failure_; }
  // Nothing in the rings, in the queues or in flight.
  bool idle() const;
  // Aborts: forgets what is queued; from now on records are taken and thrown away, and nothing is posted.
  void drop();

  const ProxyStats& stats() const { return stats_; }
  std::int64_t bytes_to(std::int32_t node) const { return bytes_to_[static_cast<std::size_t>(node)]; }

 private:
  // Arrivals of one put at this rank, by flag index. Neighbouring epochs differ in parity and so never share a count.
  struct Arrivals {
    std::uint64_t epoch = 0;
    std::uint32_t count = 0;
  };
  struct Operator {
    const PlanSource* source = nullptr;
    HeapLayout layout;
    std::uint32_t flag_count = 0;
    std::uint64_t last_epoch = 0;
    std::vector<Arrivals> arrivals;
  };
  // The rank of our rail on one node, and its queue: `count` entries from `first` on, in a ring within queue_. Half a
  // cache line, as a step looks at many while the endpoint is full.
  struct alignas(32) Destination {
    Nanos stalled_since = kNever;  // when the post of the head first failed for the moment; kNever: it did not
    Nanos retry_at = 0;
    std::int32_t retry_delay_ns = 0;
    std::int16_t first = 0;
    std::int16_t count = 0;
    std::int16_t in_flight = 0;
    bool halted = false;  // nothing is taken or posted any more
    bool busy = false;    // is in busy_
    bool filled = false;  // is in filled_
  };

  Destination& destination(std::int32_t node) { return destinations_[static_cast<std::size_t>(node)]; }
  const Destination& destination(std::int32_t node) const { return destinations_[static_cast<std::size_t>(node)]; }
  CommandRing* ring(std::int32_t node) const { return config_.rings[static_cast<std::size_t>(node)]; }
  std::int32_t rank_on(std::int32_t node) const {
    return config_.topo.rank_of(node, config_.topo.gpu_of(config_.rank));
  }
  // order: with the pointer comes the whole entry; pairs with add_operator(). Null: not known.
  Operator* find_operator(std::uint32_t op) const { return operators_[op].load(std::memory_order_acquire); }
  Put& queued(std::int32_t node, std::int32_t i);

  bool poll_endpoint(Nanos now);
  void handle(const TransportEvent& event);
  void handle_arrival(const TransportEvent& event);

  bool can_take(std::int32_t node) const;
  bool take_all();
  bool take(std::int32_t node, bool& drained);
  void take_record(std::int32_t node, const Record& record);
  const char* make_put(std::int32_t node, const Record& record, Put& put);
  bool discard_all();

  bool post_all(Nanos now);
  bool post(std::int32_t node, Nanos now);
  bool stall(Destination& to, Nanos now);
  bool full_for_too_long(Nanos now);
  void fail(std::int32_t node, std::uint64_t put_id, bool own_bug, const char* text);
  void halt(Destination& to);

  ProxyConfig config_;
  std::uint32_t arrivals_per_put_ = 0;
  std::pmr::vector<Destination> destinations_;  // by node
  std::pmr::vector<std::int64_t> bytes_to_;     // by node
  std::pmr::vector<Put> queue_;
  std::pmr::vector<std::int32_t> busy_;     // nodes whose queue is not empty
  std::pmr::vector<std::int32_t> posting_;  // of these, those to which a step still posts
  std::pmr::vector<std::int32_t> filled_;  // nodes whose ring may hold a record
  std::uint32_t turn_ = 0;                 // where this step begins to look, so that no ring is always the first
  bool completed_ = false;                 // a completion came in this step: an endpoint that was full has room
  Nanos full_since_ = kNever;              // when the endpoint first said that it is full; kNever: it is not
  bool more_events_ = false;               // the endpoint has more to tell than one step handles
  bool more_records_ = false;              // the last step left records that it would have had room for
  bool dropped_ = false;
  Nanos last_step_ = 0;
  Nanos next_retry_ = kNever;  // when the first of the stalled destinations is due again
  ProxyStats stats_;
  std::optional<ProxyFailure> failure_;
  std::array<std::atomic<Operator*>, kMaxOperators> operators_ = {};
  std::array<std::unique_ptr<Operator>, kMaxOperators> owned_operators_;
};

}  // namespace mkernel
