// Specs of ring_attention and its backward with tiles and chunks so small that short sequences have many of them. For
// tests only.
#pragma once
#include <cstdint>

#include "plan/spec.h"

namespace mkernel::test {

inline PlanSpec make_attention_spec(Topology topo, std::int64_t tokens, AttentionSpec attention = {},
                                    std::int32_t chunk_rows = 5, std::int32_t bm = 8) {
  PlanSpec spec;
  spec.op = Op::kRingAttention;
  spec.topo = topo;
  spec.attention = attention;
  spec.attention.seq_q = spec.attention.seq_k = tokens;
  spec.attention.dim = 8;
  spec.tiling.bm = bm;
  spec.tiling.chunk_rows = chunk_rows;
  return spec;
}

inline PlanSpec make_backward_spec(Topology topo, std::int64_t tokens, AttentionSpec attention = {},
                                   std::int32_t chunk_rows = 5, std::int32_t bm = 8, std::int32_t bn = 3) {
  PlanSpec spec = make_attention_spec(topo, tokens, attention, chunk_rows, bm);
  spec.op = Op::kRingAttentionBackward;
  spec.tiling.bn = bn;
  return spec;
}

}  // namespace mkernel::test
