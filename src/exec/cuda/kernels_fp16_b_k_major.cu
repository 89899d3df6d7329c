#include "exec/cuda/kernel_choice.cuh"

namespace mkernel {

KernelEntry fp16_kernel_b_k_major(TileShape shape) { return choose_kernel<__half, Major::kK>(shape); }

}  // namespace mkernel
