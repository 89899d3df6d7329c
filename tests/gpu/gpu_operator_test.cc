// The operators on a GPU: every result is compared to the bit.
#include <fmt/format.h>

#include <cstdlib>
#include <thread>

#include "tests/gpu/gpu_problem.h"

namespace mkernel {
namespace {

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};

std::string name_of(const GemmOptions& o, const Topology& t) {
  return fmt::format("{} on {}x{}: {} x {} x {} {}", op_name(o.op), t.nodes, t.gpus, o.m, o.n, o.k,
                     dtype_name(o.dtype));
}

TEST(GpuOperator, IsRightInEveryWorld) {
  SKIP_WITHOUT_GPU();
  constexpr Topology kWorlds[] = {{1, 1}, {1, 2}, {1, 3}, {1, 5}, {1, 8}, {2, 1}, {2, 2}, {2, 3},
                                  {2, 4}, {3, 1}, {3, 2}, {4, 1}, {4, 2}, {5, 1}, {7, 1}, {8, 1}};
  for (const Topology& topo : kWorlds) {
    Result<World> world = World::create(gpu_options(topo.nodes, topo.gpus));
    ASSERT_TRUE(world.ok()) << world.error().message;
    for (const Op op : kOps) {
      for (const auto& [m, n, k] : {std::tuple<int, int, int>{384, 640, 256}, {777, 555, 333}, {5, 300, 129}}) {
        GemmOptions options = gemm(op, m, n, k);
        EXPECT_EQ(run_once(*world, options), "") << name_of(options, topo);
        options.dtype = Dtype::kFp16;
        options.fp32_partials = true;
        EXPECT_EQ(run_once(*world, options), "") << name_of(options, topo);
      }
    }
  }
}

// A pipeline that is right only when the blocks of K are a multiple of its depth, with several tiles per CTA.
TEST(GpuOperator, IsRightForEveryPipelineLength) {
  SKIP_WITHOUT_GPU();
  for (const int sms : {8, 16}) {
    WorldOptions world_options = gpu_options(1, 1);
    world_options.sms = sms;
    Result<World> world = World::create(world_options);
    ASSERT_TRUE(world.ok()) << world.error().message;
    for (const auto& [bm, bn] : {std::pair{128, 256}, {128, 128}, {64, 128}, {64, 64}}) {
      for (const int k : {8, 64, 128, 192, 256, 248, 320, 448, 504, 512, 576, 1152}) {
        GemmOptions options = gemm(Op::kGemmAllReduce, 768, 1024, k);
        options.bm = bm;
        options.bn = bn;
        EXPECT_EQ(run_once(*world, options), "") << sms << " SMs, tile " << bm << " x " << bn << ", K " << k;
      }
    }
  }
}

TEST(GpuOperator, GivesTheSameBitsForEveryPartition) {
  SKIP_WITHOUT_GPU();
  for (const Op op : kOps) {
    for (const Partition& partition : {Partition{16, 0, 0},
                                       {15, 1, 0},
                                       {15, 0, 1},
                                       {14, 1, 1},
                                       {12, 2, 2},
                                       {8, 4, 4},
                                       {2, 7, 7},
                                       {1, 15, 0},
                                       {1, 0, 15},
                                       {0, 8, 8}}) {
      WorldOptions world_options = gpu_options(2, 4);
      world_options.sms = 16;
      world_options.partition = partition;
      Result<World> world = World::create(world_options);
      ASSERT_TRUE(world.ok()) << world.error().message;
      const GemmOptions options = gemm(op, 1024, 1024, 512);
      Result<Operator> made = Operator::create(*world, options);
      ASSERT_TRUE(made.ok()) << made.error().message;
      GpuProblem problem(*world, options, 3);
      for (int i = 0; i < 5; ++i) {
        const Result<RunReport> report = made->run(problem.arguments());
        ASSERT_TRUE(report.ok()) << report.error().message;
        EXPECT_EQ(problem.mismatch(), std::nullopt)
            << op_name(op) << " " << partition.compute << "," << partition.intra << "," << partition.recv;
      }
    }
  }
}

// No host synchronisation, no reset and no barrier between calls, fresh data in each.
TEST(GpuOperator, RunsBackToBackOnFreshData) {
  SKIP_WITHOUT_GPU();
  Result<World> world = World::create(gpu_options(2, 2));
  ASSERT_TRUE(world.ok()) << world.error().message;
  for (const Op op : kOps) {
    const GemmOptions options = gemm(op, 512, 768, 320);
    Result<Operator> made = Operator::create(*world, options);
    ASSERT_TRUE(made.ok()) << made.error().message;
    std::vector<std::unique_ptr<GpuProblem>> problems;
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      problems.push_back(std::make_unique<GpuProblem>(*world, options, seed));
    }
    for (const auto& problem : problems) {
      for (int rank = 0; rank < world->size(); ++rank) {
        ASSERT_TRUE(made->launch(rank, problem->arguments()[static_cast<std::size_t>(rank)]).ok());
      }
    }
    for (int rank = 0; rank < world->size(); ++rank) ASSERT_TRUE(made->wait(rank).ok());
    for (const auto& problem : problems) EXPECT_EQ(problem->mismatch(), std::nullopt) << op_name(op);
  }
}

