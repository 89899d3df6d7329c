// ring_attention in the simulator: real data with race checks, faults, and what it costs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "exec/attention_problem.h"
#include "exec/sim/explore.h"
#include "exec/sim/test_simulation.h"
#include "plan/attention_tiling.h"
#include "plan/test_attention_spec.h"

namespace mkernel {
namespace {

using test::attention_kinds;
using test::checked_options;
using test::Damaged;
using test::kSecond;
using test::Outcome;
using test::text_of;

constexpr Topology kWorlds[] = {{1, 1}, {1, 2}, {1, 3}, {2, 1}, {2, 2}, {3, 1}, {2, 3}, {3, 2}, {4, 2}};

Outcome run_three(const PlanSource& source, const SimOptions& options) {
  return test::run_three<AttentionProblem>(source, options);
}

TEST(SimulatedAttention, GivesTheRightBitsWithoutARaceOnEverySmallWorld) {
  for (const Topology topo : kWorlds) {
    for (const AttentionSpec& kind : attention_kinds()) {
      const PlanSource source{Plan(test::make_attention_spec(topo, topo.world() * 9 + 2, kind))};
      SimOptions options = checked_options(topo);
      options.inject.shuffle = true;
      const Outcome outcome = run_three(source, options);
      EXPECT_FALSE(outcome.bad()) << text_of(source.plan().spec()) << ": " << outcome.text();
    }
  }
}

TEST(SimulatedAttention, IsWithinTheBoundOfFp64) {
  for (const Topology topo : {Topology{1, 1}, Topology{2, 2}, Topology{3, 1}}) {
    for (const AttentionSpec& kind : attention_kinds()) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
        PlanSpec spec = test::make_attention_spec(topo, 75, kind);
        spec.dtype = spec.partial = dtype;
        const PlanSource source{Plan(spec)};
        const PlanSource* operators[] = {&source};
        AttentionProblem problem(source.plan(), 4, {.score_size = 6});
        const SimCall call{0, problem.arguments()};
        ASSERT_FALSE(simulate(checked_options(topo), operators, {&call, 1}).error);
        const CheckReport check = problem.check();
        EXPECT_TRUE(check.ok) << text_of(spec) << ": " << check.worst_ratio << " at " << check.worst_row << ", "
                              << check.worst_col;
      }
    }
  }
}

TEST(SimulatedAttention, BitsDoNotDependOnThePartitionOrTheSeed) {
  AttentionSpec kind;
  kind.mask.causal = kind.zigzag = true;
  kind.heads = 2;
  kind.slot_rounds = 2;
  const PlanSource source{Plan(test::make_attention_spec({2, 2}, 90, kind))};
  const PlanSource* operators[] = {&source};
  std::vector<std::byte> first;
  for (int compute = 0; compute <= 4; ++compute) {
    for (int intra = 0; compute + intra <= 4; ++intra) {
      SimOptions options = checked_options({2, 2});
      options.partition = {compute, intra, 4 - compute - intra};
      options.seed = static_cast<std::uint64_t>(compute * 5 + intra + 1);
      options.inject.shuffle = true;
      AttentionProblem problem(source.plan(), 3);
      const SimCall call{0, problem.arguments()};
      ASSERT_FALSE(simulate(options, operators, {&call, 1}).error);
      if (first.empty()) first = problem.output();
      EXPECT_EQ(problem.output(), first) << compute << "," << intra;
    }
  }
}

// Fewer slots than chunks cost time and change no bit.
TEST(SimulatedAttention, BitsDoNotDependOnTheNumberOfSlots) {
  std::vector<std::byte> first;
  for (const std::int64_t rounds : {0, 1, 2, 5}) {
    AttentionSpec kind;
    kind.slot_rounds = rounds;
    const PlanSource source{Plan(test::make_attention_spec({3, 2}, 120, kind))};
    const PlanSource* operators[] = {&source};
    AttentionProblem problem(source.plan(), 3);
    const SimCall call{0, problem.arguments()};
    ASSERT_FALSE(simulate(checked_options({3, 2}), operators, {&call, 1}).error);
    if (first.empty()) first = problem.output();
    EXPECT_EQ(problem.output(), first) << rounds;
  }
}

TEST(SimulatedAttention, CatchesASlotThatIsFilledWhileItIsRead) {
  AttentionSpec kind;
  kind.slot_rounds = 1;
  for (const Topology topo : {Topology{1, 3}, Topology{3, 1}, Topology{2, 2}}) {
    const Damaged source(Plan(test::make_attention_spec(topo, topo.world() * 15, kind)),
                         [](std::int32_t, Role role, std::int32_t, std::int64_t, Task& task) {
                           if (role == Role::kSend) task.waits[1] = {};
                           if (role == Role::kRecv) task.waits[1] = {};
                           if (role == Role::kIntra) task.waits[0] = {};
                         });
    SimOptions options = checked_options(topo);
    options.inject.shuffle = true;
    EXPECT_TRUE(run_three(source, options).bad()) << topo.nodes << "x" << topo.gpus;
  }
}

