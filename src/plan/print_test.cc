#include "plan/print.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "plan/test_spec.h"

namespace mkernel {
namespace {

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};

PlanSpec make_spec(Op op, Topology topo) { return test::make_spec(op, topo, 100, 72, 40); }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::int64_t lines_with(const std::string& text, const std::string& part) {
  std::int64_t count = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    count += contains(text.substr(at, end - at), part) ? 1 : 0;
    at = end + 1;
  }
  return count;
}

TEST(PrintPlan, StartsWithWhatDecidesThePlan) {
  const std::string text = print_plan(PlanSource(Plan(make_spec(Op::kGemmReduceScatter, {3, 2}))), 3, 4);
  EXPECT_EQ(text.substr(0, text.find('\n')),
            "gemm_reduce_scatter, m = 100, n = 72, k = 40, bf16, sums between GPUs in bf16");
  EXPECT_TRUE(contains(text, "rank 3 of 6: node 1 of 3, GPU 1 of 2\n")) << text;
  EXPECT_TRUE(contains(text, "its matrices: A 100 x 7, B 7 x 72, C 17 x 72\n")) << text;
  EXPECT_TRUE(contains(text, "tiles of 8 x 8, bands of 2 tile rows, chunks of 2 tiles\n")) << text;
  EXPECT_TRUE(contains(text, "workspace: ")) << text;
  // Two other nodes, 17 and 16 rows of 72 bf16.
  EXPECT_TRUE(contains(text, "network: 4.6 KiB sent by this rank\n")) << text;
}

TEST(PrintPlan, ShowsEveryTaskOfAShortLane) {
  for (const Op op : kOps) {
    const PlanSource source{Plan(make_spec(op, {3, 2}))};
    const std::string text = print_plan(source, 1, 100000);
    std::int64_t tasks = 0;
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < source.plan().lanes(role); ++lane) tasks += source.count(1, role, lane);
    }
    EXPECT_FALSE(contains(text, "more\n"));
    EXPECT_GE(std::count(text.begin(), text.end(), '\n'), tasks) << op_name(op);
    EXPECT_EQ(lines_with(text, "send["), source.plan().lanes(Role::kSend)) << op_name(op);
  }
}

TEST(PrintPlan, LeavesOutTheMiddleOfALongLaneAndSaysHowMuch) {
  const PlanSource source{Plan(make_spec(Op::kGemmAllReduce, {1, 2}))};
  const std::int64_t count = source.count(0, Role::kCompute, 0);
  const std::string text = print_plan(source, 0, 6);
  EXPECT_TRUE(contains(text, "compute[0]: " + std::to_string(count) + " tasks\n")) << text;
  EXPECT_TRUE(contains(text, "...  " + std::to_string(count - 6) + " more\n")) << text;
  EXPECT_TRUE(
      contains(text, "\n" + std::string(8 - std::to_string(count - 1).size(), ' ') + std::to_string(count - 1) + "  "))
      << "the last task is missing from\n"
      << text;
  EXPECT_TRUE(contains(print_plan(source, 0, 0), "...  " + std::to_string(count) + " more\n"));
}

TEST(PrintPlan, EndsWithWhatCompletesTheCall) {
  const std::string reduce = print_plan(PlanSource(Plan(make_spec(Op::kGemmAllReduce, {1, 2}))), 0, 3);
  EXPECT_TRUE(contains(reduce, "complete when all of these tasks are done, and flag ")) << reduce;
  const std::string scatter = print_plan(PlanSource(Plan(make_spec(Op::kGemmReduceScatter, {1, 2}))), 0, 3);
  EXPECT_TRUE(scatter.ends_with("complete when all of these tasks are done\n")) << scatter;
}

TEST(PrintPlan, AWorldOfOneUsesNoWorkspaceAndNoNetwork) {
  const std::string text = print_plan(PlanSource(Plan(make_spec(Op::kGemmAllReduce, {1, 1}))), 0, 3);
  EXPECT_TRUE(contains(text, "workspace: none\nnetwork: not used\n")) << text;
}

TEST(DescribeTask, SaysInOneLineWhatItWaitsForDoesAndSignals) {
  const Plan plan(make_spec(Op::kGemmReduceScatter, {2, 2}));
  const Task put = plan.task(1, Role::kSend, 0, 2);
  EXPECT_EQ(describe_task(plan, 1, Role::kSend, 0, 2, put),
            "rank 1 send[0] task 2: after flag " + std::to_string(put.waits[0].flag) +
                " (node sum, node/chunk 1/2) x 2: send node sum at " + std::to_string(put.src_offset) +
                " to arrival at " + std::to_string(put.dst_offset) +
                " of rank 3: 128 elements, 256 B; then stamp flag " + std::to_string(put.signals[0].flag) +
                " (arrival, node/chunk 0/2) on rank 3");
  EXPECT_EQ(describe_action(plan, 1, plan.task(1, Role::kRecv, 0, 0)), "C[0:8, 0:8] = sum of node sums 0..1");
  EXPECT_EQ(describe_action(plan, 1, plan.task(1, Role::kCompute, 0, 0)),
            "partial[50:58, 0:8] = A[50:58, :] * B[:, 0:8]");
}

TEST(DescribeTask, EveryTaskOfEveryRankHasALineOfItsOwn) {
  for (const Op op : kOps) {
    const Plan plan(make_spec(op, {2, 2}));
    std::set<std::string> lines;
    std::size_t tasks = 0;
    for (std::int32_t rank = 0; rank < 4; ++rank) {
      for (int r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
          for (std::int64_t i = 0; i < plan.count(rank, role, lane); ++i, ++tasks) {
            lines.insert(describe_task(plan, rank, role, lane, i, plan.task(rank, role, lane, i)));
          }
        }
      }
    }
    EXPECT_EQ(lines.size(), tasks) << op_name(op);
    for (const std::string& line : lines) {
      ASSERT_FALSE(contains(line, "\n")) << line;
      ASSERT_FALSE(contains(line, "?")) << line;
    }
  }
}

TEST(DescribeTask, DamagedTasksAreDescribedToo) {
  const Plan plan(make_spec(Op::kGemmAllReduce, {1, 2}));
  Task task = plan.task(0, Role::kIntra, 0, 0);
  task.waits[1] = {0xfffffff0u, 5, 1};
  task.signals[1] = {0xffffffffu, Reach::kRank, false};
  task.peer = 77;
  const std::string line = describe_task(plan, 0, Role::kIntra, 0, 0, task);
  EXPECT_TRUE(contains(line, "there is none")) << line;
}

TEST(DescribeFlag, GivesNumberMeaningAndSender) {
  const Plan plan(make_spec(Op::kGemmReduceScatter, {2, 2}));
  const std::uint32_t arrival = plan.task(3, Role::kRecv, 0, 0).waits[1].flag;
  EXPECT_EQ(describe_flag(plan, 3, arrival),
            "flag " + std::to_string(arrival) + " (arrival, node/chunk 0/0, from rank 1)");
  EXPECT_EQ(describe_flag(plan, 3, 0), "flag 0 (partial tile, node/tile 0/0, from the GPUs of the node)");
  EXPECT_EQ(describe_flag(plan, 3, plan.flag_count()),
            "flag " + std::to_string(plan.flag_count()) + " (there is none)");
  EXPECT_EQ(describe_flag(plan, -1, 0), "flag 0 (there is none)");
}

}  // namespace
}  // namespace mkernel
