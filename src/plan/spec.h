// Everything that decides a plan. Two ranks with equal specs have equal plans.
#pragma once
#include <cstdint>

#include "mkernel/types.h"
#include "plan/attention_spec.h"
#include "plan/shard_groups.h"
#include "plan/task.h"
#include "plan/tiles.h"
#include "plan/topology.h"

namespace mkernel {

// C (M, N) = A (M, K) * B (K, N), global sizes. all_gather_gemm divides the rows of A and the columns of B and C over
// the ranks; gemm_reduce_scatter divides K and the rows of C; gemm_all_reduce divides K. ring_attention: see
// plan/attention_spec.h.
struct PlanSpec {
  Op op = Op::kGemmAllReduce;
  Topology topo;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Dtype dtype = Dtype::kBf16;    // A, B, C
  Dtype partial = Dtype::kBf16;  // sums between GPUs: the type of C, or fp32
  Tiling tiling;
  AttentionSpec attention;  // kRingAttention only; then m, n and k are 0

  // Rows of A (all_gather_gemm) or of C (gemm_reduce_scatter) that a rank owns.
  MK_HD constexpr Split row_split() const { return {m, topo.world()}; }
  // Which of these shards are multiplied together.
  MK_HD constexpr ShardGroups groups() const { return {topo, tiling.grid_shards}; }
  MK_HD constexpr std::int64_t group_row(const ShardGroup& group) const { return row_split().begin(group.first); }
  MK_HD constexpr std::int64_t group_rows(const ShardGroup& group) const {
    return row_split().begin(group.end) - row_split().begin(group.first);
  }
  // Columns of B and C that a rank owns in all_gather_gemm.
  MK_HD constexpr Split col_split() const { return {n, topo.world()}; }
  // The slice of K that a rank owns in gemm_reduce_scatter and gemm_all_reduce.
  MK_HD constexpr Split k_split() const { return {k, topo.world()}; }
};

// What a flag means, for messages: "<what> <a>/<b>", raised by rank `sender`, or by the GPUs of the waiting rank's node
// when `sender` is -1.
struct FlagName {
  const char* what = "?";
  std::int64_t a = 0;
  std::int64_t b = 0;
  std::int32_t sender = -1;
};

}  // namespace mkernel
