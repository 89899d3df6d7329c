// The heads that the attention kernel is compiled for, and how it divides shared memory. Pure numbers.
#pragma once
#include <cstdint>

namespace mkernel {

inline constexpr int kAttentionThreads = 384;        // a service warpgroup and two consumer warpgroups
inline constexpr std::int32_t kAttentionRows = 128;  // queries per tile
inline constexpr int kAttentionDims[] = {64, 96, 128, 256};

// The columns that a head of `dim` takes in the kernel: the next size that there is.
constexpr int padded_dim(std::int64_t dim) {
  for (const int size : kAttentionDims) {
    if (dim <= size) return size;
  }
  return 0;
}

// How many tiles of a CTA may be open at a time, where they may have to wait for keys.
inline constexpr int kOpenTiles = 1024;

// Two consumer warpgroups have 64 of a tile's queries each. Configuration: hopper-notes-attention.md (H200, 2026-12):
// two stages of K and of V each; a second stage for Q where there is room brings 1-2 %.
template <int kDim_>
struct AttentionConfig {
  static constexpr int kDim = kDim_;
  static constexpr int kBoxes = (kDim + 63) / 64;      // of 64 columns, as TMA loads them
  static constexpr int kKeys = kDim > 128 ? 64 : 128;  // per step: scores and sums must fit the registers
  static constexpr int kQStages = kDim > 128 ? 1 : 2;
  static constexpr int kKvStages = 2;
  static constexpr int kQBytes = kBoxes * kAttentionRows * 128;
  static constexpr int kKvBytes = kBoxes * kKeys * 128;
  static constexpr int kMoveStages = 3;
  static constexpr int kMoveBytes = 8 * 1024;
  // Registers per thread, multiples of 8. Consumers hold sums, scores and weights: D / 2 + 3 / 4 keys; what is left is
  // for the service warps.
  static constexpr int kConsumerRegisters = kDim == 64 ? 200 : 224;
  static constexpr int kServiceRegisters = kDim == 64 ? 104 : 56;
  static_assert(128 * kServiceRegisters + 256 * kConsumerRegisters <= 168 * kAttentionThreads);
};

}  // namespace mkernel
