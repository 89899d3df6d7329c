#include "exec/sim/simulator.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "exec/problem.h"
#include "exec/sim/explore.h"
#include "exec/sim/test_simulation.h"
#include "plan/test_spec.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

using test::checked_options;
using test::Damaged;
using test::kSecond;
using test::Outcome;

PlanSpec small_spec(Op op, Topology topo, std::int64_t m = 96, std::int64_t n = 64, std::int64_t k = 33) {
  const PlanSpec spec = test::make_spec(
      op, topo, m, n, k,
      {.bm = 16, .bn = 16, .band = 2, .chunk_tiles = 2, .chunk_rows = 16, .copy_rows = 4, .pitch_align = 8});
  EXPECT_TRUE(validate(spec).ok());
  return spec;
}

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};

Outcome run_three(const PlanSource& source, const SimOptions& options) {
  return test::run_three<Problem>(source, options);
}

TEST(Simulator, EveryOperatorGivesTheExactResultWithoutARaceOnEverySmallWorld) {
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{1, 1}, {1, 2}, {1, 3}, {2, 1}, {2, 2}, {3, 1}, {2, 3}, {3, 2}, {4, 2}}) {
      const PlanSource source{Plan(small_spec(op, topo))};
      const Outcome outcome = run_three(source, checked_options(topo));
      EXPECT_FALSE(outcome.error) << op_name(op) << " " << topo.nodes << "x" << topo.gpus << ": "
                                  << outcome.error->message;
      EXPECT_FALSE(outcome.mismatch) << op_name(op) << ": " << *outcome.mismatch;
    }
  }
}

TEST(Simulator, ShardsThatShareTilesGiveTheExactResultWithoutARace) {
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmReduceScatter}) {
    for (const Topology topo : {Topology{1, 2}, {1, 3}, {2, 1}, {3, 1}, {2, 3}, {4, 2}, {5, 1}}) {
      for (const std::int64_t m : {0, 1, topo.world() - 1, 2 * topo.world() + 1}) {
        PlanSpec spec = small_spec(op, topo, m);
        spec.tiling.bm = spec.tiling.chunk_rows = 32;
        for (std::int32_t shards = 2; shards <= topo.world(); ++shards) {
          spec.tiling.grid_shards = shards;
          if (!validate(spec)) continue;
          const Outcome outcome = run_three(PlanSource{Plan(spec)}, checked_options(topo));
          const std::string what =
              fmt::format("{} {}x{}, m {}, tiles of {} shards", op_name(op), topo.nodes, topo.gpus, m, shards);
          EXPECT_FALSE(outcome.error) << what << ": " << outcome.error->message;
          EXPECT_FALSE(outcome.mismatch) << what << ": " << *outcome.mismatch;
        }
      }
    }
  }
}

TEST(Simulator, TheSameSeedGivesTheSameRun) {
  const PlanSource source{Plan(small_spec(Op::kGemmAllReduce, {2, 2}))};
  const PlanSource* operators[] = {&source};
  const auto time_of = [&](std::uint64_t seed) {
    SimOptions options = checked_options({2, 2});
    options.seed = seed;
    options.inject.shuffle = true;
    options.cost.jitter = 1;
    Problem problem(source.plan(), 1);
    const SimCall call{0, problem.arguments()};
    return simulate(options, operators, {&call, 1}).time_ns;
  };
  EXPECT_EQ(time_of(7), time_of(7));
  EXPECT_NE(time_of(7), time_of(8));
}

TEST(Simulator, BitsDoNotDependOnThePartitionOrTheSeed) {
  for (const Op op : kOps) {
    const PlanSource source{Plan(small_spec(op, {2, 2}))};
    const PlanSource* operators[] = {&source};
    std::vector<std::vector<std::byte>> first;
    for (int compute = 0; compute <= 4; ++compute) {
      for (int intra = 0; compute + intra <= 4; ++intra) {
        SimOptions options = checked_options({2, 2});
        options.partition = {compute, intra, 4 - compute - intra};
        options.seed = static_cast<std::uint64_t>(compute * 5 + intra + 1);
        options.inject.shuffle = true;
        Problem problem(source.plan(), 3);
        const SimCall call{0, problem.arguments()};
        ASSERT_FALSE(simulate(options, operators, {&call, 1}).error);
        if (first.empty()) first = problem.outputs();
        EXPECT_EQ(problem.outputs(), first) << op_name(op) << " " << compute << "," << intra;
      }
    }
  }
}

// What the dynamic checks are for: each kind of damage must end in a race, a wrong result, or a named wait.
TEST(Simulator, CatchesADroppedWait) {
  for (const Op op : kOps) {
    const Damaged source(Plan(small_spec(op, {2, 2})),
                         [](std::int32_t rank, Role role, std::int32_t, std::int64_t index, Task& task) {
                           if (rank == 1 && role == Role::kRecv && index == 1)
                             task.waits[0].span = task.waits[1].span = 0;
                         });
    SimOptions options = checked_options({2, 2});
    options.inject.shuffle = true;
    EXPECT_TRUE(run_three(source, options).bad()) << op_name(op);
  }
}

