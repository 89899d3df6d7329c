// Names that every part of mKernel shares: element types and operators.
#pragma once
#include <cstdint>
#include <string_view>

namespace mkernel {

// Element type of inputs and outputs. Sums are always fp32.
enum class Dtype : std::uint8_t { kBf16, kFp16, kFp32 };

// The fused operators.
enum class Op : std::uint8_t {
  kAllGatherGemm,
  kGemmReduceScatter,
  kGemmAllReduce,
  kRingAttention,
  kRingAttentionBackward
};

inline constexpr int kOpCount = 5;
inline constexpr int kGemmOpCount = 3;  // those before kRingAttention

// Whether it takes tensors of attention and no matrices.
constexpr bool attends(Op op) { return op == Op::kRingAttention || op == Op::kRingAttentionBackward; }

// Bytes of one element.
constexpr std::int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

constexpr std::string_view dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16: return "bf16";
    case Dtype::kFp16: return "fp16";
    case Dtype::kFp32: return "fp32";
  }
  return "?";
}

constexpr std::string_view op_name(Op op) {
  switch (op) {
    case Op::kAllGatherGemm: return "all_gather_gemm";
    case Op::kGemmReduceScatter: return "gemm_reduce_scatter";
    case Op::kGemmAllReduce: return "gemm_all_reduce";
    case Op::kRingAttention: return "ring_attention";
    case Op::kRingAttentionBackward: return "ring_attention_backward";
  }
  return "?";
}

}  // namespace mkernel
