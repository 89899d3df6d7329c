// When something goes wrong: every wait ends, everybody learns why, and the next world works.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ops/test_problem.h"
#include "ops/test_world.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

using test::failed;
using test::kOps;
using test::make_operator;
using test::make_world;
using test::Problem;
using test::Shape;
using test::small_tiles;
using test::succeeded;
using test::world_of;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The seconds in "rank R waited S s ..."; -1 when there are none.
double waited_s(const std::string& sentence) {
  const std::size_t at = sentence.find(" waited ");
  return at == std::string::npos ? -1 : std::stod(sentence.substr(at + 8));
}

// Machines that run sanitizers, or much else, are slow: bounds on how late something may be are this much wider.
constexpr double kSlack_s = 5;

TEST(Failure, ARankThatNeverLaunchesIsNamedByEveryOtherRankAtTheDeadline) {
  for (const Op op : kOps) {
    for (const Shape& shape : {Shape{2, 1}, Shape{3, 1}, Shape{2, 2}}) {
      WorldOptions world_options = world_of(shape.nodes, shape.gpus);
      world_options.deadline_s = 0.3;
      World world = make_world(world_options);
      const GemmOptions options = small_tiles(op, 33, 20, 24);
      Operator gemm = make_operator(world, options);
      Problem problem(gemm, options, world.size(), 1);
      const int missing = world.size() - 1;
      const auto begin = std::chrono::steady_clock::now();
      for (int rank = 0; rank < missing; ++rank) ASSERT_TRUE(succeeded(gemm.launch(rank, problem.arguments(rank))));
      const std::string peer = shape.gpus == 1 ? "from rank " + std::to_string(missing) : "from ";
      std::string sentence;
      for (int rank = 0; rank < missing; ++rank) {
        const Status status = gemm.wait(rank);
        EXPECT_TRUE(
            failed(status, ErrorKind::kTimeout, {std::string(op_name(op)), "epoch 1", "flag ", "wanted", peer}));
        if (rank == 0) sentence = status.error().message;
        EXPECT_GE(waited_s(sentence), 0.3) << sentence;
        EXPECT_EQ(status.error().message, sentence) << "all ranks give the same reason";
      }
      EXPECT_GE(seconds_since(begin), 0.3);
      EXPECT_LT(seconds_since(begin), 1.5 + kSlack_s);
      EXPECT_TRUE(failed(gemm.launch(missing, problem.arguments(missing)), ErrorKind::kAborted, {sentence}));
      EXPECT_TRUE(failed(gemm.wait(0), ErrorKind::kAborted, {sentence}));
      EXPECT_TRUE(failed(gemm.run(problem.arguments()), ErrorKind::kAborted, {sentence}));
      EXPECT_TRUE(failed(Operator::create(world, options), ErrorKind::kAborted, {sentence}));
    }
  }
}

TEST(Failure, UnfusedCallsTimeOutToo) {
  for (const Op op : kOps) {
    WorldOptions world_options = world_of(2, 1);
    world_options.deadline_s = 0.2;
    World world = make_world(world_options);
    GemmOptions options = small_tiles(op, 33, 20, 24);
    options.fused = false;
    Operator gemm = make_operator(world, options);
    Problem problem(gemm, options, 2, 1);
    ASSERT_TRUE(succeeded(gemm.launch(0, problem.arguments(0))));
    const Status status = gemm.wait(0);
    ASSERT_TRUE(failed(status, ErrorKind::kTimeout, {"rank 0 waited"}));
    EXPECT_GE(waited_s(status.error().message), 0.2) << status.error().message;
  }
}

