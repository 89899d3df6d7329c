#include "exec/cuda/kernel_table.h"

namespace mkernel {

KernelEntry find_kernel(TileShape shape, Dtype dtype, bool b_k_major) {
  switch (dtype) {
    case Dtype::kBf16: return b_k_major ? bf16_kernel_b_k_major(shape) : bf16_kernel(shape);
    case Dtype::kFp16: return b_k_major ? fp16_kernel_b_k_major(shape) : fp16_kernel(shape);
    case Dtype::kFp32: break;
  }
  return {};
}

}  // namespace mkernel
