// Small kernels in front of or beside the persistent one.
#pragma once
#include <cuda_runtime.h>

#include "exec/cuda/device_call.h"

namespace mkernel {

// dst (rows, cols), row-major with `dst_pitch` elements from row to row, = src (rows, cols) with any strides; 16-bit
// elements. Columns from `cols` to `dst_pitch` become 0.
void launch_repack(void* dst, std::int64_t dst_pitch, const DeviceMatrix& src, std::int64_t rows, std::int64_t cols,
                   cudaStream_t stream);

// Raises the signals of all compute tasks of the rank's current epoch.
void launch_raise_signals(const DeviceCall& call, std::uint32_t compute_tasks, cudaStream_t stream);

}  // namespace mkernel
