#include "exec/cuda/attention_kernel_table.h"

namespace mkernel {

AttentionEntry find_attention_kernel(int dim, Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16: return bf16_attention_kernel(dim);
    case Dtype::kFp16: return fp16_attention_kernel(dim);
    case Dtype::kFp32: break;
  }
  return {};
}

}  // namespace mkernel
