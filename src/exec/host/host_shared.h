// What all threads of a host executor share.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exec/host/failure.h"
#include "exec/host/node_bells.h"
#include "exec/host/stream.h"
#include "plan/topology.h"

namespace mkernel {

class HostNetwork;

struct HostShared {
  Topology topo;
  int sms = 1;
  bool cores_shared = false;  // more SMs than cores
  Nanos deadline_ns = 0;
  Nanos warn_ns = 0;
  std::int32_t own_rank = -1;                    // the only one that runs here; -1: all do
  NodeBells* node_bells = nullptr;               // of the node's other processes; null when there are none
  std::vector<std::unique_ptr<Stream>> streams;  // by rank; those of other processes' ranks are never used
  HostNetwork* network = nullptr;                // null with one node
  Failure failure;
  std::atomic<bool> stop{false};

  // A rank's flag has gone up. `now` is when.
  void flag_raised(std::int32_t rank, Nanos now) {
    if (node_bells != nullptr && rank != own_rank) return node_bells->ring(topo.gpu_of(rank));
    streams[rank]->progress_ns.store(now, std::memory_order_relaxed);
    streams[rank]->bell.ring();
  }
  // All ranks have got on.
  void wake_all() {
    const Nanos now = steady_now();
    for (const auto& stream : streams) {
      stream->progress_ns.store(now, std::memory_order_relaxed);
      stream->bell.ring_all();
    }
  }

  // Must stand around everything that touches the caller's matrices. False when the world has failed: do not begin.
  // order: either we see the failure, or whoever waits for the world to be still sees us acting, since both sides write
  // one word and then read the other's in the one order of seq_cst; pairs with quiet().
  bool begin_act(std::int32_t rank) {
    streams[rank]->acting.fetch_add(1, std::memory_order_seq_cst);
    if (!failure.happened()) return true;
    end_act(rank);
    return false;
  }
  void end_act(std::int32_t rank) { streams[rank]->acting.fetch_sub(1, std::memory_order_seq_cst); }
  // After a failure: nobody touches any matrix of a caller any more.
  bool quiet() const {
    for (const auto& stream : streams) {
      if (stream->acting.load(std::memory_order_seq_cst) != 0) return false;
    }
    return true;
  }

  // Makes everybody leave every call; the first error counts.
  void fail(Error error);
  // Hands a sentence to the caller's on_warning, one at a time.
  void warn(const std::string& sentence) {
    std::lock_guard<std::mutex> lock(warn_mutex);
    if (on_warning) on_warning(sentence);
  }

  // Told of the first failure, by whoever fails; may be empty.
  std::function<void(const Error&)> on_failure;
  std::mutex warn_mutex;
  std::function<void(const std::string&)> on_warning;
};

}  // namespace mkernel
