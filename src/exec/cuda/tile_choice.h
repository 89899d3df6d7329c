// The pure configuration step for GPUs: which sizes a plan is cut by, of those that have a kernel. A function of facts
// that all ranks share.
#pragma once
#include <cstdint>
#include <limits>

#include "plan/spec.h"

namespace mkernel {

// The tiling for `spec` (whose own tiling is ignored) on ranks of `sms` SMs each. Always valid for a valid spec.
Tiling choose_gpu_tiling(const PlanSpec& spec, int sms);

// The last tiles of a rank, from one on in the order of its compute lane, are cut along K: each into parts that
// different CTAs multiply and one adds up, so that all SMs have work to the end.
struct TileSplit {
  std::int64_t first_tile = std::numeric_limits<std::int64_t>::max();
  std::int32_t parts = 1;
};

// For a rank with `tiles` tiles of at most `rows` rows each and `blocks` k blocks, on `sms` SMs. Depends on nothing
// else, above all not on the partition of the SMs, so that results do not either.
TileSplit choose_split(const Tiling& tiling, std::int64_t tiles, std::int64_t rows, std::int64_t blocks, int sms);

}  // namespace mkernel
