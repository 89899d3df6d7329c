// Faults and delays that a test plants in the kernels (tests/gpu/kernel_faults_test.cu). Everywhere else planted() is
// false and delay_point() nothing when it is compiled, so the product has no code of it.
#pragma once
#include <cstdint>

namespace mkernel {

// Each stands for a mistake that is easy to make. docs/testing.md says how each is seen.
enum class Fault : std::uint32_t {
  kNone,
  // producer
  kNoStageWait,   // loads into a stage that is being read
  kStaleGather,   // reads what was gathered in the epoch before
  kNoProxyFence,  // TMA is not told of what others wrote
  // consumers
  kNoLoadWait,     // multiplies before the operands are there
  kPartsKept,      // the count of a tile's finished parts is not reset
  kPartOrder,      // parts are added in another order of K
  kNoSharedFence,  // TMA is not told of what the consumers staged
  // store warps
  kFlagFirst,     // flags are raised before the stores
  kNoStoreWait,   // ... while the stores are under way
  kNoSignal,      // a CTA forgets its signals
  kNoCredit,      // the consumers never get a box back
  kWrongHalf,     // the two halves of a tile change places
  kClippedShort,  // the last column of a ragged tile is left out
  kRecordFirst,   // the network sends a chunk when its first tile is there
  // scheduler
  kNoWait,       // flags are not waited for
  kNoAcquire,    // ... or their data not acquired
  kNoFlush,      // waits while a tile that others wait for is in the consumers' registers
  kDoubleClaim,  // two CTAs take the same move
  kOldC,         // writes to where C was in the call before
  // start and end
  kWrongCount,  // a barrier expects one arrival too few
  kHeadsKept,   // the next call finds the lanes' heads as they were left
  kEpochKept,   // the epoch is not advanced
  kBegunKept,   // first tiles seem to be taken
};

#ifdef MKERNEL_PLANTED_FAULTS

struct PlantedFaults {
  Fault fault = Fault::kNone;
  std::uint32_t delay_seed = 0;
  std::uint32_t delay_ns = 0;  // the longest; 0: none
};
static __constant__ PlantedFaults planted_faults;

__device__ __forceinline__ bool planted(Fault fault) { return planted_faults.fault == fault; }

// Holds this warp up, at one of four visits and for a random time. Every wait, signal, claim, fence and store of the
// kernel has one, since they stand in the functions of sm90/.
__device__ __forceinline__ void delay_point() {
  const std::uint32_t most = planted_faults.delay_ns;
  if (most == 0) return;
  // The clock stands for the place, and makes every visit another one.
  std::uint32_t x = planted_faults.delay_seed + static_cast<std::uint32_t>(clock()) * 0x9e3779b9u +
                    (blockIdx.x * 12 + threadIdx.x / 32) * 0x85ebca6bu;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  x ^= x >> 12;
  if (x % 4 == 0) __nanosleep((x >> 8) % most);
}

#else

__device__ constexpr bool planted(Fault) { return false; }
__device__ __forceinline__ void delay_point() {}

#endif

}  // namespace mkernel
