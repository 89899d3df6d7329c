// Instantiates the persistent kernel for every tile shape.
#pragma once
#include "exec/cuda/kernel_table.h"
#include "exec/cuda/persistent_kernel.cuh"

namespace mkernel {

template <class Tile, class T, Major kMajorB>
KernelEntry entry_of() {
  return {persistent_kernel<Tile, T, kMajorB>, static_cast<int>(sizeof(SharedMemory<Tile>))};
}

template <class T, Major kMajorB>
KernelEntry choose_kernel(TileShape shape) {
  if (shape == TileShape{128, 256}) return entry_of<TileConfig<128, 256>, T, kMajorB>();
  if (shape == TileShape{128, 128}) return entry_of<TileConfig<128, 128>, T, kMajorB>();
  if (shape == TileShape{128, 64}) return entry_of<TileConfig<128, 64>, T, kMajorB>();
  if (shape == TileShape{64, 128}) return entry_of<TileConfig<64, 128>, T, kMajorB>();
  if (shape == TileShape{64, 64}) return entry_of<TileConfig<64, 64>, T, kMajorB>();
  return {};
}

}  // namespace mkernel
