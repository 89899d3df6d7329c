#include "plan/plan.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <set>
#include <type_traits>

#include "plan/operands.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};

PlanSpec make_spec(Op op, Topology topo, std::int64_t m, std::int64_t n, std::int64_t k) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = topo;
  spec.m = m;
  spec.n = n;
  spec.k = k;
  spec.tiling = choose_tiling(spec);
  return spec;
}

TEST(Plan, IsPlainDataThatADeviceCanCopy) {
  static_assert(std::is_trivially_copyable_v<Plan>);
  static_assert(std::is_trivially_copyable_v<Task>);
  static_assert(std::is_trivially_copyable_v<PlanSpec>);
}

TEST(Plan, CanBeEvaluatedByTheCompiler) {
  constexpr Plan plan = [] {
    PlanSpec spec;
    spec.op = Op::kGemmReduceScatter;
    spec.topo = {2, 2};
    spec.m = spec.n = spec.k = 64;
    return Plan(spec);
  }();
  static_assert(plan.lanes(Role::kSend) == 1);
  static_assert(plan.task(0, Role::kCompute, 0, 0).action == Action::kGemm);
}

// A million rows and columns: 2^40 elements of C. A method that were not O(1) would be noticed here.
TEST(Plan, TasksOfAHugePlanAreFoundAtOnce) {
  for (const Op op : kOps) {
    const PlanSpec spec = make_spec(op, {4, 8}, 1 << 20, 1 << 20, 1 << 20);
    ASSERT_TRUE(validate(spec).ok()) << op_name(op);
    const Plan plan(spec);
    const auto begin = std::chrono::steady_clock::now();
    int evaluated = 0;
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
        const std::int64_t count = plan.count(31, role, lane);
        ASSERT_GT(count, 0) << op_name(op) << " role " << r;
        for (const std::int64_t index : {std::int64_t{0}, count / 2, count - 1}) {
          const Task task = plan.task(31, role, lane, index);
          const auto expect_within = [&](const Access& access) {
            EXPECT_GE(access.begin, 0);
            EXPECT_LE(access.end, plan.buffer_elements(access.buffer));
          };
          for_each_read(plan, 31, task, expect_within);
          for_each_write(plan, 31, task, expect_within);
          ++evaluated;
        }
      }
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(evaluated, 9);
    EXPECT_LT(time.count(), 1.0) << op_name(op);
  }
}

// The last task of the compute lane of a C with 2^40 elements lies beyond 2^31 in every way that counts.
TEST(Plan, OffsetsOfAHugePlanHave64Bits) {
  const Plan plan(make_spec(Op::kGemmAllReduce, {4, 8}, 1 << 20, 1 << 20, 1 << 20));
  std::int64_t largest = 0;
  const std::int64_t count = plan.count(0, Role::kCompute, 0);
  for (std::int64_t i = count - 4096; i < count; ++i) {
    largest = max_of(largest, plan.task(0, Role::kCompute, 0, i).dst_offset);
  }
  EXPECT_GT(largest, std::int64_t{1} << 39);
}

TEST(Plan, ShapesOfAllRanksMakeTheWholeMatrices) {
  for (const Op op : kOps) {
    const Plan plan(make_spec(op, {2, 3}, 20, 15, 13));
    std::int64_t a = 0, b = 0, c = 0;
    for (std::int32_t rank = 0; rank < 6; ++rank) {
      a += plan.a_extent(rank).rows * plan.a_extent(rank).cols;
      b += plan.b_extent(rank).rows * plan.b_extent(rank).cols;
      c += plan.c_extent(rank).rows * plan.c_extent(rank).cols;
      EXPECT_EQ(plan.a_extent(rank).cols, plan.b_extent(rank).rows);
    }
    EXPECT_EQ(a, 20 * 13) << op_name(op);
    EXPECT_EQ(b, 13 * 15) << op_name(op);
    EXPECT_EQ(c, (op == Op::kGemmAllReduce ? 6 : 1) * 20 * 15) << op_name(op);
  }
}

