// A network inside one process: every rank has an endpoint, and a link model says when bytes arrive.
//
// It works in whatever time its users pass in. A put is carried by the thread that polls its source's endpoint: when it
// is due, that thread lands the bytes and then the stamp (ordered), or lands the pieces and raises one arrival for each
// at the destination's endpoint (unordered, counted immediates), whose user counts and publishes them.
//
// Model, per put or piece of b bytes with t = b / bytes_per_ns, posted at `now` (cut-through):
//   departure         = max(now, egress_free[src]) + post_ns (first piece)
//   egress_free[src]  = departure + t
//   ingress_free[dst] = max(departure + t + latency_ns, ingress_free[dst] + t)
//   arrival           = max(ingress_free[dst], copied) + uniform jitter of 0..jitter_ns
// The ingress is booked when the put departs, not when it is posted: a put that still waits for its sender's egress
// holds up nobody (docs/decisions/0011). `copied` counts where something beside the link has to move the bytes:
//   copied = max(now, copier_free[src]) + copy_ns + b / copy_bytes_per_ns, and copier_free[src] = copied
// In ordered mode arrivals of one (src, dst) pair are never reordered; pairs are free of each other.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <vector>

#include "net/transport.h"

namespace mkernel {

struct LinkModel {
  double bytes_per_ns = 0;  // per rank and direction, also 10^9 bytes per second; 0: unlimited
  Nanos latency_ns = 0;
  bool unordered = false;
  int pieces = 1;  // unordered: pieces per put, each with an arrival of its own; at least 1
  Nanos jitter_ns = 0;
  std::uint64_t seed = 1;        // of jitter and of failing posts
  double again_probability = 0;  // of a post failing for the moment
  Nanos post_ns = 0;             // what a post costs its sender's link, whatever its size
  Nanos copy_ns = 0;             // what a put costs whoever moves its bytes beside the link, whatever its size
  double copy_bytes_per_ns = 0;  // per sender; 0: the link is all there is
  int queue_depth = 256;         // puts in flight per endpoint; beyond it the endpoint is full
  int arrival_depth = 1024;      // arrivals a destination has not yet polled; beyond it pieces wait at their source
  // How long a sender takes to find its peer dead: retry exhaustion of a reliable connection, about 4 s with 7 retries
  // of 0.5 s each (timeout 17 of the InfiniBand specification, section 9.7.6.1.3).
  Nanos dead_detect_ns = 4'000'000'000;
};

class LocalNetwork {
 public:
  // Called when `rank`'s endpoint has got an arrival to poll at `when`; by the thread that polls its source.
  using Wake = std::function<void(std::int32_t rank, Nanos when)>;

  // `landing` must outlive the network; its functions are called by every thread that polls an endpoint. So must
  // `memory`, which holds what is in flight.
  LocalNetwork(std::int32_t world, const LinkModel& link, Landing* landing, Wake on_wake = {},
               std::pmr::memory_resource* memory = std::pmr::get_default_resource());
  LocalNetwork(const LocalNetwork&) = delete;
  LocalNetwork& operator=(const LocalNetwork&) = delete;
  ~LocalNetwork();

  // Different endpoints may be used by different threads at once, one endpoint only by one at a time (asserted).
  Endpoint* endpoint(std::int32_t rank);

  // The rank's process and link are gone: nothing that is in flight to or from it arrives, and nothing posted later.
  // Puts to it fail after dead_detect_ns, its own endpoint falls silent. May be called from any thread.
  void kill(std::int32_t rank);

  // Bytes of puts that the rank has posted.
  std::int64_t bytes_sent(std::int32_t rank) const;
  const LinkModel& link() const { return link_; }
  // Changes speed and latency of puts that are posted from now on; while nothing is in flight and no endpoint is in
  // use.
  void set_link(double bytes_per_ns, Nanos latency_ns) {
    link_.bytes_per_ns = bytes_per_ns;
    link_.latency_ns = latency_ns;
  }

 private:
  class LocalEndpoint;
  // What other ranks' threads touch of an endpoint, a cache line each. Together in one array, as every post and every
  // landing looks at one, and endpoints are large.
  struct alignas(64) Port {
    std::atomic<Nanos> ingress_free = 0;
    std::atomic<bool> dead = false;
  };

  LinkModel link_;
  Landing* landing_;
  Wake on_wake_;
  std::vector<Port> ports_;  // by rank
  std::vector<std::unique_ptr<LocalEndpoint>> endpoints_;
};

}  // namespace mkernel
