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
// Shards share tiles only where a tile of one of them would be partly empty: a wgmma instruction takes 64 rows, however
// few are wanted. all_gather_gemm stops there, since a tile waits for all its shards. gemm_reduce_scatter waits for
// nothing, and gains as long as reading B is what takes time: a product of 128 rows has 128 flops per byte of B, where
// an H200 could do 990e12 / 4.8e12 = 206.
constexpr std::int64_t kFullRows = 64;
constexpr std::int64_t kMaxSharedRows = 128;

std::int64_t rows_per_shard(const PlanSpec& spec) {
  return spec.op == Op::kGemmAllReduce ? spec.m : spec.row_split().max_size();
}
std::int64_t cols_per_grid(const PlanSpec& spec) {
  return spec.op == Op::kAllGatherGemm ? spec.col_split().max_size() : spec.n;
}
std::int64_t grids(const PlanSpec& spec, std::int32_t grid_shards) {
  if (spec.op == Op::kGemmAllReduce) return 1;
  const ShardGroups groups{spec.topo, grid_shards};
  return std::int64_t{groups.runs()} * groups.per_run();
}

std::int64_t grid_tiles(const PlanSpec& spec, const Tiling& tiling) {
  const std::int64_t rows = rows_per_grid(spec, tiling.grid_shards);
  return TileGrid::make(rows, cols_per_grid(spec), rows, tiling).count();
}

// The smallest power of two from `low` to `high` that is at least `size`, else `high`.
std::int32_t fit(std::int64_t size, std::int32_t low, std::int32_t high) {
  std::int32_t result = low;
  while (result < high && result < size) result *= 2;
  return result;
}

Status check_grid_shards(const PlanSpec& spec) {
  const std::int32_t shards = spec.tiling.grid_shards;
  const auto& [nodes, gpus] = spec.topo;
  if (shards == 1) return Ok{};
  const bool is_group = shards > 1 && shards <= nodes * gpus && (shards <= gpus || shards % gpus == 0);
  if (!is_group || spec.op == Op::kGemmAllReduce) {
    return bad_argument(fmt::format("grid_shards is {}: {} on {} nodes x {} GPUs takes 1{}", shards, op_name(spec.op),
                                    nodes, gpus,
                                    spec.op == Op::kGemmAllReduce ? "" : ", up to a node's GPUs, or all of several"));
  }
  if (spec.op == Op::kAllGatherGemm && gpus == 1 && shards < nodes) {
    return bad_argument(
        fmt::format("grid_shards is {}: with one GPU per node all_gather_gemm takes 1 or all {}", shards, nodes));
  }
  if (const std::int64_t rows = rows_per_grid(spec, shards); rows > spec.tiling.bm) {
    return bad_argument(fmt::format("grid_shards is {}: these have {} rows, which must fit into one tile of {}", shards,
                                    rows, spec.tiling.bm));
  }
  return Ok{};
}

bool product_fits(std::int64_t a, std::int64_t b, std::int64_t limit) { return a == 0 || b <= limit / a; }

}  // namespace

std::int32_t choose_grid_shards(const PlanSpec& spec, std::int32_t bm) {
  if (spec.op == Op::kGemmAllReduce || rows_per_shard(spec) >= kFullRows) return 1;
  const auto& [nodes, gpus] = spec.topo;
  const std::int64_t limit = min_of(bm, spec.op == Op::kAllGatherGemm ? kFullRows : kMaxSharedRows);
  const auto fits = [&](std::int64_t shards) {
    return rows_per_grid(spec, static_cast<std::int32_t>(shards)) <= limit;
  };
  std::int64_t most = 1;
  while (most < spec.topo.world() && fits(most + 1)) ++most;
  if (most < gpus) return static_cast<std::int32_t>(ceil_div(gpus, ceil_div(gpus, most)));
  const std::int64_t run = ceil_div(nodes, ceil_div(nodes, most / gpus));
  // Where only the network brings rows, tiles can wait for those of all nodes or of one.
  if (spec.op == Op::kAllGatherGemm && gpus == 1 && run < nodes) return 1;
  return static_cast<std::int32_t>(run * gpus);
}

