// Tensors of the ranks of one attention call, as parts of whole tensors: what the problems of forward and backward
// share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "exec/key_ranges.h"
#include "mkernel/attention.h"
#include "plan/spec.h"

namespace mkernel {

// How ranks' tensors lie in memory.
struct TensorLayout {
  bool by_token = false;  // in the order (batch, tokens, heads, dim), with a gap between tokens
  std::int64_t gap = 3;   // of so many elements
};

// A rank's tensor with its memory, whose every byte is a guard at first.
struct RankTensor {
  std::vector<std::byte> data;
  AttentionTensor tensor;
};
RankTensor make_rank_tensor(const PlanSpec& spec, std::int64_t heads, std::int64_t tokens, const TensorLayout& layout);

// `head` counts those of all batches.
std::byte* tensor_element(const AttentionTensor& tensor, Dtype dtype, std::int64_t head, std::int64_t token);
// Whether no byte beside the tokens has changed.
bool guards_intact(const RankTensor& tensor, Dtype dtype, const TensorLayout& layout);

// A rank's tokens out of a whole tensor (heads, tokens, dim) and back.
void take_tokens(const PlanSpec& spec, const std::byte* whole, std::int64_t tokens, std::int32_t rank,
                 const AttentionTensor& part);
void give_tokens(const PlanSpec& spec, const AttentionTensor& part, std::int64_t tokens, std::int32_t rank,
                 std::byte* whole);

// Random (rows, dim) from [-size, size).
std::vector<std::byte> random_rows(const PlanSpec& spec, std::int64_t rows, std::uint64_t seed, float size = 1);

// The ends of packed sequences.
struct SequenceEnds {
  std::vector<std::int32_t> q, k;

  // Nothing unless sequences are packed.
  PackedEnds view() const {
    return q.empty() ? PackedEnds{} : PackedEnds{q.data(), k.data(), static_cast<std::int32_t>(q.size()) - 1};
  }
};
// Sequences of any length, also none; queries and keys are cut alike where there are as many.
SequenceEnds random_ends(const PlanSpec& spec, std::uint64_t seed);

}  // namespace mkernel
