#include "exec/cuda/tile_choice.h"

#include <algorithm>
#include <cmath>

#include "exec/cuda/kernel_config.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

constexpr std::int32_t kMaxParts = 64;
constexpr std::int64_t kMinPartBlocks = 4;

// Times on an H200, in nanoseconds, measured with time stamps in the kernel (2026-12-03). Relations between tile shapes
// matter here, not the sum.
constexpr double kRequestNs = 1.3;            // an SM's TMA asks L2 for at most 128 bytes in this time
constexpr double kBytesPerNs = 33;            // of memory, an SM's share
constexpr double kStoreBytesPerNs = 30;       // of results, likewise
constexpr double kOverlapPrice = 0.15;
constexpr double kFindNs = 1500;              // a tile, at least: to claim the next one
constexpr double kTileNs = 300;               // of a tile, besides
constexpr double kEndNs = 600;                // until the last result has left
constexpr double kMeetNs = 2000;              // until the last part of a tile knows that it is
constexpr double kSumBytesPerNs = 80;         // the sums of parts, written and read
constexpr double kSumNs = 350;                // at least, per part
constexpr double kCopyBytesPerNs = 22;        // read and written in front of the kernel, an SM's share
constexpr double kCopyNs = 1000;              // that kernel's launch

// What the estimates need to know of a rank's work.
struct Work {
  std::int64_t tiles = 0;
  std::int64_t rows = 0;    // of a tile, at most
  std::int64_t blocks = 0;  // of K
  std::int64_t bytes = 0;   // of A, B and C
  std::int64_t sms = 1;
  int a_requests = 1;  // for a row of a TMA box: 2 where rows do not begin at multiples of 128 bytes
  int b_requests = 1;
};

// A k block of a tile: what the multiplications or the shared memory that they read take, or the requests.
double block_ns(const TileShape& shape, const Work& work) {
  const double multiply = shape == TileShape{128, 256}   ? 703
                          : shape == TileShape{128, 128} ? 390
                          : shape == TileShape{128, 64}  ? 280
                          : shape == TileShape{64, 128}  ? 220
                                                         : 130;
  const auto box_rows = static_cast<double>(min_of(ceil_div(work.rows, 8) * 8, shape.bm));
  return std::max(multiply, (box_rows * work.a_requests + shape.bn * work.b_requests) * kRequestNs);
}
// Of moving the sums of a part to or from memory: every part writes its own, and the last one reads those of all.
double sums_ns(const TileShape& shape, std::int64_t rows) {
  return std::max(kSumNs, static_cast<double>(rows * shape.bn * 4) / kSumBytesPerNs);
}

struct Estimate {
  double ns = 0;
  TileSplit split;
};

// The time of a rank's tiles, cut in the best way.
Estimate estimate(const TileShape& shape, const Work& work) {
  const double block = block_ns(shape, work);
  const auto blocks = static_cast<double>(work.blocks);
  const double store_ns = static_cast<double>(work.rows * shape.bn * 2) / kStoreBytesPerNs;
  const double tile_ns = std::max({blocks * block, store_ns, kFindNs}) + kTileNs;
  const double least = static_cast<double>(work.bytes) / (kBytesPerNs * static_cast<double>(work.sms));
  const double end_ns = kEndNs + store_ns;
  // What the tiles take and what memory takes go on together, not quite without a price.
  const auto together = [&](double tiles_ns) {
    return std::max(tiles_ns, least) + kOverlapPrice * std::min(tiles_ns, least);
  };
  Estimate best{together(static_cast<double>(ceil_div(work.tiles, work.sms)) * tile_ns) + end_ns, {}};
  const double sums = sums_ns(shape, work.rows);
  // The last tiles, which do not fill all SMs, alone or with as many as fill them once more.
  for (const std::int64_t cut : {work.tiles % work.sms, work.tiles % work.sms + work.sms}) {
    if (cut == 0 || cut > work.tiles || !has_parts(shape.bn)) continue;
    const double whole = static_cast<double>((work.tiles - cut) / work.sms) * tile_ns;
    for (std::int32_t parts = 2; parts <= kMaxParts && work.blocks / parts >= kMinPartBlocks; ++parts) {
      const double part = static_cast<double>(ceil_div(work.blocks, parts)) * block + kTileNs + sums;
      const double waves = static_cast<double>(ceil_div(cut * parts, work.sms));
      const double ns = together(whole + waves * part) + kMeetNs + parts * sums + end_ns;
      if (ns < best.ns) best = {ns, {work.tiles - cut, parts}};
    }
  }
  return best;
}

