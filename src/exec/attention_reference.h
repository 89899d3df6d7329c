// What ring_attention should have computed, in fp64, and how far its fp32 arithmetic may be off, element by element.
// The bound is proved in attention_reference.cc. It depends on the length of the sequence, not on the world.
#pragma once
#include <cstdint>
#include <span>

#include "exec/reference.h"
#include "mkernel/attention.h"
#include "plan/spec.h"

namespace mkernel {

// Whole tensors, tokens in the order of the sequence: Q and O (batch * heads * seq_q, dim), K and V (batch * kv_heads *
// seq_k, dim), all row-major, and the log-sum-exp (batch * heads * seq_q) fp32, or null.
struct AttentionData {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* o = nullptr;
  const float* lse = nullptr;
  AttentionArguments sequences;  // of which only the ends of packed sequences are looked at
};

// Compares `rows` of O and of the log-sum-exp, counted as rows of Q. Takes 5 * seq_k * dim operations per row. Errors
// are those of O; a wrong log-sum-exp shows as worst_col = dim. Inputs are finite.
CheckReport check_attention_rows(const PlanSpec& spec, const AttentionData& data, std::span<const std::int64_t> rows);

}  // namespace mkernel
