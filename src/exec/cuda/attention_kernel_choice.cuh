// Instantiates the attention kernel for every size of head.
#pragma once
#include "exec/cuda/attention_kernel.cuh"

namespace mkernel {

template <int kDim, class T>
AttentionEntry attention_entry() {
  using Config = AttentionConfig<kDim>;
  return {attention_kernel<Config, T>, static_cast<int>(sizeof(AttentionShared<Config>))};
}

template <class T>
AttentionEntry choose_attention_kernel(int dim) {
  switch (dim) {
    case 64: return attention_entry<64, T>();
    case 96: return attention_entry<96, T>();
    case 128: return attention_entry<128, T>();
    case 256: return attention_entry<256, T>();
    default: return {};
  }
}

}  // namespace mkernel
