#include "exec/cuda/attention_kernel_choice.cuh"

namespace mkernel {

AttentionEntry bf16_attention_kernel(int dim) { return choose_attention_kernel<__nv_bfloat16>(dim); }

}  // namespace mkernel
