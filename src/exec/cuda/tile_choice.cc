#include "exec/cuda/tile_choice.h"

#include "exec/cuda/kernel_config.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

constexpr std::int32_t kMaxParts = 64;
constexpr std::int64_t kMinPartBlocks = 4;

// Nanoseconds on an H200: of a k block of a tile, of a tile besides, and of the meeting of its parts. Fitted by hand to
// runs of `mkernel bench gemm_core` (2026-12-02).
double block_ns(const TileShape& shape) {
  return shape == TileShape{128, 256}   ? 800
         : shape == TileShape{128, 128} ? 430
         : shape == TileShape{64, 128}  ? 290
                                        : 150;
}
constexpr double kTileNs = 1200;
constexpr double kMeetNs = 3000;
// Of moving the sums of a part to or from memory: every part writes its own, and the last one reads those of all.
double sums_ns(const TileShape& shape, std::int64_t rows) {
  constexpr double kBytesPerNs = 60;
  return static_cast<double>(rows * shape.bn * 4) / kBytesPerNs;
}

struct Estimate {
  double ns = 0;
  TileSplit split;
};

// The time of a rank's tiles, each of `rows` rows at most and `blocks` k blocks, on `sms` SMs, cut in the best way.
Estimate estimate(const TileShape& shape, std::int64_t tiles, std::int64_t rows, std::int64_t blocks,
                  std::int64_t sms) {
  const double tile_ns = static_cast<double>(blocks) * block_ns(shape) + kTileNs;
  Estimate best{static_cast<double>(ceil_div(tiles, sms)) * tile_ns, {}};
  // The last tiles, which do not fill all SMs, alone or with as many as fill them once more.
  for (const std::int64_t cut : {tiles % sms, tiles % sms + sms}) {
    if (cut == 0 || cut > tiles || !has_parts(shape.bn)) continue;
    for (std::int32_t parts = 2; parts <= kMaxParts && blocks / parts >= kMinPartBlocks; ++parts) {
      const double part =
          static_cast<double>(ceil_div(blocks, parts)) * block_ns(shape) + kTileNs + sums_ns(shape, rows);
      const double ns = static_cast<double>((tiles - cut) / sms) * tile_ns +
                        static_cast<double>(ceil_div(cut * parts, sms)) * part + kMeetNs + sums_ns(shape, rows) * parts;
      if (ns < best.ns) best = {ns, {tiles - cut, parts}};
    }
  }
  return best;
}

constexpr std::int64_t kGpuChunkBytes = 256 * 1024;
constexpr std::int64_t kGpuCopyBytes = 128 * 1024;  // to find a task takes 5 us, to copy 128 KiB to three GPUs about 6

std::int64_t gemm_k(const PlanSpec& spec) { return spec.op == Op::kAllGatherGemm ? spec.k : spec.k_split().max_size(); }

}  // namespace

Tiling choose_gpu_tiling(const PlanSpec& spec, int sms) {
  TileShape best = kTileShapes[0];
  double best_time = 0;
  for (const TileShape& shape : kTileShapes) {
    const Tiling tiling{.bm = shape.bm, .bn = shape.bn, .grid_shards = choose_grid_shards(spec, shape.bm)};
    const std::int64_t rows = min_of(rows_per_grid(spec, tiling.grid_shards), shape.bm);
    const double time =
        estimate(shape, count_tiles(spec, tiling), rows, ceil_div(gemm_k(spec), kBlockK), max_of(sms, 1)).ns;
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
    const std::int64_t most = max_of(1, kGpuChunkBytes / sent_tile_bytes(spec, tiling));
    if (tiling.chunk_tiles > most) tiling.chunk_tiles = static_cast<std::int32_t>(most);
  }
  tiling.pitch_align = 8;  // 16 bytes, for TMA
  const std::int64_t row_bytes = max_of(1, spec.k * dtype_bytes(spec.dtype));
  tiling.copy_rows = static_cast<std::int32_t>(max_of(1, min_of(kGpuCopyBytes / row_bytes, tiling.chunk_rows)));
  return tiling;
}

TileSplit choose_split(const Tiling& tiling, std::int64_t tiles, std::int64_t rows, std::int64_t blocks, int sms) {
  if (sms < 1) return {};
  return estimate({tiling.bm, tiling.bn}, tiles, rows, blocks, sms).split;
}

}  // namespace mkernel