std::int64_t rows_per_grid(const PlanSpec& spec, std::int32_t grid_shards) {
  return spec.op == Op::kGemmAllReduce ? spec.m : spec.row_split().begin(grid_shards);
}

std::int64_t count_tiles(const PlanSpec& spec, const Tiling& tiling) {
  return grid_tiles(spec, tiling) * grids(spec, tiling.grid_shards);
}

std::int64_t sent_tile_bytes(const PlanSpec& spec, const Tiling& tiling) {
  const std::int64_t rows = tiling.grid_shards > 1 ? max_of(1, rows_per_shard(spec)) : tiling.bm;
  return rows * tiling.bn * dtype_bytes(spec.partial);
}

Tiling choose_tiling(const PlanSpec& spec) {
  Tiling tiling;
  const auto set_rows = [&](std::int32_t most) {
    tiling.grid_shards = choose_grid_shards(spec, most);
    tiling.bm = fit(rows_per_grid(spec, tiling.grid_shards), 16, most);
  };
  set_rows(128);
  tiling.bn = fit(cols_per_grid(spec), 32, 256);
  // Narrower tiles when there would be too few; rows stay, since a wgmma instruction takes 64 of them at once.
  while (count_tiles(spec, tiling) < kTilesWanted && tiling.bn > 64) tiling.bn /= 2;
  if (count_tiles(spec, tiling) < kTilesWanted && tiling.bm > 64) set_rows(64);
  return choose_tiling(spec, tiling.bm, tiling.bn);
}

Tiling choose_tiling(const PlanSpec& spec, std::int32_t bm, std::int32_t bn) {
  Tiling tiling;
  tiling.bm = bm;
  tiling.bn = bn;
  tiling.grid_shards = choose_grid_shards(spec, bm);
  const std::int64_t tiles = grid_tiles(spec, tiling);
  const std::int64_t tile_bytes = sent_tile_bytes(spec, tiling);
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
  const std::int64_t shard_tile_rows = max_of(1, ceil_div(rows_per_shard(spec), tiling.bm));
  std::int64_t chunk_tile_rows = max_of(1, min_of(kChunkBytes / row_bytes / tiling.bm, ceil_div(shard_tile_rows, 4)));
  while (shard_tile_rows / chunk_tile_rows * spec.topo.nodes > kMaxSends / 2 && chunk_tile_rows < kMaxSends) {
    chunk_tile_rows *= 2;
  }
  tiling.chunk_rows = static_cast<std::int32_t>(min_of(chunk_tile_rows * tiling.bm, 1 << 30));
  tiling.copy_rows = static_cast<std::int32_t>(max_of(1, min_of(kCopyBytes / row_bytes, tiling.chunk_rows)));
  return tiling;
}

Status validate(const PlanSpec& spec) {
  if (attends(spec.op)) return validate_attention(spec);
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
  if (Status status = check_grid_shards(spec); !status.ok()) return status;
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
  const std::int64_t grid_rows = max_of(1, ceil_div(rows_per_grid(spec, tiling.grid_shards), tiling.bm));
  const std::int64_t grid_cols = max_of(1, ceil_div(cols_per_grid(spec), tiling.bn));
  const std::int64_t slots = grids(spec, 1) + 1;
  if (!product_fits(grid_rows, grid_cols, kMaxTasks) ||
      !product_fits(grid_rows * grid_cols + tiling.chunk_tiles * std::int64_t{spec.topo.world()}, slots, kMaxTasks)) {
    return bad_argument(
        fmt::format("{} x {} x {} cut into {} x {} tiles has more than 2^31 tasks per rank: take larger "
                    "tiles",
                    spec.m, spec.n, spec.k, tiling.bm, tiling.bn));
  }
  const Plan plan(spec);
  if (spec.op == Op::kAllGatherGemm &&
      !product_fits(spec.topo.world() * ceil_div(tiling.chunk_rows, tiling.copy_rows),
                    ceil_div(rows_per_shard(spec), tiling.chunk_rows) + 1, kMaxTasks)) {
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