TEST(Plan, AWorldOfOneIsPlainCompute) {
  for (const Op op : kOps) {
    const Plan plan(make_spec(op, {1, 1}, 300, 200, 100));
    EXPECT_EQ(plan.lanes(Role::kIntra) + plan.lanes(Role::kSend) + plan.lanes(Role::kRecv), 0) << op_name(op);
    EXPECT_EQ(plan.network_bytes(0), 0);
    EXPECT_EQ(workspace_bytes(plan.spec()), 0) << op_name(op);
  }
}

TEST(Plan, SendIdsAreDistinctAndLeadBack) {
  for (const Op op : kOps) {
    const Plan plan(make_spec(op, {4, 2}, 2000, 2000, 50));
    std::set<std::int64_t> ids;
    for (std::int32_t lane = 0; lane < plan.lanes(Role::kSend); ++lane) {
      for (std::int64_t index = 0; index < plan.count(0, Role::kSend, lane); ++index) {
        const std::int64_t id = send_id(plan, {lane, index});
        EXPECT_TRUE(ids.insert(id).second) << op_name(op) << " " << id;
        EXPECT_EQ(send_of(plan, id).lane, lane);
        EXPECT_EQ(send_of(plan, id).index, index);
      }
    }
    EXPECT_GT(ids.size(), 3u) << op_name(op);
  }
}

TEST(Plan, EveryFlagHasAMeaning) {
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{1, 3}, Topology{3, 1}, Topology{2, 2}, Topology{3, 2}}) {
      const Plan plan(make_spec(op, topo, 300, 700, 50));
      for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
        for (std::uint32_t flag = 0; flag < plan.flag_count(); ++flag) {
          const FlagName name = plan.flag_name(rank, flag);
          EXPECT_STRNE(name.what, "?");
          EXPECT_LT(name.sender, topo.world());
        }
      }
    }
  }
}

// The sender that a flag's name gives is the one that raises it: messages send people to the right machine.
TEST(Plan, FlagNamesGiveTheRankThatRaisesThem) {
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{1, 3}, Topology{3, 1}, Topology{2, 2}, Topology{3, 2}}) {
      const Plan plan(make_spec(op, topo, 300, 700, 50));
      for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
        for (int r = 0; r < kRoleCount; ++r) {
          const auto role = static_cast<Role>(r);
          for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
            for (std::int64_t i = 0; i < plan.count(rank, role, lane); ++i) {
              const Task task = plan.task(rank, role, lane, i);
              for (const Signal& signal : task.signals) {
                for_each_rank(topo, rank, signal, task.peer, [&](std::int32_t reached) {
                  const std::int32_t sender = plan.flag_name(reached, signal.flag).sender;
                  EXPECT_TRUE(sender == rank || (sender == -1 && topo.node_of(reached) == topo.node_of(rank)))
                      << op_name(op) << " " << topo.nodes << "x" << topo.gpus << ": flag " << signal.flag << " of rank "
                      << reached << " is raised by rank " << rank << ", named " << sender;
                });
              }
            }
          }
        }
      }
    }
  }
}

TEST(Epochs, EveryParityIsUsedOnceInTwoEpochs) {
  EXPECT_EQ(use_of_epoch(0), 0u);
  EXPECT_EQ(use_of_epoch(1), 1u);
  EXPECT_EQ(use_of_epoch(2), 1u);
  EXPECT_EQ(use_of_epoch(3), 2u);
  EXPECT_EQ(use_of_epoch(4), 2u);
}

TEST(Epochs, FlagsMayWrap) {
  EXPECT_TRUE(flag_reached(5, 5));
  EXPECT_TRUE(flag_reached(6, 5));
  EXPECT_FALSE(flag_reached(4, 5));
  EXPECT_TRUE(flag_reached(1, 0xffffffffu));
  EXPECT_FALSE(flag_reached(0xffffffffu, 1));
}

}  // namespace
}  // namespace mkernel
