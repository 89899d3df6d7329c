// ring_attention_backward in the simulator: real data with race checks, faults, and what it costs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "exec/backward_problem.h"
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
  return test::run_three<BackwardProblem>(source, options);
}

TEST(SimulatedBackward, GivesTheRightBitsWithoutARaceOnEverySmallWorld) {
  for (const Topology topo : kWorlds) {
    for (const AttentionSpec& kind : attention_kinds()) {
      const PlanSource source{Plan(test::make_backward_spec(topo, topo.world() * 9 + 2, kind))};
      SimOptions options = checked_options(topo);
      options.inject.shuffle = true;
      const Outcome outcome = run_three(source, options);
      EXPECT_FALSE(outcome.bad()) << text_of(source.plan().spec()) << ": " << outcome.text();
    }
  }
}

TEST(SimulatedBackward, IsWithinTheBoundOfFp64) {
  for (const Topology topo : {Topology{1, 1}, Topology{2, 2}, Topology{3, 1}}) {
    for (const AttentionSpec& kind : attention_kinds()) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
        PlanSpec spec = test::make_backward_spec(topo, 75, kind);
        spec.dtype = spec.partial = dtype;
        if (dtype == Dtype::kFp16) spec.partial = Dtype::kFp32;
        const PlanSource source{Plan(spec)};
        const PlanSource* operators[] = {&source};
        BackwardProblem problem(source.plan(), 4, {.score_size = 6});
        const SimCall call{0, problem.arguments()};
        ASSERT_FALSE(simulate(checked_options(topo), operators, {&call, 1}).error);
        const GradientReport check = problem.check();
        EXPECT_TRUE(check.ok()) << text_of(spec) << ": " << check.worst_name() << " at " << check.worst().worst_ratio;
      }
    }
  }
}

TEST(SimulatedBackward, BitsDoNotDependOnPartitionSeedSlotsOrFusion) {
  std::vector<std::byte> first;
  const auto expect_same = [&](const PlanSource& source, const SimOptions& options) {
    const PlanSource* operators[] = {&source};
    BackwardProblem problem(source.plan(), 3);
    const SimCall call{0, problem.arguments()};
    ASSERT_FALSE(simulate(options, operators, {&call, 1}).error);
    if (first.empty()) first = problem.output();
    EXPECT_EQ(problem.output(), first);
  };
  AttentionSpec kind;
  kind.mask.causal = kind.zigzag = true;
  kind.heads = 2;
  for (const std::int64_t rounds : {0, 1, 2, 5}) {
    kind.slot_rounds = rounds;
    const PlanSource source{Plan(test::make_backward_spec({2, 2}, 90, kind))};
    for (int compute = 0; compute <= 4; compute += rounds == 2 ? 1 : 2) {
      SimOptions options = checked_options({2, 2});
      options.partition = {compute, (4 - compute) / 2, 4 - compute - (4 - compute) / 2};
      options.seed = static_cast<std::uint64_t>(compute * 5 + 1);
      options.inject.shuffle = true;
      expect_same(source, options);
    }
    if (rounds == 0) {
      SimOptions unfused = checked_options({2, 2});
      unfused.fused = false;
      expect_same(source, unfused);
    }
  }
}

TEST(SimulatedBackward, CatchesWhatIsReadTooEarly) {
  const struct {
    const char* what;
    std::int64_t rounds;
    std::function<void(Role, Task&)> damage;
  } table[] = {
      {"a slot", 1,
       [](Role role, Task& task) {
         if (role == Role::kSend && task.src == Buffer::kKv) task.waits[1] = {};
         if (role == Role::kIntra && task.action == Action::kCopy) task.waits[0] = {};
       }},
      {"sums of queries", 0,
       [](Role role, Task& task) {
         if (role == Role::kCompute) task.waits[1] = {};
       }},
      {"sums of keys", 0,
       [](Role role, Task& task) {
         if (role == Role::kCompute && task.resume_keys) task.waits[0] = {};
       }},
      {"parts", 0,
       [](Role, Task& task) {
         if (task.source == Source::kNode) task.waits[0] = {};
       }},
      {"sums of nodes", 0,
       [](Role, Task& task) {
         if (task.source == Source::kRail) task.waits[0] = task.waits[1] = {};
       }},
  };
  for (const auto& bad : table) {
    AttentionSpec kind;
    kind.heads = 2;
    kind.slot_rounds = bad.rounds;
    const Damaged source(
        Plan(test::make_backward_spec({2, 2}, 60, kind)),
        [&](std::int32_t, Role role, std::int32_t, std::int64_t, Task& task) { bad.damage(role, task); });
    SimOptions options = checked_options({2, 2});
    options.inject.shuffle = true;
    EXPECT_TRUE(run_three(source, options).bad()) << bad.what;
  }
}

TEST(SimulatedBackward, ALostCreditEndsInANamedWait) {
  AttentionSpec kind;
  kind.slot_rounds = 1;
  const Damaged source(Plan(test::make_backward_spec({2, 2}, 60, kind)),
                       [](std::int32_t rank, Role, std::int32_t, std::int64_t index, Task& task) {
                         if (rank == 2 && task.source == Source::kNode && index == 1) task.signals[1] = {};
                       });
  const Outcome outcome = run_three(source, checked_options({2, 2}));
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->kind, ErrorKind::kTimeout);
  EXPECT_NE(outcome.error->message.find("credit"), std::string::npos) << outcome.error->message;
}

TEST(SimulatedBackward, ADeadRankIsNamedAndALateOneWaitedFor) {
  AttentionSpec kind;
  kind.slot_rounds = 2;
  const PlanSource source{Plan(test::make_backward_spec({2, 2}, 60, kind))};
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
}

TEST(SimulatedBackward, FlagsMayWrap) {
  AttentionSpec kind;
  kind.slot_rounds = 1;
  const PlanSource source{Plan(test::make_backward_spec({2, 2}, 60, kind))};
  for (const std::uint64_t start : {(std::uint64_t{1} << 33) - 3, (std::uint64_t{1} << 32) - 3}) {
    SimOptions options = checked_options({2, 2});
    options.inject.start_epoch = start;
    EXPECT_FALSE(run_three(source, options).bad()) << start;
  }
}

TEST(SimulatedBackward, RandomWorldsShapesAndFaults) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    const ExploreResult result = explore_seed(Op::kRingAttentionBackward, seed, {"all"});
    EXPECT_FALSE(result.failure) << result.scenario << ": " << result.failure->message;
  }
}

// ---- time

double milliseconds(PlanSpec spec, double net_gb_per_s, bool fused = true) {
  spec.tiling = choose_backward_tiling(spec);
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

TEST(SimulatedBackwardTime, FusionHidesTheNetworkAndZigzagBalances) {
  PlanSpec spec;
  spec.op = Op::kRingAttentionBackward;
  spec.topo = {2, 2};
  spec.attention.heads = 16;
  spec.attention.kv_heads = 16;
  spec.attention.dim = 128;
  spec.attention.seq_q = spec.attention.seq_k = 16384;
  EXPECT_LT(milliseconds(spec, 50), milliseconds(spec, 50, false));
  spec.attention.mask.causal = true;
  const double plain = milliseconds(spec, 50);
  spec.attention.zigzag = true;
  EXPECT_LT(1.2 * milliseconds(spec, 50), plain);
}

}  // namespace
}  // namespace mkernel