// Moves that come one by one, as the network delivers, and are over sooner than a thread of the store warp may take to
// see the last one's end.
TEST(GpuOperator, SurvivesShortMovesBesideASlowNetwork) {
  SKIP_WITHOUT_GPU();
  WorldOptions world_options = gpu_options(2, 4);
  world_options.sms = 16;
  world_options.link = {10, 5};
  Result<World> world = World::create(world_options);
  ASSERT_TRUE(world.ok()) << world.error().message;
  for (const Op op : kOps) {
    const GemmOptions options = op == Op::kAllGatherGemm ? gemm(op, 2048, 256, 4096) : gemm(op, 2048, 2048, 256);
    Result<Operator> made = Operator::create(*world, options);
    ASSERT_TRUE(made.ok()) << made.error().message;
    GpuProblem problem(*world, options, 5);
    for (int i = 0; i < 20; ++i) {
      const Result<RunReport> report = made->run(problem.arguments());
      ASSERT_TRUE(report.ok()) << report.error().message;
    }
    EXPECT_EQ(problem.mismatch(), std::nullopt) << op_name(op);
  }
}

// Every fifth of all combinations, or all of them with MKERNEL_ALL_SHAPES in the environment.
TEST(GpuOperator, IsRightOnEdgeShapes) {
  SKIP_WITHOUT_GPU();
  const int step = std::getenv("MKERNEL_ALL_SHAPES") != nullptr ? 1 : 5;
  int combination = 0;
  constexpr int kSizes[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257};
  int made = 0;
  std::optional<World> world;
  for (const int m : kSizes) {
    for (const int n : kSizes) {
      for (const int k : kSizes) {
        if (combination++ % step != 0) continue;
        if (made % 60 == 0) {  // a world makes at most 63 operators
          world.reset();
          Result<World> next = World::create(gpu_options(2, 2));
          ASSERT_TRUE(next.ok()) << next.error().message;
          world.emplace(std::move(*next));
        }
        const GemmOptions options = gemm(kOps[made++ % 3], m, n, k);
        EXPECT_EQ(run_once(*world, options), "") << name_of(options, {2, 2});
      }
    }
  }
}

