// What the three warps of a CTA of the copy kernel share; see wire_kernel.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "exec/cuda/sm90/memory.cuh"
#include "exec/cuda/sm90/wire_memory.cuh"
#include "exec/cuda/wire_kernel.h"

namespace mkernel {

inline constexpr std::uint32_t kAllLanes = 0xffffffffu;
inline constexpr std::uint32_t kMaxWireStages = 16;
inline constexpr unsigned kSpinSleepNs = 20;  // between looks at shared memory

enum class Leaving : std::uint32_t { kStay, kWhenDone, kNow };

struct CopyEntry {
  std::uint64_t dst;
  std::uint64_t src;
  std::uint64_t bytes;
};
struct StampEntry {
  std::uint64_t flag;
  std::uint32_t value;
  std::uint32_t rank;
  std::uint32_t count;
};

// Between the three warps of a CTA. Counts run from 0 since the launch and wrap. The host queues at most kWireDepth
// copies and stamps that it does not know to be done, so entries are never overwritten too early.
struct WireShared {
  CopyEntry copies[kWireDepth];
  StampEntry stamps[kWireDepth];
  LoadBarrier loaded[kMaxWireStages];
  std::uint32_t copies_queued;  // this and the next two are written by the poller
  std::uint32_t stamps_queued;
  std::uint32_t leaving;
  std::uint32_t copies_done;  // written by the copier, like the next
  std::uint32_t copier_left;
  std::uint32_t stamps_done;  // written by the stamper, like the next
  std::uint32_t stamper_left;
};

__device__ inline std::uint32_t lane_index() { return threadIdx.x % 32; }

}  // namespace mkernel
