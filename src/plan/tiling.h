// The pure configuration step: which sizes a plan is cut by. A function of facts that all ranks share.
#pragma once
#include "mkernel/result.h"
#include "plan/spec.h"

namespace mkernel {

// The tiling for `spec` (whose own tiling is ignored): 128x256 tiles, smaller ones where there would be too few to go
// round, chunks of about 512 KiB but several per owner. Always valid for a valid spec.
Tiling choose_tiling(const PlanSpec& spec);
// The same with tiles of bm x bn.
Tiling choose_tiling(const PlanSpec& spec, std::int32_t bm, std::int32_t bn);

// Refuses sizes that are negative, that overflow 64-bit offsets or 31-bit task and flag numbers, and tilings that do
// not fit together. Nothing that passes here can overflow later.
Status validate(const PlanSpec& spec);

// Bytes of the workspace of one rank, both parities, flags included.
std::int64_t workspace_bytes(const PlanSpec& spec);

}  // namespace mkernel
