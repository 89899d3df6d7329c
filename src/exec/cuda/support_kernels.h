// Small kernels in front of or beside the persistent one.
#pragma once
#include <cuda_runtime.h>

#include "exec/cuda/device_call.h"
#include "exec/cuda/launch.h"

namespace mkernel {

// dst (rows, cols), row-major with `dst_pitch` elements from row to row, = src (rows, cols) with any strides; 16-bit
// elements. Columns from `cols` to `dst_pitch`, a multiple of 8, become 0.
struct Repack {
  void* dst = nullptr;
  std::int64_t dst_pitch = 0;
  DeviceMatrix src;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};
// Both in one kernel, for a launch takes longer than a small matrix; either may be empty.
cudaError_t launch_repack(const Repack& one, const Repack& other, cudaStream_t stream, Overlap overlap);

// dst = src, both (rows, cols) of 16-bit elements with any strides; src is wide, and its rows may be read in whole
// units of 16 bytes.
void launch_deliver(const DeviceMatrix& dst, const DeviceMatrix& src, std::int64_t rows, std::int64_t cols,
                    cudaStream_t stream);

// Raises the signals of all compute tasks of the rank's current epoch.
void launch_raise_signals(const DeviceCall& call, std::uint32_t compute_tasks, cudaStream_t stream);

}  // namespace mkernel
