// The shapes that the persistent kernel is compiled for, and how it divides shared memory. Pure numbers.
#pragma once
#include <cstdint>

namespace mkernel {

inline constexpr int kThreads = 384;  // a service warpgroup and two consumer warpgroups
inline constexpr int kConsumerThreads = 256;
inline constexpr int kBlockK = 64;  // elements of K per stage: 128 bytes, one swizzle atom
inline constexpr int kTaskRing = 8;
inline constexpr int kStagesBytes = 192 * 1024;
inline constexpr int kBoxBytes = 64 * 64 * 2;  // what one TMA store moves

// The tile sizes that have a kernel.
struct TileShape {
  std::int32_t bm = 128;
  std::int32_t bn = 256;
  bool operator==(const TileShape&) const = default;
};
inline constexpr TileShape kTileShapes[] = {{128, 256}, {128, 128}, {128, 64}, {64, 128}, {64, 64}};

// Whether K of a tile may be cut into parts for several CTAs. Sums of 256 columns leave the consumers no registers to
// add parts up with.
constexpr bool has_parts(std::int32_t bn) { return bn <= 128; }

// A tile shape's division of work. Two consumer warpgroups share a tile: its rows, or where there are only 64 of them
// its blocks of K in turn (64 x 64 operands for each would load shared memory more than the tensor cores can wait for).
template <int kBm_, int kBn_>
struct TileConfig {
  static constexpr int kBm = kBm_;
  static constexpr int kBn = kBn_;
  static constexpr bool kSplitK = kBm == 64;
  static constexpr bool kHasParts = has_parts(kBn);
  static constexpr int kBoxes = kBn / 64;  // stores per warpgroup and tile
  static constexpr int kABytes = kBm * kBlockK * 2;
  static constexpr int kBBytes = kBn * kBlockK * 2;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kStages = kStagesBytes / kStageBytes;                // 4 to 12
  static constexpr int first_row(int wg) { return kSplitK ? 0 : wg * 64; }  // of what a consumer warpgroup makes
  static constexpr bool stores(int wg) { return !kSplitK || wg == 0; }
  static_assert(kBm == 64 || kBm == 128);
  static_assert(kBn % 64 == 0 && kBn <= 256);
};

}  // namespace mkernel