TEST(SimulatedAttention, CatchesAStateThatIsTakenTooEarly) {
  const Damaged source(Plan(test::make_attention_spec({1, 2}, 40)),
                       [](std::int32_t, Role role, std::int32_t, std::int64_t, Task& task) {
                         if (role == Role::kCompute) task.waits[1] = {};
                       });
  SimOptions options = checked_options({1, 2});
  options.inject.shuffle = true;
  EXPECT_TRUE(run_three(source, options).bad());
}

TEST(SimulatedAttention, ALostCreditEndsInANamedWait) {
  AttentionSpec kind;
  kind.slot_rounds = 1;
  const Damaged source(Plan(test::make_attention_spec({2, 2}, 60, kind)),
                       [](std::int32_t rank, Role role, std::int32_t, std::int64_t index, Task& task) {
                         if (rank == 2 && role == Role::kCompute && index == 4) task.signals[1] = {};
                       });
  const Outcome outcome = run_three(source, checked_options({2, 2}));
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->kind, ErrorKind::kTimeout);
  EXPECT_NE(outcome.error->message.find("credit"), std::string::npos) << outcome.error->message;
}

TEST(SimulatedAttention, ADeadRankIsNamedAndALateOneWaitedFor) {
  AttentionSpec kind;
  kind.slot_rounds = 2;
  const PlanSource source{Plan(test::make_attention_spec({2, 2}, 60, kind))};
  SimOptions dead = checked_options({2, 2});
  dead.inject.dead_rank = 1;
  dead.inject.dead_ns = 1000;
  const Outcome lost = run_three(source, dead);
  ASSERT_TRUE(lost.error);
  EXPECT_EQ(lost.error->kind, ErrorKind::kPeerLost);
  EXPECT_NE(lost.error->message.find("rank 1 died"), std::string::npos) << lost.error->message;
  SimOptions late = checked_options({2, 2});
  late.inject.late_rank = 3;
  late.inject.late_ns = 90 * kSecond;
  EXPECT_FALSE(run_three(source, late).bad());
  SimOptions withheld = checked_options({2, 2});
  withheld.inject.withheld_sms = 3;
  withheld.inject.withheld_until_ns = 1000 * kSecond;
  EXPECT_FALSE(run_three(source, withheld).bad());
}

TEST(SimulatedAttention, FlagsMayWrap) {
  AttentionSpec kind;
  kind.slot_rounds = 1;
  const PlanSource source{Plan(test::make_attention_spec({2, 2}, 60, kind))};
  for (const std::uint64_t start : {(std::uint64_t{1} << 33) - 3, (std::uint64_t{1} << 32) - 3}) {
    SimOptions options = checked_options({2, 2});
    options.inject.start_epoch = start;
    EXPECT_FALSE(run_three(source, options).bad()) << start;
  }
}

TEST(SimulatedAttention, RandomWorldsShapesAndFaults) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    const ExploreResult result = explore_seed(Op::kRingAttention, seed, {"all"});
    EXPECT_FALSE(result.failure) << result.scenario << ": " << result.failure->message;
  }
}

// ---- time

double milliseconds(PlanSpec spec, double net_gb_per_s, bool fused = true) {
  spec.tiling = choose_attention_tiling(spec);
  SimOptions options;
  options.topo = spec.topo;
  options.data = false;
  options.fused = fused;
  options.cost.net_bytes_per_ns = net_gb_per_s;
  const PlanSource source{Plan(spec)};
  const PlanSource* operators[] = {&source};
  const SimCall call{0, {}};
  const SimReport report = simulate(options, operators, {&call, 1});
  EXPECT_FALSE(report.error) << report.error->message;
  return static_cast<double>(report.time_ns) * 1e-6;
}

PlanSpec large(Topology topo) {
  PlanSpec spec;
  spec.op = Op::kRingAttention;
  spec.topo = topo;
  spec.attention.heads = 16;
  spec.attention.kv_heads = 16;
  spec.attention.dim = 128;
  spec.attention.seq_q = spec.attention.seq_k = 4096 * topo.world();
  return spec;
}

// 4 S^2 D per head at 63 % of 990 TFLOP/s, plus what each chunk's beginning and end costs.
TEST(SimulatedAttentionTime, OneGpuTakesItsFlops) {
  PlanSpec spec = large({1, 1});
  spec.attention.seq_q = spec.attention.seq_k = 16384;
  const double flops = 4.0 * 16384 * 16384 * 128 * 16;
  const double ideal_ms = flops / (990e12 * 0.63) * 1e3;
  EXPECT_GT(milliseconds(spec, 50), ideal_ms);
  EXPECT_LT(milliseconds(spec, 50), 1.1 * ideal_ms);
  spec.attention.mask.causal = true;
  EXPECT_LT(milliseconds(spec, 50), 0.6 * ideal_ms);
}

TEST(SimulatedAttentionTime, ZigzagBalancesACausalMaskAndFusionHidesTheNetwork) {
  PlanSpec spec = large({2, 2});
  const double fused = milliseconds(spec, 50);
  EXPECT_LT(fused, milliseconds(spec, 50, false));
  spec.attention.mask.causal = true;
  const double plain = milliseconds(spec, 50);
  spec.attention.zigzag = true;
  EXPECT_LT(1.2 * milliseconds(spec, 50), plain);
}

}  // namespace
}  // namespace mkernel