std::int64_t gemm_k(const PlanSpec& spec) { return spec.op == Op::kAllGatherGemm ? spec.k : spec.k_split().max_size(); }
std::int64_t gemm_n(const PlanSpec& spec) { return spec.op == Op::kAllGatherGemm ? spec.col_split().max_size() : spec.n; }

constexpr std::int64_t kTmaUnit = 8;    // elements of 16 bytes: what TMA wants rows to begin at,
constexpr std::int64_t kLineUnit = 64;  // and what it likes them to begin at

// The estimate for a tile shape, with the operands copied that it pays to copy.
struct Choice {
  Estimate estimate;
  AlignedCopies copies;
};
Choice choose_for(const PlanSpec& spec, const Tiling& tiling, std::int64_t tiles, int sms) {
  const TileShape shape{tiling.bm, tiling.bn};
  const std::int64_t k = gemm_k(spec);
  const std::int64_t n = gemm_n(spec);
  Work work{.tiles = tiles,
            .rows = min_of(rows_per_grid(spec, tiling.grid_shards), tiling.bm),
            .blocks = ceil_div(k, kBlockK),
            .bytes = 2 * (spec.m * k + k * n + spec.m * n),
            .sms = max_of(sms, 1)};
  // What TMA cannot read at all is copied anyway.
  const bool gathers = spec.op == Op::kAllGatherGemm && spec.topo.world() > 1;  // A then comes as the network brings it
  const bool a_off = k % kLineUnit != 0 && (gathers || k % kTmaUnit == 0);
  const bool b_off = n % kLineUnit != 0 && n % kTmaUnit == 0;
  Choice best;
  for (const bool a : {false, true}) {
    for (const bool b : {false, true}) {
      if ((a && (!a_off || gathers)) || (b && !b_off)) continue;
      work.a_requests = a_off && !a ? 2 : 1;
      work.b_requests = b_off && !b ? 2 : 1;
      Estimate with = estimate(shape, work);
      const std::int64_t copied = 4 * ((a ? spec.m * k : 0) + (b ? k * n : 0));
      with.ns += (a || b ? kCopyNs : 0) + static_cast<double>(copied) / (kCopyBytesPerNs * static_cast<double>(work.sms));
      if (best.estimate.ns == 0 || with.ns < best.estimate.ns) best = {with, {a, b}};
    }
  }
  return best;
}

constexpr std::int64_t kGpuChunkBytes = 256 * 1024;
constexpr std::int64_t kGpuCopyBytes = 128 * 1024;  // to find a task takes 5 us, to copy 128 KiB to three GPUs about 6

}  // namespace

Tiling choose_gpu_tiling(const PlanSpec& spec, int sms) {
  TileShape best = kTileShapes[0];
  double best_time = 0;
  for (const TileShape& shape : kTileShapes) {
    const Tiling tiling{.bm = shape.bm, .bn = shape.bn, .grid_shards = choose_grid_shards(spec, shape.bm)};
    const double time = choose_for(spec, tiling, count_tiles(spec, tiling), sms).estimate.ns;
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

AlignedCopies choose_copies(const PlanSpec& spec, int sms) {
  return choose_for(spec, spec.tiling, count_tiles(spec, spec.tiling), sms).copies;
}

TileSplit choose_split(const PlanSpec& spec, std::int64_t tiles, int sms) {
  return sms < 1 ? TileSplit{} : choose_for(spec, spec.tiling, tiles, sms).estimate.split;
}

}  // namespace mkernel
