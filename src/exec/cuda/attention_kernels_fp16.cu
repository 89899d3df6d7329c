#include "exec/cuda/attention_kernel_choice.cuh"

namespace mkernel {

AttentionEntry fp16_attention_kernel(int dim) { return choose_attention_kernel<__half>(dim); }

}  // namespace mkernel
