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

// For a rank with `tiles` tiles on `sms` SMs. Depends on nothing else, above all not on the partition of the SMs, so that results do not
// either.
TileSplit choose_split(const PlanSpec& spec, std::int64_t tiles, int sms);

// Which operands that TMA could read are copied all the same, to rows that begin at multiples of 128 bytes: TMA asks
// twice for a piece of a row that crosses such a line.
struct AlignedCopies {
  bool a = false;
  bool b = false;
};
AlignedCopies choose_copies(const PlanSpec& spec, int sms);

}  // namespace mkernel
