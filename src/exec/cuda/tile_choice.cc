#include "exec/cuda/tile_choice.h"

#include "exec/cuda/kernel_config.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

// Time of a tile per multiplication, relative to 128 x 256: what smaller tiles lose, as they load more operands per
// product (measured, H200: 128 x 128 loses 0-8 %, 64-row tiles more; the rest is the cost of a tile itself).
double tile_cost(const TileShape& shape, std::int64_t k) {
  const double products = static_cast<double>(shape.bm) * shape.bn * static_cast<double>(max_of(k, 64));
  const double loads = shape == TileShape{128, 256}   ? 1.0
                       : shape == TileShape{128, 128} ? 1.06
                       : shape == TileShape{64, 128}  ? 1.3
                                                      : 1.7;
  constexpr double kFixed = 128.0 * 256 * 128;  // as long as two k blocks of a large tile
  return products * loads + kFixed;
}

constexpr std::int64_t kGpuChunkBytes = 256 * 1024;
constexpr std::int64_t kGpuCopyBytes = 128 * 1024;  // to find a task takes 5 us, to copy 128 KiB to three GPUs about 6

std::int64_t rows_per_grid(const PlanSpec& spec) {
  return spec.op == Op::kGemmAllReduce ? spec.m : spec.row_split().max_size();
}
std::int64_t cols_per_grid(const PlanSpec& spec) {
  return spec.op == Op::kAllGatherGemm ? spec.col_split().max_size() : spec.n;
}

std::int64_t gemm_k(const PlanSpec& spec) { return spec.op == Op::kAllGatherGemm ? spec.k : spec.k_split().max_size(); }

}  // namespace

Tiling choose_gpu_tiling(const PlanSpec& spec, int sms) {
  const std::int64_t grids = spec.op == Op::kGemmAllReduce ? 1 : spec.topo.world();
  TileShape best = kTileShapes[0];
  double best_time = 0;
  for (const TileShape& shape : kTileShapes) {
    const std::int64_t tiles =
        max_of(1, ceil_div(rows_per_grid(spec), shape.bm)) * max_of(1, ceil_div(cols_per_grid(spec), shape.bn)) * grids;
    const double waves = static_cast<double>(ceil_div(tiles, max_of(sms, 1)));
    const double time = waves * tile_cost(shape, gemm_k(spec));
    if (best_time != 0 && time >= best_time) continue;
    best = shape;
    best_time = time;
  }
  // A wave of tiles that is about square reads least; the best bands were 512 rows for 16 SMs and 1024 to 2048 for 132.
  const int band_rows = sms <= 24 ? 512 : sms <= 72 ? 1024 : 2048;
  Tiling tiling = choose_tiling(spec, best.bm, best.bn);
  tiling.band = band_rows / best.bm;
  // Chunks of 256 KiB at most, and 16 per owner where tiles allow: sending begins earlier and ends sooner after the
  // last tile (64 to 256 KiB were equal within 1 % where the wire is the limit, 512 KiB 2-4 % slower; H200,
  // 2026-12-01).
  if (spec.op != Op::kAllGatherGemm) {
    const std::int64_t tile_bytes = std::int64_t{best.bm} * best.bn * dtype_bytes(spec.partial);
    const std::int64_t most = max_of(1, kGpuChunkBytes / tile_bytes);
    if (tiling.chunk_tiles > most) tiling.chunk_tiles = static_cast<std::int32_t>(most);
  }
  tiling.pitch_align = 8;  // 16 bytes, for TMA
  const std::int64_t row_bytes = max_of(1, spec.k * dtype_bytes(spec.dtype));
  tiling.copy_rows = static_cast<std::int32_t>(max_of(1, min_of(kGpuCopyBytes / row_bytes, tiling.chunk_rows)));
  return tiling;
}

}  // namespace mkernel
