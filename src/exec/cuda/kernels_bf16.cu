#include "exec/cuda/kernel_choice.cuh"

namespace mkernel {

KernelEntry bf16_kernel(TileShape shape) { return choose_kernel<__nv_bfloat16, Major::kMn>(shape); }

}  // namespace mkernel
