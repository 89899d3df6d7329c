// What a World is made of.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "exec/cuda/cuda_executor.h"
#include "exec/host/failure.h"
#include "exec/host/host_executor.h"
#include "mkernel/mkernel.h"
#include "plan/topology.h"
#include "world/process_group.h"

namespace mkernel {

// For tests; set them before operators are created.
struct WorldHooks {
  std::uint64_t start_epoch = 0;             // epochs that operators believe to have run
  std::optional<int> workspace_fill;         // byte that workspaces are full of before they are made
  std::optional<std::int64_t> memory_limit;  // bytes that count as available
};

class World::Impl {
 public:
  explicit Impl(const WorldOptions& world_options)
      : options(world_options), topo{world_options.nodes, world_options.gpus} {}

  ~Impl() {
    // Before the executor goes: nobody may tell it of failures any more.
    if (group) group->bootstrap().leave();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // The ranks that run in this process: all, or one.
  bool runs(std::int32_t rank) const { return group == nullptr || group->rank() == rank; }
  // Errors: kBadArgument when there is no such rank, or not here.
  Status check_rank(int rank) const;

  Failure& failure() { return executor ? executor->failure() : cuda ? cuda->failure() : sim_failure; }
  void fail(Error error) {
    if (executor) {
      executor->fail(std::move(error));
    } else if (cuda) {
      cuda->fail(std::move(error));
    } else {
      sim_failure.set(std::move(error));
    }
  }
  // Bytes that workspaces may take.
  std::int64_t memory_limit() const;

  WorldOptions options;  // changed by create() only
  const Topology topo;
  std::unique_ptr<ProcessGroup> group;     // null when all ranks are in this process; outlives the executor
  std::unique_ptr<HostExecutor> executor;  // Device::kHost
  std::unique_ptr<CudaExecutor> cuda;      // Device::kCuda
  int plan_sms = 0;                        // Device::kCuda: SMs that plans count on, the fewest that a rank has
  Failure sim_failure;
  std::atomic<std::uint32_t> sim_operators{0};
  WorldHooks hooks;
};

}  // namespace mkernel
