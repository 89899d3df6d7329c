// The pure configuration step: which sizes a plan is cut by. A function of facts that all ranks share.
#pragma once
#include "mkernel/result.h"
#include "plan/spec.h"

namespace mkernel {

// The tiling for `spec` (whose own tiling is ignored): 128x256 tiles, smaller ones where there would be too few to go
// round, shared by shards of few rows, chunks of about 512 KiB but several per owner. Always valid for a valid spec.
Tiling choose_tiling(const PlanSpec& spec);
// The same with tiles of bm x bn.
Tiling choose_tiling(const PlanSpec& spec, std::int32_t bm, std::int32_t bn);

// How many shards share tiles of `bm` rows: as many as fit into it and into 128 rows, dealt evenly. A function of m,
// the operator and the topology; 1 for gemm_all_reduce, which has no shards.
std::int32_t choose_grid_shards(const PlanSpec& spec, std::int32_t bm);
// Rows of the largest grid of tiles where so many shards share one.
std::int64_t rows_per_grid(const PlanSpec& spec, std::int32_t grid_shards);
// Compute tiles of a rank: what a choice of tiles costs. Surplus tiles, which hold nothing, count too.
std::int64_t count_tiles(const PlanSpec& spec, const Tiling& tiling);
// What a full tile adds to a network write: of a shared one, a shard's rows.
std::int64_t sent_tile_bytes(const PlanSpec& spec, const Tiling& tiling);

// Refuses sizes that are negative, that overflow 64-bit offsets or 31-bit task and flag numbers, and tilings that do
// not fit together. Nothing that passes here can overflow later.
Status validate(const PlanSpec& spec);

// Bytes of the workspace of one rank, both parities, flags included.
std::int64_t workspace_bytes(const PlanSpec& spec);

}  // namespace mkernel