// Tiles are few and K is long, so CTAs share tiles: the same sums whoever adds them up.
TEST(GpuOperator, IsRightWhereKIsCutOverCtas) {
  SKIP_WITHOUT_GPU();
  constexpr int kShapes[][3] = {{100, 96, 16384}, {1, 1000, 16384}, {128, 1500, 8192}, {129, 127, 8191}, {20, 500, 8192}};
  for (const Topology& topo : {Topology{1, 1}, Topology{2, 2}}) {
    Result<World> world = World::create(gpu_options(topo.nodes, topo.gpus));
    ASSERT_TRUE(world.ok()) << world.error().message;
    for (const Op op : kOps) {
      for (const auto& [m, n, k] : kShapes) {
        const GemmOptions options = gemm(op, m, n, k);
        EXPECT_EQ(run_once(*world, options), "") << name_of(options, topo);
      }
    }
  }
}

TEST(GpuOperator, TakesAnyLayoutWhenAskedTo) {
  SKIP_WITHOUT_GPU();
  Result<World> world = World::create(gpu_options(2, 2));
  ASSERT_TRUE(world.ok()) << world.error().message;
  for (const Op op : kOps) {
    for (const int offset : {0, 2, 4, 8}) {
      for (const int padding : {0, 1, 8}) {
        GemmOptions options = gemm(op, 320, 256, 192);
        EXPECT_EQ(run_once(*world, options, 1, padding, offset), "")
            << op_name(op) << " offset " << offset << " padding " << padding;
        if (offset == 0 && padding % 8 == 0) continue;
        Result<Operator> made = Operator::create(*world, options);
        ASSERT_TRUE(made.ok()) << made.error().message;
        GpuProblem problem(*world, options, 1, padding, offset);
        const Result<RunReport> report = made->run(problem.arguments());
        ASSERT_FALSE(report.ok());
        EXPECT_NE(report.error().message.find("any_layout"), std::string::npos) << report.error().message;
      }
    }
    world = World::create(gpu_options(2, 2));
    ASSERT_TRUE(world.ok()) << world.error().message;
  }
}

TEST(GpuOperator, ReadsATransposedB) {
  SKIP_WITHOUT_GPU();
  Result<World> world = World::create(gpu_options(1, 1));
  ASSERT_TRUE(world.ok()) << world.error().message;
  constexpr int kM = 384;
  constexpr int kN = 520;
  constexpr int kK = 328;
  const GemmOptions options = gemm(Op::kGemmAllReduce, kM, kN, kK);
  Result<Operator> made = Operator::create(*world, options);
  ASSERT_TRUE(made.ok()) << made.error().message;
  GpuProblem problem(*world, options, 5);
  std::vector<std::uint16_t> b(std::size_t{kK} * kN);
  std::vector<std::uint16_t> transposed(b.size());
  Matrix& device_b = problem.arguments()[0].b;
  ASSERT_TRUE(world->copy(0, b.data(), device_b.data, static_cast<std::int64_t>(b.size()) * 2).ok());
  for (int i = 0; i < kK; ++i) {
    for (int j = 0; j < kN; ++j) transposed[std::size_t(j) * kK + i] = b[std::size_t(i) * kN + j];
  }
  ASSERT_TRUE(world->copy(0, device_b.data, transposed.data(), static_cast<std::int64_t>(b.size()) * 2).ok());
  device_b.row_stride = 1;
  device_b.col_stride = kK;
  ASSERT_TRUE(made->run(problem.arguments()).ok());
  EXPECT_EQ(problem.mismatch(), std::nullopt);
}

