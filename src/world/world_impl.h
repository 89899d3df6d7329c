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

  const WorldOptions options;
  const Topology topo;
  std::unique_ptr<HostExecutor> executor;  // Device::kHost
  std::unique_ptr<CudaExecutor> cuda;      // Device::kCuda
  Failure sim_failure;
  std::atomic<std::uint32_t> sim_operators{0};
  WorldHooks hooks;
};

}  // namespace mkernel