TEST(Simulator, CatchesASendThatDoesNotWaitForItsData) {
  for (const Op op : kOps) {
    const Damaged source(Plan(small_spec(op, {2, 2})),
                         [](std::int32_t rank, Role role, std::int32_t, std::int64_t, Task& task) {
                           if (rank == 0 && role == Role::kSend) task.waits[0].span = 0;
                         });
    const Outcome outcome = run_three(source, checked_options({2, 2}));
    ASSERT_TRUE(outcome.error) << op_name(op);
    EXPECT_NE(outcome.error->message.find("race"), std::string::npos) << outcome.error->message;
  }
}

TEST(Simulator, NamesTheWaitOfADroppedSignal) {
  for (const Op op : kOps) {
    const Damaged source(Plan(small_spec(op, {2, 2})),
                         [](std::int32_t rank, Role role, std::int32_t, std::int64_t index, Task& task) {
                           if (rank == 2 && role == Role::kIntra && index == 0) task.signals[0].reach = Reach::kNobody;
                         });
    const Outcome outcome = run_three(source, checked_options({2, 2}));
    ASSERT_TRUE(outcome.error) << op_name(op);
    EXPECT_EQ(outcome.error->kind, ErrorKind::kTimeout);
    EXPECT_NE(outcome.error->message.find("wanted"), std::string::npos) << outcome.error->message;
  }
}

TEST(Simulator, CatchesTwoTasksThatWriteTheSameTile) {
  for (const Op op : kOps) {
    const Damaged source(Plan(small_spec(op, {1, 2})),
                         [](std::int32_t, Role role, std::int32_t, std::int64_t index, Task& task) {
                           if (role == Role::kCompute && index == 1) {
                             task.block.row = 0;
                             task.block.col = 0;
                             task.dst_offset = 0;
                           }
                         });
    EXPECT_TRUE(run_three(source, checked_options({1, 2})).bad()) << op_name(op);
  }
}

// Without the wait for everybody's chunks an idle rank would run ahead and overwrite what others still read.
TEST(Simulator, CatchesARankThatRunsTwoEpochsAhead) {
  class NoCompletion : public PlanSource {
   public:
    using PlanSource::PlanSource;
    Wait completion(std::int32_t) const override { return {}; }
  };
  // Rank 1 owns no columns, so only the completion makes it wait for rank 0, which is slow.
  const NoCompletion source{Plan(small_spec(Op::kAllGatherGemm, {1, 2}, 32, 1, 8))};
  SimOptions options = checked_options({1, 2});
  options.inject.late_rank = 0;
  options.inject.late_ns = 1'000'000;
  EXPECT_TRUE(run_three(source, options).bad());
}

TEST(Simulator, ARankThatIsNinetySecondsLateIsNoErrorButAWarning) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, {2, 2}))};
  SimOptions options = checked_options({2, 2});
  options.inject.late_rank = 3;
  options.inject.late_ns = 90 * kSecond;
  Problem problem(source.plan(), 1);
  const SimCall call{0, problem.arguments()};
  const PlanSource* operators[] = {&source};
  const SimReport report = simulate(options, operators, {&call, 1});
  EXPECT_FALSE(report.error) << report.error->message;
  EXPECT_EQ(report.warnings.size(), 3u);
  EXPECT_GE(report.time_ns, 90 * kSecond);
  EXPECT_FALSE(problem.mismatch());
}

TEST(Simulator, ARankThatNeverComesIsNamedAtTheDeadline) {
  const PlanSource source{Plan(small_spec(Op::kGemmAllReduce, {2, 1}))};
  SimOptions options = checked_options({2, 1});
  options.deadline_s = 100;
  options.inject.late_rank = 1;
  options.inject.late_ns = 1000 * kSecond;
  const Outcome outcome = run_three(source, options);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->kind, ErrorKind::kTimeout);
  EXPECT_NE(outcome.error->message.find("rank 0 waited 100.0 s"), std::string::npos) << outcome.error->message;
  EXPECT_NE(outcome.error->message.find("from rank 1: wanted 1, seen 0"), std::string::npos) << outcome.error->message;
}

TEST(Simulator, ADeadRankIsNamedWithinSeconds) {
  for (const Op op : kOps) {
    const PlanSource source{Plan(small_spec(op, {2, 2}))};
    SimOptions options = checked_options({2, 2});
    options.inject.dead_rank = 2;
    options.inject.dead_ns = 1000;
    Problem problem(source.plan(), 1);
    const SimCall call{0, problem.arguments()};
    const PlanSource* operators[] = {&source};
    const SimReport report = simulate(options, operators, {&call, 1});
    ASSERT_TRUE(report.error) << op_name(op);
    EXPECT_EQ(report.error->kind, ErrorKind::kPeerLost);
    EXPECT_NE(report.error->message.find("rank 2 died"), std::string::npos) << report.error->message;
    EXPECT_LE(report.time_ns, 5 * kSecond);
  }
}

