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

// How a device rounds. `attend_math.h` is the default.
struct AttentionArithmetic {
  std::int64_t block_keys = 128;     // keys per block at least: each rounds a row's sums once
  double sum_unit = 0x1p-24;         // of an addition in a matrix product
  bool rounds_weights = false;       // to the input type, before they meet the values
  int more_roundings = 0;            // of a score, and of a result
  static AttentionArithmetic gpu();  // tensor cores
};

// Compares `rows` of O and of the log-sum-exp, counted as rows of Q. Takes 5 * seq_k * dim operations per row. Errors
// are those of O; a wrong log-sum-exp shows as worst_col = dim. Inputs are finite.
CheckReport check_attention_rows(const PlanSpec& spec, const AttentionData& data, std::span<const std::int64_t> rows,
                                 const AttentionArithmetic& arithmetic = {});

}  // namespace mkernel
