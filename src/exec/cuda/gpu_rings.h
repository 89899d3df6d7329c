// The command rings of this process's ranks: one per rank and other node. Slots and tails lie in pinned memory, where
// proxies read and write them at the speed of their caches; heads lie in the memory of the rank's GPU, where its
// producers contend.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "exec/cuda/device_heap.h"
#include "exec/cuda/device_ring.h"
#include "exec/cuda/pinned_memory.h"
#include "exec/cuda/virtual_gpu.h"
#include "mkernel/result.h"
#include "net/ring.h"

namespace mkernel {

class GpuRings {
 public:
  // `depth` is a power of two.
  static Result<GpuRings> create(VirtualGpus& gpus, const Topology& topo, std::uint32_t depth);

  // Null for the rank's own node, and for ranks of other processes.
  CommandRing* ring(std::int32_t rank, std::int32_t node) const { return rings_[index(rank, node)].get(); }
  // By node, in the memory of the rank's GPU.
  const DeviceRing* table(std::int32_t rank) const { return tables_[static_cast<std::size_t>(rank)]; }

 private:
  std::size_t index(std::int32_t rank, std::int32_t node) const {
    return static_cast<std::size_t>(rank) * static_cast<std::size_t>(topo_.nodes) + static_cast<std::size_t>(node);
  }
  Status create_on(VirtualGpus& gpus, int device, std::uint32_t depth);

  Topology topo_;
  PinnedMemory pinned_;
  std::vector<DeviceHeap> heaps_;  // one per device
  std::vector<std::unique_ptr<CommandRing>> rings_;
  std::vector<const DeviceRing*> tables_;
};

}  // namespace mkernel
