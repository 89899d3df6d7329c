#include "exec/cuda/kernel_choice.cuh"

namespace mkernel {

KernelEntry bf16_kernel_b_k_major(TileShape shape) { return choose_kernel<__nv_bfloat16, Major::kK>(shape); }

}  // namespace mkernel
