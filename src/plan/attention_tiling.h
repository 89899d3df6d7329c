// The pure configuration step of ring_attention: sizes of tiles and chunks, and how many slots a rank has.
#pragma once
#include "mkernel/result.h"
#include "plan/spec.h"

namespace mkernel {

// Tiles of 128 queries; chunks of a quarter of a rank's tokens, but at least 512 KiB and 512 tokens and at most 2048.
// `spec` passes validate_attention() but for its tiling.
Tiling choose_attention_tiling(const PlanSpec& spec);

// The same for the backward: also tiles of 128 keys, and of more queries where there would be more than 2^18 pairs of
// tiles per rank.
Tiling choose_backward_tiling(const PlanSpec& spec);

// Slots for all chunks where they take no more than 1 GiB per rank, else as many rounds as that holds, and at least
// two. 0: all.
std::int64_t choose_slot_rounds(const PlanSpec& spec);

// See validate() in plan/tiling.h. `shape` leaves the tiling out.
Status validate_attention_shape(const PlanSpec& spec);
Status validate_attention(const PlanSpec& spec);

}  // namespace mkernel
