#include "plan/tiling.h"

#include <fmt/format.h>

#include "plan/attention_tiling.h"
#include "plan/plan.h"

namespace mkernel {
namespace {

constexpr std::int64_t kChunkBytes = 512 * 1024;    // bandwidth wants 256 KiB-1 MiB (design.md, "chunk")
constexpr std::int64_t kChunkBytesMin = 16 * 1024;  // twice what a post costs its link (0.15 us at 50 GB/s)
constexpr std::int64_t kCopyBytes = 64 * 1024;      // one SM reads it once and writes it G times: 7 us at G = 8
constexpr std::int64_t kTilesWanted = 256;          // about two tiles for each SM of a large GPU
constexpr std::int64_t kMaxTasks = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxSends = std::int64_t{1} << 24;     // the task field of a command record
constexpr std::int64_t kMaxElements = std::int64_t{1} << 55;  // leaves room for byte offsets and parity in 63 bits
constexpr std::int32_t kMaxWorld = 1 << 16;

std::int64_t rows_per_grid(const PlanSpec& spec) {
  return spec.op == Op::kGemmAllReduce ? spec.m : spec.row_split().max_size();
}
std::int64_t cols_per_grid(const PlanSpec& spec) {
  return spec.op == Op::kAllGatherGemm ? spec.col_split().max_size() : spec.n;
}
std::int64_t grids(const PlanSpec& spec) { return spec.op == Op::kGemmAllReduce ? 1 : spec.topo.world(); }

std::int64_t grid_tiles(const PlanSpec& spec, const Tiling& tiling) {
  return TileGrid::make(rows_per_grid(spec), cols_per_grid(spec), rows_per_grid(spec), tiling).count();
}

// The smallest power of two from `low` to `high` that is at least `size`, else `high`.
std::int32_t fit(std::int64_t size, std::int32_t low, std::int32_t high) {
  std::int32_t result = low;
  while (result < high && result < size) result *= 2;
  return result;
}

bool product_fits(std::int64_t a, std::int64_t b, std::int64_t limit) { return a == 0 || b <= limit / a; }

}  // namespace

Tiling choose_tiling(const PlanSpec& spec) {
  Tiling tiling;
  tiling.bm = fit(rows_per_grid(spec), 16, 128);
  tiling.bn = fit(cols_per_grid(spec), 32, 256);
  // Narrower tiles when there would be too few; rows stay, since a wgmma instruction takes 64 of them at once.
  while (grid_tiles(spec, tiling) * grids(spec) < kTilesWanted && tiling.bn > 64) tiling.bn /= 2;
  if (grid_tiles(spec, tiling) * grids(spec) < kTilesWanted && tiling.bm > 64) tiling.bm = 64;
  return choose_tiling(spec, tiling.bm, tiling.bn);
}

Tiling choose_tiling(const PlanSpec& spec, std::int32_t bm, std::int32_t bn) {
  Tiling tiling;
  tiling.bm = bm;
  tiling.bn = bn;
  const std::int64_t tiles = grid_tiles(spec, tiling);
  const std::int64_t tile_bytes = std::int64_t{tiling.bm} * tiling.bn * dtype_bytes(spec.partial);
  // Several chunks per owner and destination, so that sending begins early and ends soon after the last tile: eight
  // to one other node, four to each of many; but none too small for the network while every owner has one.
  const std::int64_t owners = spec.op == Op::kGemmAllReduce ? spec.topo.world() : 1;
  const std::int64_t wanted = max_of(4, 8 / max_of(1, spec.topo.nodes - 1));
  const std::int64_t least = min_of(kChunkBytesMin / tile_bytes, tiles / owners);
  std::int64_t chunk = max_of(1, min_of(kChunkBytes / tile_bytes, max_of(least, tiles / (wanted * owners))));
  // Very large worlds: fewer, larger chunks rather than more sends than a record can name.
  while (tiles / chunk * spec.topo.nodes * 2 > kMaxSends / 2 && chunk < kMaxSends) chunk *= 2;
  tiling.chunk_tiles = static_cast<std::int32_t>(chunk);

  const std::int64_t row_bytes = max_of(1, spec.k * dtype_bytes(spec.dtype));
  const std::int64_t shard_tile_rows = max_of(1, ceil_div(rows_per_grid(spec), tiling.bm));
  std::int64_t chunk_tile_rows = max_of(1, min_of(kChunkBytes / row_bytes / tiling.bm, ceil_div(shard_tile_rows, 4)));
  while (shard_tile_rows / chunk_tile_rows * spec.topo.nodes > kMaxSends / 2 && chunk_tile_rows < kMaxSends) {
    chunk_tile_rows *= 2;
  }
  tiling.chunk_rows = static_cast<std::int32_t>(min_of(chunk_tile_rows * tiling.bm, 1 << 30));
  tiling.copy_rows = static_cast<std::int32_t>(max_of(1, min_of(kCopyBytes / row_bytes, tiling.chunk_rows)));
  return tiling;
}

Status validate(const PlanSpec& spec) {
  if (spec.op == Op::kRingAttention) return validate_attention(spec);
  const auto& [nodes, gpus] = spec.topo;
  if (nodes < 1 || gpus < 1 || std::int64_t{nodes} * gpus > kMaxWorld) {
    return bad_argument(
        fmt::format("a world of {} nodes x {} GPUs is not possible: both must be at least 1 and their "
                    "product at most {}",
                    nodes, gpus, kMaxWorld));
  }
  const struct {
    const char* name;
    std::int64_t value;
  } sizes[] = {{"m", spec.m}, {"n", spec.n}, {"k", spec.k}};
  for (const auto& size : sizes) {
    if (size.value < 0) return bad_argument(fmt::format("{} is {}: a size must be 0 or more", size.name, size.value));
  }
  const Tiling& tiling = spec.tiling;
  const auto power_of_two = [](std::int32_t x) { return x > 0 && (x & (x - 1)) == 0; };
  if (!power_of_two(tiling.bm) || !power_of_two(tiling.bn) || tiling.bm > 1024 || tiling.bn > 1024) {
    return bad_argument(fmt::format("a tile of {} x {} is not possible: bm and bn must be powers of two up to 1024",
                                    tiling.bm, tiling.bn));
  }
  if (tiling.band < 1) return bad_argument(fmt::format("band is {}: it must be at least 1", tiling.band));
  if (tiling.chunk_tiles < 1) {
    return bad_argument(fmt::format("chunk_tiles is {}: it must be at least 1", tiling.chunk_tiles));
  }
  if (tiling.chunk_rows < 1 || tiling.chunk_rows % tiling.bm != 0) {
    return bad_argument(
        fmt::format("chunk_rows is {}: it must be a positive multiple of bm = {}", tiling.chunk_rows, tiling.bm));
  }
  if (tiling.copy_rows < 1)
    return bad_argument(fmt::format("copy_rows is {}: it must be at least 1", tiling.copy_rows));
  if (tiling.pitch_align < 1 || tiling.pitch_align > 1024) {
    return bad_argument(fmt::format("pitch_align is {}: it must be 1 to 1024 elements", tiling.pitch_align));
  }
  if (spec.partial != spec.dtype && spec.partial != Dtype::kFp32) {
    return bad_argument(fmt::format("partial sums in {} for {} inputs are not offered: take {} or fp32",
                                    dtype_name(spec.partial), dtype_name(spec.dtype), dtype_name(spec.dtype)));
  }
  const auto padded = [&](std::int64_t x) { return x + 1024 * std::int64_t{spec.topo.world()} + 1024; };
  for (const auto& size : sizes) {
    if (size.value > kMaxElements) {
      return bad_argument(fmt::format("{} is {}: at most 2^55 is accepted", size.name, size.value));
    }
  }
  const std::int64_t limit = kMaxElements / max_of(1, spec.topo.nodes);
  const struct {
    const char* what;
    std::int64_t rows, cols;
  } matrices[] = {{"A (m x k)", spec.m, spec.k}, {"B (k x n)", spec.k, spec.n}, {"C (m x n)", spec.m, spec.n}};
  for (const auto& matrix : matrices) {
    if (!product_fits(padded(matrix.rows), padded(matrix.cols), limit)) {
      return bad_argument(fmt::format("{} of {} x {} has more elements than the 2^55 / nodes that 64-bit offsets allow",
                                      matrix.what, matrix.rows, matrix.cols));
    }
  }
  // Tiles of one grid, times the grids of a rank's compute lane, plus one chunk of slack.
  const std::int64_t grid_rows = max_of(1, ceil_div(rows_per_grid(spec), tiling.bm));
  const std::int64_t grid_cols = max_of(1, ceil_div(cols_per_grid(spec), tiling.bn));
  const std::int64_t slots = grids(spec) + 1;
  if (!product_fits(grid_rows, grid_cols, kMaxTasks) ||
      !product_fits(grid_rows * grid_cols + tiling.chunk_tiles * std::int64_t{spec.topo.world()}, slots, kMaxTasks)) {
    return bad_argument(
        fmt::format("{} x {} x {} cut into {} x {} tiles has more than 2^31 tasks per rank: take larger "
                    "tiles",
                    spec.m, spec.n, spec.k, tiling.bm, tiling.bn));
  }
  const Plan plan(spec);
  if (spec.op == Op::kAllGatherGemm && !product_fits(spec.topo.world() * ceil_div(tiling.chunk_rows, tiling.copy_rows),
                                                     ceil_div(rows_per_grid(spec), tiling.chunk_rows) + 1, kMaxTasks)) {
    return bad_argument(fmt::format("copies of {} rows are more than 2^31 for {} rows: take larger copy_rows",
                                    tiling.copy_rows, spec.m));
  }
  // Rounding up to whole chunks may have added tasks.
  for (int r = 0; r < kRoleCount; ++r) {
    const auto role = static_cast<Role>(r);
    for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
      if (plan.count(0, role, lane) <= kMaxTasks) continue;
      return bad_argument(
          fmt::format("{} x {} x {} cut into {} x {} tiles and chunks of {} rows has more than 2^31 "
                      "tasks per rank: take larger tiles",
                      spec.m, spec.n, spec.k, tiling.bm, tiling.bn, tiling.chunk_rows));
    }
  }
  std::int64_t sends = 0;
  for (std::int32_t lane = 0; lane < plan.lanes(Role::kSend); ++lane) {
    sends = max_of(sends, plan.count(0, Role::kSend, lane) + 1);
  }
  if (sends * plan.lanes(Role::kSend) > kMaxSends) {
    return bad_argument(
        fmt::format("{} network writes per rank are more than the 2^24 that a command record can name: "
                    "take larger chunks (chunk_tiles = {}, chunk_rows = {})",
                    sends * plan.lanes(Role::kSend), tiling.chunk_tiles, tiling.chunk_rows));
  }
  return Ok{};
}

std::int64_t workspace_bytes(const PlanSpec& spec) {
  const Plan plan(spec);
  std::int64_t bytes = 2 * std::int64_t{plan.flag_count()} * 4;
  for (int b = 0; b < kBufferCount; ++b) {
    const auto buffer = static_cast<Buffer>(b);
    bytes += 2 * plan.buffer_elements(buffer) * dtype_bytes(plan.buffer_dtype(buffer));
  }
  return bytes;
}

}  // namespace mkernel