// One call that waits for a rank that is not there ends with an error that says so; the context stays usable.
TEST(GpuOperator, ADeadlineThatPassesNamesTheLateRank) {
  SKIP_WITHOUT_GPU();
  for (const Op op : kOps) {
    WorldOptions world_options = gpu_options(2, 2);
    world_options.deadline_s = 0.3;
    Result<World> world = World::create(world_options);
    ASSERT_TRUE(world.ok()) << world.error().message;
    const GemmOptions options = gemm(op, 512, 512, 256);
    Result<Operator> made = Operator::create(*world, options);
    ASSERT_TRUE(made.ok()) << made.error().message;
    GpuProblem problem(*world, options, 5);
    for (const int rank : {0, 1, 3}) {
      ASSERT_TRUE(made->launch(rank, problem.arguments()[static_cast<std::size_t>(rank)]).ok());
    }
    const Status status = made->wait(0);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kTimeout) << status.error().message;
    EXPECT_NE(status.error().message.find("waited 0.3 s"), std::string::npos) << status.error().message;
    EXPECT_FALSE(made->wait(1).ok());
    EXPECT_FALSE(made->run(problem.arguments()).ok());
  }
  Result<World> world = World::create(gpu_options(2, 2));
  ASSERT_TRUE(world.ok()) << world.error().message;
  EXPECT_EQ(run_once(*world, gemm(Op::kGemmAllReduce, 512, 512, 256)), "");
}

TEST(GpuOperator, AnAbortFromAnotherThreadEndsACall) {
  SKIP_WITHOUT_GPU();
  Result<World> world = World::create(gpu_options(1, 2));
  ASSERT_TRUE(world.ok()) << world.error().message;
  const GemmOptions options = gemm(Op::kGemmAllReduce, 512, 512, 256);
  Result<Operator> made = Operator::create(*world, options);
  ASSERT_TRUE(made.ok()) << made.error().message;
  GpuProblem problem(*world, options, 5);
  ASSERT_TRUE(made->launch(0, problem.arguments()[0]).ok());
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    world->abort("the test says so");
  });
  const auto begin = std::chrono::steady_clock::now();
  const Status status = made->wait(0);
  other.join();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("the test says so"), std::string::npos) << status.error().message;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
}

// Epochs, flags and uses close to the wrap of 32 bits, and workspaces full of garbage.
TEST(GpuOperator, CountersMayWrapAndWorkspacesMayBeDirty) {
  SKIP_WITHOUT_GPU();
  for (const std::uint64_t start : {std::uint64_t{0}, (std::uint64_t{1} << 33) - 3, (std::uint64_t{1} << 32) - 3}) {
    Result<World> world = World::create(gpu_options(2, 2));
    ASSERT_TRUE(world.ok()) << world.error().message;
    world->impl()->hooks.start_epoch = start;
    world->impl()->hooks.workspace_fill = 0xff;
    for (const Op op : kOps) {
      const GemmOptions options = gemm(op, 300, 520, 128);
      Result<Operator> made = Operator::create(*world, options);
      ASSERT_TRUE(made.ok()) << made.error().message;
      for (std::uint64_t i = 0; i < 6; ++i) {
        GpuProblem problem(*world, options, i);
        const Result<RunReport> report = made->run(problem.arguments());
        ASSERT_TRUE(report.ok()) << report.error().message;
        EXPECT_EQ(problem.mismatch(), std::nullopt) << op_name(op) << " epoch " << start + i + 1;
      }
    }
  }
}

TEST(GpuOperator, RefusesWhatItHasNot) {
  SKIP_WITHOUT_GPU();
  Result<World> world = World::create(gpu_options(1, 1));
  ASSERT_TRUE(world.ok()) << world.error().message;
  GemmOptions options = gemm(Op::kGemmAllReduce, 256, 256, 256);
  options.dtype = Dtype::kFp32;
  EXPECT_NE(run_once(*world, options).find("fp32"), std::string::npos);
  options.dtype = Dtype::kBf16;
  options.bm = 32;
  EXPECT_NE(run_once(*world, options).find("no GPU kernel"), std::string::npos);
  options.bm = 0;
  options.m = options.n = 1 << 20;
  options.k = 1 << 19;
  Result<Operator> made = Operator::create(*world, options);
  EXPECT_TRUE(made.ok());  // one rank needs no workspace
  WorldOptions many = gpu_options(1, 1);
  many.sms = 1000;
  const Result<World> refused = World::create(many);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("SMs"), std::string::npos) << refused.error().message;
}

}  // namespace
}  // namespace mkernel
