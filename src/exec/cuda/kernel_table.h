// The compiled persistent kernels, by what they are compiled for.
#pragma once
#include "exec/cuda/device_call.h"
#include "exec/cuda/kernel_config.h"
#include "mkernel/types.h"

namespace mkernel {

using PersistentKernel = void (*)(DeviceCall);

struct KernelEntry {
  PersistentKernel kernel = nullptr;  // null: there is none
  int shared_bytes = 0;               // dynamic, to be allowed with cudaFuncSetAttribute
};

// `b_k_major`: B's columns are contiguous along K (a transposed B).
KernelEntry find_kernel(TileShape shape, Dtype dtype, bool b_k_major);

// One file per element type and layout of B has these, since they take long to compile.
KernelEntry bf16_kernel(TileShape shape);
KernelEntry bf16_kernel_b_k_major(TileShape shape);
KernelEntry fp16_kernel(TileShape shape);
KernelEntry fp16_kernel_b_k_major(TileShape shape);

}  // namespace mkernel
