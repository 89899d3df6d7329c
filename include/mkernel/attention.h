// Ring attention: options, tensors, and how sequences are divided. Included by mkernel/mkernel.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "mkernel/result.h"
#include "mkernel/types.h"

namespace mkernel {

// O = softmax(scale * Q K^T + mask) V for each batch and head; tokens are divided over the ranks, K and V travel.
// Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023; running softmax: Dao et al.,
// FlashAttention, 2022. Sizes of sequences are global.
struct AttentionOptions {
  std::int64_t batch = 1;
  std::int64_t heads = 1;  // of Q and O
  std::int64_t kv_heads =
      0;  // of K and V, a divisor of heads; 0: as many as heads. Query head h uses h / (heads/kv_heads)
  std::int64_t dim = 128;   // of a head: a multiple of 8 up to 256
  std::int64_t seq_q = 0;   // tokens of Q and O, all ranks together
  std::int64_t seq_k = -1;  // tokens of K and V; -1: as many
  Dtype dtype = Dtype::kBf16;
  // Query i stands beside key i + seq_k - seq_q (the last beside the last). Causal: it sees no later key. A window: it
  // sees no more than so many keys to the left and to the right of that one; -1: all. A query that sees nothing gives
  // 0, and a log-sum-exp of -infinity.
  bool causal = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  // Rank r of W holds parts r and 2W-1-r of 2W, one behind the other: equal work for all under a causal mask.
  bool zigzag = false;
  // Each call brings the ends of sequences that stand one behind the other (AttentionArguments::cu_seqlens_q). No query
  // sees another sequence's keys; masks count within the sequence. batch is 1.
  bool packed = false;
  double scale = 0;   // of the scores; 0: 1 / sqrt(dim)
  bool fused = true;  // false: all communication before all arithmetic, for comparison; wants slots for all chunks
  // 0: chosen from the sizes.
  int bm = 0;           // queries per tile, a power of two up to 1024
  int chunk_rows = 0;   // tokens per network write
  int slot_rounds = 0;  // chunks of each GPU index that a rank has room for; -1: all, docs/operators.md
};

// A tensor of the caller, (batch, heads, tokens, dim). Strides are in elements; those of dim are together. `data` may
// be null when there are no elements.
struct AttentionTensor {
  void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;

  // Memory in the order (batch, heads, tokens, dim).
  static AttentionTensor by_head(void* data, std::int64_t batch, std::int64_t heads, std::int64_t tokens,
                                 std::int64_t dim) {
    return {data, batch, heads, tokens, dim, heads * tokens * dim, tokens * dim, dim};
  }
  // Memory in the order (batch, tokens, heads, dim).
  static AttentionTensor by_token(void* data, std::int64_t batch, std::int64_t heads, std::int64_t tokens,
                                  std::int64_t dim) {
    return {data, batch, heads, tokens, dim, tokens * heads * dim, dim, heads * dim};
  }
};

// One rank's tensors for one call: as many tokens as Operator::q_tokens() and kv_tokens() say.
struct AttentionArguments {
  AttentionTensor q;
  AttentionTensor k;
  AttentionTensor v;
  AttentionTensor o;     // output
  float* lse = nullptr;  // output (batch, heads, tokens) together: log of the sum of exp(scores); null: not wanted
  // Packed sequences only: `sequences` + 1 numbers each, from 0, not falling, the last seq_q and seq_k. The same on all
  // ranks, whole and not the rank's part, and valid as long as the tensors.
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;
  std::int32_t sequences = 0;
};

// Gradients of Q, K and V: dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K, with P = exp(scale Q K^T - lse),
// dS = P * (dO V^T - rowsum(dO * O)). K and V travel as in the forward, and what a node adds to their gradients travels
// back once. Gradients have the same bits in every run. `slot_rounds` also bounds the room for a rank's own parts of
// gradients, not that for the sums of nodes (docs/operators.md). Source: Dao, FlashAttention-2, 2023, algorithm 2.
struct AttentionBackwardOptions : AttentionOptions {
  bool fp32_partials = false;  // what ranks add to foreign keys' gradients travels in fp32 and not in `dtype`
  int bn = 0;                  // keys per tile, up to 1024; 0: chosen from the sizes
};

// One rank's tensors for one call of the backward. Q, K, V and the ends of packed sequences are those of the forward, O
// and `lse` what it has given.
struct AttentionBackwardArguments {
  AttentionTensor q;
  AttentionTensor k;
  AttentionTensor v;
  AttentionTensor o;
  const float* lse = nullptr;  // as AttentionArguments::lse; null only where there are no queries
  AttentionTensor d_o;         // gradient of O, as O
  AttentionTensor dq;          // output, as Q
  AttentionTensor dk;          // output, as K
  AttentionTensor dv;          // output, as V
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;
  std::int32_t sequences = 0;
};

// A run of consecutive tokens of a whole sequence.
struct SequencePart {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  bool operator==(const SequencePart&) const = default;
};

// The tokens of `rank`, in the order in which it holds them: one part, or two with `zigzag`; a part may be empty.
// `tokens` >= 0, 0 <= rank < ranks.
std::vector<SequencePart> sequence_parts(std::int64_t tokens, int ranks, int rank, bool zigzag);

// Copies a rank's tokens out of a whole sequence of `tokens` rows of `row_bytes` each, and back into it. For tensors in
// the order (batch, heads, tokens, dim) call it for each batch and head.
void split_sequence(const void* whole, std::int64_t tokens, std::int64_t row_bytes, int ranks, int rank, bool zigzag,
                    void* part);
void join_sequence(const void* part, std::int64_t tokens, std::int64_t row_bytes, int ranks, int rank, bool zigzag,
                   void* whole);

}  // namespace mkernel
