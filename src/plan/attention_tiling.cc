#include "plan/attention_tiling.h"

#include <fmt/format.h>

#include <cmath>

#include "plan/plan.h"

namespace mkernel {
namespace {

constexpr std::int64_t kChunkBytes = 512 * 1024;  // bandwidth wants 256 KiB-1 MiB (design.md, "chunk")
// A GPU that parks a tile at each chunk loses 19-25 % with 1024 keys, 45 % with 512, 5 % with 4096 (H200, 2026-12,
// hopper-notes-attention.md); a chunk that is used before the next one comes should still be a small part of the whole.
constexpr std::int64_t kChunkTokensLeast = 512;
constexpr std::int64_t kChunkTokensMost = 2048;
constexpr std::int64_t kSlotBytes = std::int64_t{1} << 30;  // both parities; little beside 80 GB and more of a GPU
constexpr std::int64_t kMaxTasks = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxSends = std::int64_t{1} << 24;     // the task field of a command record
constexpr std::int64_t kMaxElements = std::int64_t{1} << 52;  // of one tensor; byte offsets and parity fit 63 bits
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr std::int32_t kMaxWorld = 1 << 16;
constexpr std::int64_t kManyPairs = 1 << 18;  // of tiles on a rank; each is a task and a flag of the backward
constexpr std::int32_t kMostQueries = 1024;
constexpr std::int32_t kMostKeys = 1024;
constexpr std::int64_t kKeyTile = 128;  // a GPU's; larger chunks are whole numbers of it

bool product_fits(std::int64_t a, std::int64_t b, std::int64_t limit) { return a == 0 || b <= limit / a; }

// Bytes of keys and values of one token.
std::int64_t token_bytes(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  return 2 * a.batch * a.kv_heads * a.dim * dtype_bytes(spec.dtype);
}

Status check_sizes(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  const struct {
    const char* name;
    std::int64_t value, low, high;
  } sizes[] = {{"batch", a.batch, 1, 1 << 20},
               {"heads", a.heads, 1, 1 << 20},
               {"kv_heads", a.kv_heads, 1, 1 << 20},
               {"dim", a.dim, 8, 256},
               {"seq_q", a.seq_q, 0, kMaxTokens},
               {"seq_k", a.seq_k, 0, kMaxTokens},
               {"window_left", a.mask.left, -1, kMaxTokens},
               {"window_right", a.mask.right, -1, kMaxTokens}};
  for (const auto& size : sizes) {
    if (size.value < size.low || size.value > size.high) {
      return bad_argument(fmt::format("{} is {}: it must be {} to {}", size.name, size.value, size.low, size.high));
    }
  }
  if (a.dim % 8 != 0) return bad_argument(fmt::format("dim is {}: it must be a multiple of 8 up to 256", a.dim));
  if (a.heads % a.kv_heads != 0) {
    return bad_argument(fmt::format(
        "heads is {} and kv_heads is {}: heads must be a multiple of kv_heads, so that each key head serves as many "
        "query heads",
        a.heads, a.kv_heads));
  }
  if (!std::isfinite(a.scale)) return bad_argument(fmt::format("scale is {}: it must be a finite number", a.scale));
  const std::int64_t longest = max_of(a.seq_q, a.seq_k) + 2 * std::int64_t{spec.topo.world()};
  if (!product_fits(a.batch * a.heads * a.dim, longest, kMaxElements)) {
    return bad_argument(
        fmt::format("{} x {} heads x {} tokens x {} have more elements than the 2^52 that 64-bit "
                    "offsets allow",
                    a.batch, a.heads, max_of(a.seq_q, a.seq_k), a.dim));
  }
  return Ok{};
}

bool forward_fits(const PlanSpec& spec) {
  const RingAttentionPlan plan = RingAttentionPlan::make(spec);
  return product_fits(plan.tiles, plan.steps(), kMaxTasks) &&
         product_fits(plan.tiles + plan.pieces, spec.topo.gpus, kMaxTasks);
}

// All factors are below 2^41.
bool backward_fits(const PlanSpec& spec) {
  const RingAttentionBackwardPlan plan = RingAttentionBackwardPlan::make(spec);
  return product_fits(plan.phases(), plan.tiles(), kMaxTasks) &&
         product_fits(plan.step_tasks() + 2 * plan.tiles(), plan.steps(), kMaxTasks / 2);
}

}  // namespace

Tiling choose_attention_tiling(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  Tiling tiling;
  tiling.bm = 16;
  while (tiling.bm < 128 && tiling.bm < a.q_split(spec.topo).max_size()) tiling.bm *= 2;
  const std::int64_t keys = max_of(1, a.k_split(spec.topo).max_size());
  // Four per rank, so that each way in the node and over the network begins early.
  const std::int64_t least = max_of(kChunkTokensLeast, kChunkBytes / token_bytes(spec));
  const std::int64_t quarter = ceil_div(keys * a.k_split(spec.topo).segments(), 4);
  std::int64_t rows = max_of(least, min_of(quarter, kChunkTokensMost));
  rows = rows >= keys ? keys : ceil_div(rows, kKeyTile) * kKeyTile;
  while (ceil_div(keys, rows) * 2 * spec.topo.nodes * 2 > kMaxSends / 2) rows *= 2;
  tiling.chunk_rows = static_cast<std::int32_t>(min_of(rows, 1 << 30));
  return tiling;
}

Tiling choose_backward_tiling(const PlanSpec& spec) {
  Tiling tiling = choose_attention_tiling(spec);
  tiling.bn = static_cast<std::int32_t>(min_of(kKeyTile, tiling.chunk_rows));
  PlanSpec tiled = spec;
  for (; tiling.bm < kMostQueries; tiling.bm *= 2) {
    tiled.tiling = tiling;
    const RingAttentionBackwardPlan plan = RingAttentionBackwardPlan::make(tiled);
    if (plan.q_tiles == plan.segments || product_fits(plan.steps(), plan.step_tasks(), kManyPairs)) break;
  }
  return tiling;
}

std::int64_t choose_slot_rounds(const PlanSpec& spec) {
  PlanSpec all = spec;
  all.attention.slot_rounds = 0;
  // The backward keeps sums and parts of gradients beside each slot.
  const bool backward = spec.op == Op::kRingAttentionBackward;
  const std::int64_t element_bytes = dtype_bytes(spec.dtype) + (backward ? 4 + dtype_bytes(spec.partial) : 0);
  KvRing ring;
  ring.make_ring(all, backward);
  const std::int64_t round_bytes = 2 * spec.topo.gpus * ring.chunk_room * element_bytes;
  if (round_bytes == 0 || ring.rounds <= kSlotBytes / round_bytes) return 0;
  return max_of(2, kSlotBytes / round_bytes);
}

Status validate_attention_shape(const PlanSpec& spec) {
  const auto& [nodes, gpus] = spec.topo;
  if (nodes < 1 || gpus < 1 || std::int64_t{nodes} * gpus > kMaxWorld) {
    return bad_argument(fmt::format(
        "a world of {} nodes x {} GPUs is not possible: both must be at least 1 and their product at most {}", nodes,
        gpus, kMaxWorld));
  }
  return check_sizes(spec);
}

Status validate_attention(const PlanSpec& spec) {
  if (Status status = validate_attention_shape(spec); !status.ok()) return status;
  const Tiling& tiling = spec.tiling;
  const AttentionSpec& a = spec.attention;
  if (tiling.bm < 1 || tiling.bm > 1024 || (tiling.bm & (tiling.bm - 1)) != 0) {
    return bad_argument(fmt::format("bm is {}: it must be a power of two up to 1024", tiling.bm));
  }
  if (tiling.chunk_rows < 1) {
    return bad_argument(fmt::format("chunk_rows is {}: it must be at least 1", tiling.chunk_rows));
  }
  if (a.slot_rounds < 0) {
    return bad_argument(fmt::format("slot_rounds is {}: it must be positive, or 0 to be chosen", a.slot_rounds));
  }
  const bool backward = spec.op == Op::kRingAttentionBackward;
  if (backward && (tiling.bn < 1 || tiling.bn > kMostKeys)) {
    return bad_argument(fmt::format("bn is {}: it must be 1 to {}", tiling.bn, kMostKeys));
  }
  KvRing ring;
  ring.make_ring(spec, backward);
  if (!product_fits(ring.pieces, 2 * ring.chunks, kMaxTasks) ||
      !product_fits(ring.rounds + 1, 4 * std::int64_t{spec.topo.gpus}, kMaxTasks) ||
      !(backward ? backward_fits(spec) : forward_fits(spec))) {
    return bad_argument(
        fmt::format("{} x {} heads of {} queries in tiles of {}, and {} keys in chunks of {}, make more than 2^31 "
                    "tasks or flags per rank: take larger tiles or chunks",
                    a.batch, a.heads, a.seq_q, tiling.bm, a.seq_k, tiling.chunk_rows));
  }
  if (!product_fits(3 * std::int64_t{spec.topo.nodes}, ring.chunks + 1, kMaxSends)) {
    return bad_argument(fmt::format(
        "{} chunks for each of {} nodes are more network writes than the 2^24 that a command record can name: take a "
        "larger chunk_rows than {}",
        ring.chunks, spec.topo.nodes, tiling.chunk_rows));
  }
  if (!product_fits(ring.rounds * spec.topo.gpus + ring.chunks + 1, ring.chunk_room, kMaxElements)) {
    return bad_argument(
        fmt::format("{} keys in chunks of {} take more slots than 64-bit offsets allow", a.seq_k, tiling.chunk_rows));
  }
  return Ok{};
}

}  // namespace mkernel
