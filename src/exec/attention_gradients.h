// What ring_attention_backward should have computed, in fp64 from Q, K, V and dO, and how far its fp32 arithmetic may
// be off, element by element. The bound is proved in attention_gradients.cc. It counts with the O and the log-sum-exp
// that the backward was given, wherever they came from.
#pragma once
#include <cstdint>

#include "exec/key_ranges.h"
#include "exec/reference.h"
#include "plan/spec.h"

namespace mkernel {

// Whole tensors, tokens in the order of the sequence, row-major: (batch * heads * seq_q, dim) and (batch * kv_heads *
// seq_k, dim); the log-sum-exp (batch * heads * seq_q) fp32.
struct GradientData {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* o = nullptr;
  const void* d_o = nullptr;
  const float* lse = nullptr;
  const void* dq = nullptr;
  const void* dk = nullptr;
  const void* dv = nullptr;
  PackedEnds ends;
};

// Rows are counted as in the tensors.
struct GradientReport {
  CheckReport dq;
  CheckReport dk;
  CheckReport dv;

  bool ok() const { return dq.ok && dk.ok && dv.ok; }
  // The one whose worst element is nearest to its bound, or beyond it, and its name.
  const CheckReport& worst() const;
  const char* worst_name() const;
};

// Compares about `rows` rows of each gradient, evenly spread; 0: all. Takes 4 * dim operations per pair of a query and
// a key that sees it, and about 20 where either is compared. Inputs are finite.
GradientReport check_gradients(const PlanSpec& spec, const GradientData& data, std::int64_t rows);

}  // namespace mkernel