TEST(Failure, ALateRankIsWarnedOfOncePerWaitAndIsNoError) {
  std::mutex mutex;
  std::vector<std::string> warnings;
  WorldOptions world_options = world_of(2, 1, 3);
  world_options.warn_s = 0.1;
  world_options.on_warning = [&](const std::string& sentence) {
    std::lock_guard<std::mutex> lock(mutex);
    warnings.push_back(sentence);
  };
  World world = make_world(world_options);
  const GemmOptions options = small_tiles(Op::kGemmAllReduce, 8, 8, 8);
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, 2, 1);
  ASSERT_TRUE(succeeded(gemm.launch(0, problem.arguments(0))));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  ASSERT_TRUE(succeeded(gemm.launch(1, problem.arguments(1))));
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(succeeded(gemm.wait(rank)));
  EXPECT_TRUE(problem.is_exact());
  std::lock_guard<std::mutex> lock(mutex);
  ASSERT_GE(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("rank 0 waited"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[0].find("from rank 1"), std::string::npos) << warnings[0];
  // On a busy machine other waits may take long as well, but each is told once, whatever it had waited by then.
  std::set<std::string> waits;
  for (const std::string& warning : warnings) waits.insert(warning.substr(warning.find(" s in ")));
  EXPECT_EQ(waits.size(), warnings.size()) << warnings[0];
}

TEST(Failure, AbortFromAnotherThreadEndsEveryWaitWithItsReason) {
  World world = make_world(world_of(2, 2));
  const GemmOptions options = small_tiles(Op::kGemmReduceScatter, 33, 20, 24);
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, 4, 1);
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(succeeded(gemm.launch(rank, problem.arguments(rank))));
  std::atomic<int> waiting{0};
  std::vector<std::thread> threads;
  std::atomic<double> slowest{0};
  std::chrono::steady_clock::time_point aborted;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      waiting.fetch_add(1);
      EXPECT_TRUE(failed(gemm.wait(rank), ErrorKind::kAborted, {"the user pressed a key"}));
      double seen = slowest.load();
      const double took = seconds_since(aborted);
      while (took > seen && !slowest.compare_exchange_weak(seen, took)) {
      }
    });
  }
  while (waiting.load() < 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  aborted = std::chrono::steady_clock::now();
  world.abort("the user pressed a key");
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(slowest.load(), 1 + kSlack_s);
}

TEST(Failure, AfterWaitReturnsNobodyTouchesTheCallersMatrices) {
  for (int round = 0; round < 20; ++round) {
    World world = make_world(world_of(2, 2));
    const GemmOptions options = small_tiles(Op::kGemmAllReduce, 300, 300, 300);
    Operator gemm = make_operator(world, options);
    auto problem = std::make_unique<Problem>(gemm, options, 4, 1);
    for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(succeeded(gemm.launch(rank, problem->arguments(rank))));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    world.abort("in the middle");
    (void)gemm.wait(round % 4).ok();
    problem.reset();  // the sanitizers see a thread that is still at work on it
  }
}

TEST(Failure, ALostPeerIsNamed) {
  HostExecutorOptions options;
  options.topo = {2, 1};
  options.sms = 2;
  options.link.dead_detect_ns = 20'000'000;
  Result<std::unique_ptr<HostExecutor>> executor = HostExecutor::create(options);
  ASSERT_TRUE(succeeded(executor));
  World world = make_world(world_of(2, 1));  // only for the shapes
  const GemmOptions gemm = small_tiles(Op::kAllGatherGemm, 33, 20, 24);
  Operator shapes = make_operator(world, gemm);
  Problem problem(shapes, gemm, 2, 1);
  PlanSpec spec;
  spec.op = gemm.op;
  spec.topo = options.topo;
  spec.m = gemm.m;
  spec.n = gemm.n;
  spec.k = gemm.k;
  spec.tiling = {.bm = 16, .bn = 16, .band = 2, .chunk_tiles = 2, .chunk_rows = 16, .copy_rows = 5, .pitch_align = 1};
  HostOperatorConfig config;
  config.source = std::make_shared<PlanSource>(Plan(spec));
  config.partition = {2, 0, 0};
  config.sms = 2;
  Result<HostOperator*> op = (*executor)->add_operator(config);
  ASSERT_TRUE(succeeded(op));
  (*executor)->cut_link(1);
  ASSERT_TRUE(succeeded((*executor)->launch(*op, 0, problem.arguments(0))));  // rank 1 is no more
  const Status status = (*executor)->wait(*op, 0);
  EXPECT_TRUE(failed(status, ErrorKind::kPeerLost, {"rank 0 lost rank 1"}));
  EXPECT_TRUE(failed((*executor)->launch(*op, 1, problem.arguments(1)), ErrorKind::kAborted, {status.error().message}));
  (*executor)->remove_operator(*op);
}

