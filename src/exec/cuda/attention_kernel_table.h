// The compiled attention kernels, by what they are compiled for.
#pragma once
#include "exec/cuda/attention_call.h"
#include "mkernel/types.h"

namespace mkernel {

struct AttentionEntry {
  void (*kernel)(AttentionCall) = nullptr;  // null: there is none
  int shared_bytes = 0;                     // dynamic, to be allowed with cudaFuncSetAttribute
};

// `dim`: one of kAttentionDims.
AttentionEntry find_attention_kernel(int dim, Dtype dtype);

// One file per element type has these, since they take long to compile.
AttentionEntry bf16_attention_kernel(int dim);
AttentionEntry fp16_attention_kernel(int dim);

}  // namespace mkernel
