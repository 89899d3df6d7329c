// The network of a host executor: rings, proxies and their transport, and the threads that step them. The transport is
// the in-process one when all ranks are here, and one between processes when this process runs only one.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "exec/host/host_shared.h"
#include "net/local/local_transport.h"
#include "net/process_endpoint.h"
#include "net/proxy.h"
#include "net/ring.h"

namespace mkernel {

// Does to the operators' heaps what arrives over the network.
class HostLanding : public Landing {
 public:
  explicit HostLanding(HostShared& shared) : shared_(shared) {}
  // Null takes an operator out, whose calls are all complete.
  void set_operator(std::uint32_t number, HostOperator* op);
  void land(const Put& put, std::int64_t begin, std::int64_t bytes) override;
  void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override;
  void stamped(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override;

 private:
  HostOperator& find(std::uint32_t number) const;
  void note(HostOperator& op, std::int32_t rank, std::int64_t flag, std::uint32_t value, Nanos now);

  HostShared& shared_;
  std::array<std::atomic<HostOperator*>, kMaxOperators> operators_ = {};
};

class HostNetwork {
 public:
  // `thread_count` threads divide the ranks among them. `endpoint` is the own rank's where there is one.
  HostNetwork(HostShared& shared, const LinkModel& link, ProcessEndpoint* endpoint, int ring_depth, int thread_count);
  ~HostNetwork() { join(); }
  HostNetwork(const HostNetwork&) = delete;
  HostNetwork& operator=(const HostNetwork&) = delete;

  // Throws std::system_error when the system has no more threads.
  void start();
  // shared.stop is set, or the world has failed. Afterwards nothing arrives any more.
  void join();
  // Makes sleeping threads look again.
  void wake();
  // After a failure: waits until no thread will touch a heap any more.
  void wait_still();

  void add_operator(HostOperator& op, std::shared_ptr<const PlanSource> source);
  // Returns when no thread of the network will touch it any more.
  void remove_operator(HostOperator& op);

  void cut_link(std::int32_t rank) { network_->kill(rank); }

  // False when the ring from `rank` to `node` is full; the rank's bell will ring when there is room.
  bool push(std::int32_t rank, std::int32_t node, const Record& record);

 private:
  struct RingSlot {
    std::unique_ptr<CommandRing> ring;  // null for the own node
    std::atomic<bool> starved{false};   // a producer waits for room
  };
  struct Worker {
    std::vector<std::int32_t> ranks;
    Doorbell bell;
    std::atomic<bool> still{false};
    std::atomic<std::uint64_t> rounds{0};  // begun
    std::thread thread;
  };

  RingSlot& slot(std::int32_t rank, std::int32_t node) {
    return slots_[static_cast<std::size_t>(rank) * shared_.topo.nodes + node];
  }
  Worker& worker_of(std::int32_t rank) { return *workers_[static_cast<std::size_t>(rank) % workers_.size()]; }
  void run(Worker& worker);
  bool step_rank(std::int32_t rank);
  void report(const ProxyFailure& failure, Nanos now);
  void wait_for_work(Worker& worker, std::uint32_t seen);

  HostShared& shared_;
  HostLanding landing_;
  std::unique_ptr<RingSlot[]> slots_;
  std::unique_ptr<LocalNetwork> network_;  // null with an endpoint
  ProcessEndpoint* endpoint_;
  Nanos lost_since_ = kNever;                    // when the endpoint first lost a peer
  std::vector<std::unique_ptr<Proxy>> proxies_;  // by rank; null for ranks of other processes
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::shared_ptr<const PlanSource>> sources_;  // proxies know them as long as they live
};

}  // namespace mkernel