TEST(Failure, AThousandAbortedWorldsLeaveNothingBehind) {
  const GemmOptions options = small_tiles(Op::kGemmAllReduce, 8, 8, 8);
  for (int cycle = 0; cycle < 1000; ++cycle) {
    World world = make_world(world_of(2, 1, 1));
    Operator gemm = make_operator(world, options);
    Problem problem(gemm, options, 2, 1);
    if (cycle % 3 != 0) {
      ASSERT_TRUE(succeeded(gemm.launch(0, problem.arguments(0))));
    }
    if (cycle % 3 == 2) {
      ASSERT_TRUE(succeeded(gemm.launch(1, problem.arguments(1))));
    }
    world.abort("cycle");
    EXPECT_TRUE(failed(gemm.wait(0), ErrorKind::kAborted, {"cycle"}));
  }
  World world = make_world(world_of(2, 1, 1));
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, 2, 1);
  EXPECT_TRUE(succeeded(gemm.run(problem.arguments())));
  EXPECT_TRUE(problem.is_exact());
}

TEST(Failure, DestroyingAnOperatorThatCanNeverEndFailsItsWorld) {
  World world = make_world(world_of(2, 1));
  const GemmOptions options = small_tiles(Op::kGemmAllReduce, 8, 8, 8);
  Operator other = make_operator(world, options);
  Problem problem(other, options, 2, 1);  // outlives the operator that works on it
  {
    Operator gemm = make_operator(world, options);
    ASSERT_TRUE(succeeded(gemm.launch(0, problem.arguments(0))));
  }
  EXPECT_TRUE(failed(other.wait(0), ErrorKind::kAborted, {"operator 1 (gemm_all_reduce 8 x 8 x 8) was destroyed"}));
}

TEST(Failure, TheFlightRecordTellsWhatARankDidBeforeAnAbort) {
  World world = make_world(world_of(2, 1));
  EXPECT_EQ(world.flight_record(0), "");
  const GemmOptions options = small_tiles(Op::kAllGatherGemm, 33, 20, 24);
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, 2, 1);
  ASSERT_TRUE(succeeded(gemm.run(problem.arguments())));
  ASSERT_TRUE(succeeded(gemm.launch(0, problem.arguments(0))));
  world.abort("enough");
  EXPECT_FALSE(gemm.wait(0).ok());
  const std::string record = world.flight_record(0);
  for (const char* word : {"launched", "started", "begun", "done", "posted", "stamped", "complete", "failed",
                           "operator 0 (all_gather_gemm 33 x 20 x 24), epoch 1, compute lane 0 task 0",
                           "send lane 0 task 0, peer 1", "epoch 2", "flag "}) {
    EXPECT_NE(record.find(word), std::string::npos) << word << " is missing in\n" << record;
  }
  EXPECT_EQ(world.flight_record(2), "");
  EXPECT_EQ(world.flight_record(-1), "");
}

TEST(Failure, ASimulatedWorldCanBeAbortedToo) {
  WorldOptions world_options = world_of(2, 1);
  world_options.device = Device::kSim;
  World world = make_world(world_options);
  const GemmOptions options = small_tiles(Op::kAllGatherGemm, 33, 20, 24);
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, 2, 1);
  world.abort("enough");
  EXPECT_TRUE(failed(gemm.run(problem.arguments()), ErrorKind::kAborted, {"enough"}));
  EXPECT_TRUE(failed(Operator::create(world, options), ErrorKind::kAborted, {"enough"}));
}

}  // namespace
}  // namespace mkernel
