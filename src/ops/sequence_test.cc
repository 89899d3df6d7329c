// Calls one after the other on one world: no reset, no barrier, ranks at their own pace.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "ops/test_problem.h"
#include "ops/test_world.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

using test::case_name;
using test::failed;
using test::kOps;
using test::kWorlds;
using test::make_operator;
using test::make_world;
using test::Problem;
using test::Shape;
using test::small_tiles;
using test::succeeded;
using test::world_of;

// Runs `body(rank)` in one thread per rank.
template <class Body>
void on_all_ranks(int world, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

void nap_us(std::int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

TEST(Sequence, TwoHundredCallsWithFreshDataAndRanksOutOfStepAreAllExact) {
  constexpr int kCalls = 200;
  for (const Shape& shape : {Shape{1, 3}, Shape{2, 2}, Shape{3, 1}}) {
    WorldOptions world_options = world_of(shape.nodes, shape.gpus);
    world_options.link = {0, 5, true};
    World world = make_world(world_options);
    for (const Op op : kOps) {
      const GemmOptions options = small_tiles(op, 33, 20, 24);
      Operator gemm = make_operator(world, options);
      std::vector<Problem> problems;
      for (int call = 0; call < kCalls; ++call) {
        problems.emplace_back(gemm, options, world.size(), static_cast<std::uint64_t>(call));
      }
      on_all_ranks(world.size(), [&](int rank) {
        std::mt19937 random(static_cast<unsigned>(rank) + 7);
        for (int call = 0; call < kCalls; ++call) {
          if (random() % 4 == 0) nap_us(random() % 1000);
          EXPECT_TRUE(succeeded(gemm.launch(rank, problems[call].arguments(rank))));
          if (random() % 16 == 0) {
            EXPECT_TRUE(succeeded(gemm.wait(rank)));
          }
        }
        EXPECT_TRUE(succeeded(gemm.wait(rank)));
      });
      for (const Problem& problem : problems) ASSERT_TRUE(problem.is_exact()) << case_name(options, shape);
    }
  }
}

TEST(Sequence, ARanksOutputIsFinalWhenThatRankAloneHasBeenWaitedFor) {
  for (const Shape& shape : {Shape{1, 3}, Shape{2, 2}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus, 1));
    for (const Op op : kOps) {
      // Odd numbers of tiles, so that some ranks have more to do than others: in gemm_all_reduce for the C of all.
      const GemmOptions options = small_tiles(op, 60, 60, 60);
      Operator gemm = make_operator(world, options);
      Problem problem(gemm, options, world.size(), 1);
      for (int call = 0; call < 60; ++call) {
        const int rank = call % world.size();
        problem.c(rank).clear();
        for (int r = 0; r < world.size(); ++r) ASSERT_TRUE(succeeded(gemm.launch(r, problem.arguments(r))));
        ASSERT_TRUE(succeeded(gemm.wait(rank)));
        ASSERT_TRUE(problem.rank_is_exact(rank)) << case_name(options, shape) << ", call " << call;
        for (int r = 0; r < world.size(); ++r) ASSERT_TRUE(succeeded(gemm.wait(r)));
      }
    }
  }
}

TEST(Sequence, AChainOfTwoOperatorsOnTheSameBuffersWaitsForALateRank) {
  // H = gather(X) W1 by all_gather_gemm, Y = H W2 by gemm_reduce_scatter, then Y is the next X: all without the host.
  constexpr int kRounds = 60;
  const std::int64_t m = 24, hidden = 20, k = 12;
  for (const Shape& shape : {Shape{1, 3}, Shape{3, 1}, Shape{2, 2}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    const GemmOptions up = small_tiles(Op::kAllGatherGemm, m, hidden, k, Dtype::kFp32);
    const GemmOptions down = small_tiles(Op::kGemmReduceScatter, m, k, hidden, Dtype::kFp32);
    Operator first = make_operator(world, up);
    Operator second = make_operator(world, down);
    Problem problem(first, up, world.size(), 1);
    Problem weights(second, down, world.size(), 2);
    std::vector<test::TestMatrix> y;
    for (int rank = 0; rank < world.size(); ++rank) y.emplace_back(second.c_shape(rank), Dtype::kFp32);
    // The matrices are made so that every round gives the same values again, or a wrong sum: W1 keeps column j of X for
    // j < k, W2 puts it back, so Y == X exactly.
    const auto unit = [&](test::TestMatrix& part, std::int64_t row, std::int64_t col) {
      for (std::int64_t r = 0; r < part.matrix().rows; ++r) {
        for (std::int64_t c = 0; c < part.matrix().cols; ++c) {
          const std::int64_t at = r * part.matrix().row_stride + c * part.matrix().col_stride;
          static_cast<float*>(part.matrix().data)[at] = row + r == col + c ? 1.0f : 0.0f;
        }
      }
    };
    for (int rank = 0; rank < world.size(); ++rank) {
      unit(problem.b(rank), 0, Split{hidden, world.size()}.begin(rank));
      unit(weights.b(rank), Split{hidden, world.size()}.begin(rank), 0);
    }
    on_all_ranks(world.size(), [&](int rank) {
      Matrix x = problem.a(rank).matrix();
      Matrix other = y[rank].matrix();
      for (int round = 0; round < kRounds; ++round) {
        const Matrix h = problem.c(rank).matrix();
        EXPECT_TRUE(succeeded(first.launch(rank, {x, problem.b(rank).matrix(), h})));
        if (round % 20 == 10 + rank) nap_us(50'000);
        EXPECT_TRUE(succeeded(second.launch(rank, {h, weights.b(rank).matrix(), other})));
        std::swap(x, other);
      }
      EXPECT_TRUE(succeeded(second.wait(rank)));
    });
    Problem fresh(first, up, world.size(), 1);
    for (int rank = 0; rank < world.size(); ++rank) {
      EXPECT_EQ(problem.a(rank).bytes(), fresh.a(rank).bytes());  // after an even number of rounds
      for (std::int64_t r = 0; r < y[rank].matrix().rows; ++r) {
        for (std::int64_t c = 0; c < k; ++c) ASSERT_EQ(y[rank].at(r, c), fresh.a(rank).at(r, c));
      }
    }
  }
}

TEST(Sequence, OperatorsOfDifferentShapesTakeTurns) {
  World world = make_world(world_of(2, 2));
  std::vector<GemmOptions> options;
  for (const Op op : kOps) {
    options.push_back(small_tiles(op, 40, 30, 20));
    options.push_back(small_tiles(op, 3, 17, 65, Dtype::kFp16));
  }
  std::vector<Operator> operators;
  for (const GemmOptions& o : options) operators.push_back(make_operator(world, o));
  std::mt19937 random(3);
  std::vector<std::size_t> order;
  std::vector<Problem> problems;
  for (int call = 0; call < 100; ++call) {
    order.push_back(random() % options.size());
    problems.emplace_back(operators[order.back()], options[order.back()], 4, static_cast<std::uint64_t>(call));
  }
  on_all_ranks(4, [&](int rank) {
    for (std::size_t call = 0; call < order.size(); ++call) {
      EXPECT_TRUE(succeeded(operators[order[call]].launch(rank, problems[call].arguments(rank))));
    }
    for (Operator& op : operators) EXPECT_TRUE(succeeded(op.wait(rank)));
  });
  for (const Problem& problem : problems) ASSERT_TRUE(problem.is_exact());
}

TEST(Sequence, FlagsAndEpochsMayWrap) {
  // Stamps wrap after 2^33 epochs; counters before, at another epoch for each count; records carry 8 bits of the epoch.
  for (const std::uint64_t start : {(std::uint64_t{1} << 33) - 3, (std::uint64_t{1} << 32) - 3,
                                    (std::uint64_t{1} << 34) / 3 - 3, std::uint64_t{253}}) {
    for (const Device device : {Device::kHost, Device::kSim}) {
      for (const Shape& shape : kWorlds) {
        WorldOptions world_options = world_of(shape.nodes, shape.gpus);
        world_options.device = device;
        world_options.link.unordered = shape.gpus == 1;
        World world = make_world(world_options);
        world.impl()->hooks.start_epoch = start;
        for (const Op op : kOps) {
          const GemmOptions options = small_tiles(op, 65, 33, 24);
          Operator gemm = make_operator(world, options);
          Problem problem(gemm, options, world.size(), 1);
          for (std::uint64_t call = 0; call < 6; ++call) {
            problem.refill(call);
            ASSERT_TRUE(succeeded(gemm.run(problem.arguments()))) << case_name(options, shape) << " from " << start;
            ASSERT_TRUE(problem.is_exact()) << case_name(options, shape) << " from " << start << ", call " << call;
          }
        }
      }
    }
  }
}

TEST(Sequence, EightThreadsMayRunOperatorsOfOneWorldAtOnce) {
  World world = make_world(world_of(2, 1));
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const GemmOptions options = small_tiles(kOps[i % 3], 20 + i, 30, 40);
      for (int round = 0; round < 2; ++round) {
        Operator gemm = make_operator(world, options);
        Problem problem(gemm, options, 2, static_cast<std::uint64_t>(i));
        for (std::uint64_t call = 0; call < 10; ++call) {
          problem.refill(call);
          EXPECT_TRUE(succeeded(gemm.run(problem.arguments(), call % 2 == 0)));
          EXPECT_TRUE(problem.is_exact());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Sequence, ARankThatLaunchesAnotherOperatorIsToldSo) {
  for (const bool late : {false, true}) {
    World world = make_world(world_of(2, 1));
    Operator first = make_operator(world, small_tiles(Op::kAllGatherGemm, 8, 8, 8));
    Operator second = make_operator(world, small_tiles(Op::kGemmAllReduce, 8, 8, 8));
    Problem a(first, small_tiles(Op::kAllGatherGemm, 8, 8, 8), 2, 1);
    Problem b(second, small_tiles(Op::kGemmAllReduce, 8, 8, 8), 2, 1);
    Problem c(second, small_tiles(Op::kGemmAllReduce, 8, 8, 8), 2, 1);
    if (late) {
      for (int rank = 0; rank < 2; ++rank) ASSERT_TRUE(succeeded(first.launch(rank, a.arguments(rank))));
    }
    ASSERT_TRUE(succeeded(first.launch(0, a.arguments(0))));
    const std::vector<std::string> words{"rank 1",
                                         "rank 0",
                                         "operator 1 (gemm_all_reduce 8 x 8 x 8)",
                                         "operator 0 (all_gather_gemm 8 x 8 x 8)",
                                         late ? "launch 2" : "launch 1",
                                         "same order"};
    EXPECT_TRUE(failed(second.launch(1, b.arguments(1)), ErrorKind::kBadArgument, words));
    EXPECT_TRUE(failed(first.wait(0), ErrorKind::kBadArgument, words));
    EXPECT_TRUE(failed(second.run(c.arguments()), ErrorKind::kAborted, words));
  }
}

TEST(Sequence, MoreLaunchesThanFitAreRefusedAndTheWorldGoesOn) {
  World world = make_world(world_of(2, 1));
  const GemmOptions options = small_tiles(Op::kGemmAllReduce, 4, 4, 4);
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, 2, 1);
  int launched = 0;
  Status status = Ok{};
  while (launched < 5000 && (status = gemm.launch(0, problem.arguments(0))).ok()) ++launched;
  EXPECT_TRUE(failed(status, ErrorKind::kBadArgument, {"rank 0", "1024"}));
  EXPECT_GE(launched, 1024);
  Problem other(gemm, options, 2, 1);
  EXPECT_TRUE(failed(gemm.run(other.arguments()), ErrorKind::kBadArgument, {"rank 0", "1024"}));
  for (int call = 0; call < launched; ++call) {
    while (!gemm.launch(1, problem.arguments(1)).ok()) ASSERT_TRUE(succeeded(gemm.wait(1)));
  }
  EXPECT_TRUE(succeeded(gemm.wait(0)));
  EXPECT_TRUE(succeeded(gemm.wait(1)));
  EXPECT_TRUE(problem.is_exact());
}

TEST(Sequence, AnOperatorMayOutliveTheHandleOfItsWorldAndBeDestroyedWithCallsUnderWay) {
  const GemmOptions options = small_tiles(Op::kGemmReduceScatter, 64, 64, 64);
  for (int round = 0; round < 20; ++round) {
    std::optional<World> world(make_world(world_of(2, 2)));
    std::optional<Operator> gemm(make_operator(*world, options));
    Problem problem(*gemm, options, 4, 1);
    world.reset();
    for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(succeeded(gemm->launch(rank, problem.arguments(rank))));
    gemm.reset();
    EXPECT_TRUE(problem.is_exact());
  }
}

}  // namespace
}  // namespace mkernel
