#include "exec/cuda/kernel_choice.cuh"

namespace mkernel {

KernelEntry fp16_kernel(TileShape shape) { return choose_kernel<__half, Major::kMn>(shape); }

}  // namespace mkernel
