#include "bench/compute_only.h"

#include <gtest/gtest.h>

#include "exec/cuda/task_table.h"
#include "ops/gemm_spec.h"

namespace mkernel::bench {
namespace {

Plan plan_of(Op op, Topology topo) {
  GemmOptions gemm;
  gemm.op = op;
  gemm.m = 2048;
  gemm.n = 2048;
  gemm.k = 1024;
  return Plan(*make_gpu_gemm_spec(topo, gemm, 16));
}

class ComputeOnly : public testing::TestWithParam<std::tuple<int, std::pair<int, int>>> {
 protected:
  Op op() const { return static_cast<Op>(std::get<0>(GetParam())); }
  Topology topo() const { return {std::get<1>(GetParam()).first, std::get<1>(GetParam()).second}; }
};

TEST_P(ComputeOnly, ComputesTheSameTilesAndWaitsForNobody) {
  const Plan plan = plan_of(op(), topo());
  const ComputeOnlySource source(plan);
  for (std::int32_t rank = 0; rank < topo().world(); ++rank) {
    EXPECT_EQ(source.completion(rank), Wait{});
    ASSERT_EQ(source.count(rank, Role::kCompute, 0), plan.count(rank, Role::kCompute, 0));
    for (std::int64_t i = 0; i < plan.count(rank, Role::kCompute, 0); ++i) {
      const Task all = plan.task(rank, Role::kCompute, 0, i);
      const Task alone = source.task(rank, Role::kCompute, 0, i);
      EXPECT_EQ(alone.action, all.action);
      EXPECT_EQ(alone.block, all.block);
      EXPECT_EQ(alone.dst_offset, all.dst_offset);
      for (const Wait& wait : alone.waits) EXPECT_EQ(wait, Wait{});
      for (const Signal& signal : alone.signals) EXPECT_EQ(signal, Signal{});
    }
  }
}

TEST_P(ComputeOnly, HasATaskTableWithoutMoves) {
  const Plan plan = plan_of(op(), topo());
  const ComputeOnlySource source(plan);
  for (std::int32_t rank = 0; rank < topo().world(); ++rank) {
    const Result<TaskTable> table = make_task_table(source, rank);
    ASSERT_TRUE(table.ok());
    for (std::size_t lane = 1; lane < table->lanes.size() && !source.keeps_moves(); ++lane) {
      EXPECT_EQ(table->lanes[lane].count, 0u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllOperators, ComputeOnly,
                         testing::Combine(testing::Range(0, kGemmOpCount),
                                          testing::Values(std::pair(2, 4), std::pair(1, 8), std::pair(3, 2),
                                                          std::pair(2, 1), std::pair(4, 2))));

}  // namespace
}  // namespace mkernel::bench
