// What decides a ring_attention plan beside the topology: sizes, which rank holds which tokens, and who sees whom.
#pragma once
#include <cstdint>

#include "base/macros.h"
#include "plan/topology.h"

namespace mkernel {

// Which tokens of a sequence a rank holds. Plain: the r-th of W equal parts. Zigzag: parts r and 2W-1-r of 2W, in this
// order, so that under a causal mask all ranks have the same work. A run of consecutive tokens on a rank is a segment.
struct SequenceSplit {
  std::int64_t total = 0;
  std::int32_t ranks = 1;
  bool zigzag = false;

  MK_HD constexpr std::int32_t segments() const { return zigzag && ranks > 1 ? 2 : 1; }
  MK_HD constexpr Split parts() const { return {total, ranks * segments()}; }
  MK_HD constexpr std::int64_t begin(std::int32_t rank, std::int32_t segment) const {
    return parts().begin(part_of(rank, segment));
  }
  MK_HD constexpr std::int64_t size(std::int32_t rank, std::int32_t segment) const {
    return parts().size(part_of(rank, segment));
  }
  MK_HD constexpr std::int64_t max_size() const { return parts().max_size(); }  // of a segment
  MK_HD constexpr std::int64_t tokens(std::int32_t rank) const {
    return size(rank, 0) + (segments() > 1 ? size(rank, 1) : 0);
  }
  // The first token of a segment, counted on its rank.
  MK_HD constexpr std::int64_t local(std::int32_t rank, std::int32_t segment) const {
    return segment == 0 ? 0 : size(rank, 0);
  }
  // The place in the whole sequence of token `t` of a rank.
  MK_HD constexpr std::int64_t position(std::int32_t rank, std::int64_t t) const {
    return t < size(rank, 0) ? begin(rank, 0) + t : begin(rank, 1) + t - size(rank, 0);
  }

 private:
  MK_HD constexpr std::int32_t part_of(std::int32_t rank, std::int32_t segment) const {
    return segment == 0 ? rank : 2 * ranks - 1 - rank;
  }
};

// Keys [begin, end).
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  MK_HD constexpr bool empty() const { return begin >= end; }
};

// Which keys a query sees: a window around the key that stands beside it. The last query stands beside the last key, so
// with more queries than keys the first ones see nothing where the mask is causal.
struct AttentionMask {
  bool causal = false;
  std::int64_t left = -1;   // keys before its own that a query sees; -1: all
  std::int64_t right = -1;  // keys behind its own; -1: all

  // What at least one of the queries [query, query + count) of `queries` sees of `keys`; count >= 1.
  MK_HD constexpr KeyRange sees(std::int64_t query, std::int64_t count, std::int64_t queries, std::int64_t keys) const {
    const std::int64_t first = query + keys - queries;
    const std::int64_t last = first + count - 1;
    KeyRange range{0, keys};
    if (left >= 0) range.begin = max_of(range.begin, first - left);
    if (right >= 0) range.end = min_of(range.end, last + right + 1);
    if (causal) range.end = min_of(range.end, last + 1);
    if (range.end < range.begin) range.end = range.begin;
    return range;
  }
};

// Q and O (batch, heads, seq_q, dim), K and V (batch, kv_heads, seq_k, dim); tokens are divided over the ranks.
// Query head h uses key head h / (heads / kv_heads).
struct AttentionSpec {
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t dim = 64;
  std::int64_t seq_q = 0;
  std::int64_t seq_k = 0;
  bool zigzag = false;
  bool packed = false;  // every call brings the ends of the sequences that stand one behind the other
  AttentionMask mask;
  float scale = 1;
  std::int64_t slot_rounds = 0;  // rounds of chunks that a rank has slots for (plan/ring_attention.h); 0: all

  MK_HD constexpr SequenceSplit q_split(const Topology& topo) const { return {seq_q, topo.world(), zigzag}; }
  MK_HD constexpr SequenceSplit k_split(const Topology& topo) const { return {seq_k, topo.world(), zigzag}; }
  // Whether the plan must expect that one of these queries sees one of these keys. Where sequences are packed only a
  // call knows.
  MK_HD constexpr bool meet(std::int64_t query, std::int64_t queries, std::int64_t key, std::int64_t keys) const {
    if (queries == 0 || keys == 0) return false;
    if (packed) return true;
    const KeyRange range = mask.sees(query, queries, seq_q, seq_k);
    return max_of(range.begin, key) < min_of(range.end, key + keys);
  }
};

}  // namespace mkernel