TEST(Simulator, AllButOneSmWithheldForTheWholeRunStillEnds) {
  for (const Op op : kOps) {
    const PlanSource source{Plan(small_spec(op, {2, 2}))};
    SimOptions options = checked_options({2, 2});
    options.inject.withheld_sms = 3;
    options.inject.withheld_until_ns = 1000 * kSecond;
    const Outcome outcome = run_three(source, options);
    EXPECT_FALSE(outcome.bad()) << op_name(op);
  }
}

TEST(Simulator, FlagsMayWrap) {
  for (const Op op : kOps) {
    const PlanSource source{Plan(small_spec(op, {2, 2}))};
    SimOptions options = checked_options({2, 2});
    // The use of an epoch wraps at 2^33 epochs; counters of several raises wrap earlier, too.
    for (const std::uint64_t start :
         {(std::uint64_t{1} << 33) - 3, (std::uint64_t{1} << 32) - 3, (std::uint64_t{1} << 31) - 2}) {
      options.inject.start_epoch = start;
      EXPECT_FALSE(run_three(source, options).bad()) << op_name(op) << " from epoch " << start;
    }
  }
}

TEST(Simulator, NetworkBytesEqualTheBound) {
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{2, 2}, {3, 2}, {4, 1}}) {
      const Plan plan(small_spec(op, topo));
      const PlanSource source{plan};
      SimOptions options = checked_options(topo);
      options.races = false;
      options.data = false;
      const SimCall call{0, {}};
      const PlanSource* operators[] = {&source};
      std::int64_t bound = 0;
      for (std::int32_t rank = 0; rank < topo.world(); ++rank) bound += plan.network_bytes(rank);
      EXPECT_EQ(simulate(options, operators, {&call, 1}).network_bytes, bound);
    }
  }
}

// The wire alone: one chunk of b bytes takes its bytes over the bandwidth, plus the fixed costs on its way.
TEST(Simulator, TheWireTakesAsLongAsItsBytes) {
  PlanSpec spec = small_spec(Op::kGemmAllReduce, {2, 1}, 4096, 4096, 1);
  spec.tiling = choose_tiling(spec);
  const PlanSource source{Plan(spec)};
  SimOptions options;
  options.topo = spec.topo;
  options.data = false;
  const SimCall call{0, {}};
  const PlanSource* operators[] = {&source};
  const double wire_ns = 4096.0 * 4096 * 2 / options.cost.net_bytes_per_ns;
  const auto time = static_cast<double>(simulate(options, operators, {&call, 1}).time_ns);
  EXPECT_GE(time, wire_ns);
  EXPECT_LE(time, 1.05 * wire_ns);  // one chunk of 64 in flight before the wire starts and one after it ends
}

TEST(Simulator, FiveHundredSeedsOfEverything) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    const ExploreResult result = explore_seed(std::nullopt, seed, {"all"});
    EXPECT_FALSE(result.failure) << result.scenario << "\n  " << result.failure->message
                                 << "\n  replay: mkernel sim all --seeds " << seed << ":1 --inject all";
  }
}

// Every m, n, k around the sizes at which tiles and vectors end, spread over operators, worlds and types.
TEST(Simulator, All3375EdgeShapesGiveTheExactResult) {
  constexpr std::int64_t kEdges[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257};
  constexpr Topology kWorlds[] = {{2, 2}, {1, 3}, {3, 1}, {2, 1}, {1, 1}, {3, 2}, {1, 4}};
  int i = 0;
  for (const std::int64_t m : kEdges) {
    for (const std::int64_t n : kEdges) {
      for (const std::int64_t k : kEdges) {
        PlanSpec spec;
        spec.op = kOps[i % 3];
        spec.topo = kWorlds[i / 3 % 7];
        spec.dtype = static_cast<Dtype>(i / 2 % 3);
        spec.partial = i % 5 == 0 ? Dtype::kFp32 : spec.dtype;
        spec.m = m;
        spec.n = n;
        spec.k = k;
        spec.tiling = choose_tiling(spec);
        ++i;
        const PlanSource source{Plan(spec)};
        const PlanSource* operators[] = {&source};
        SimOptions options = checked_options(spec.topo);
        options.races = false;
        Problem problem(source.plan(), static_cast<std::uint64_t>(i));
        const SimCall call{0, problem.arguments()};
        const SimReport report = simulate(options, operators, {&call, 1});
        ASSERT_FALSE(report.error) << report.error->message;
        const auto wrong = problem.mismatch();
        ASSERT_FALSE(wrong) << op_name(spec.op) << " m=" << m << " n=" << n << " k=" << k << ": " << *wrong;
      }
    }
  }
}

TEST(Simulator, PresetsExistAndUnknownNamesAreRefused) {
  for (const std::string_view name : preset_names()) EXPECT_TRUE(find_preset(name).ok());
  const auto unknown = find_preset("b200");
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.error().message.find("h200x8-ib"), std::string::npos);
}

}  // namespace
}  // namespace mkernel
