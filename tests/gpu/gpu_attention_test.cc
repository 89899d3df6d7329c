// Ring attention on a GPU, against fp64 with the bound of its arithmetic.
#include <algorithm>

#include "tests/gpu/gpu_attention.h"

namespace mkernel {
namespace {

World make_world(int nodes, int gpus, int sms = 0) {
  WorldOptions options = gpu_options(nodes, gpus);
  options.sms = sms;
  options.deadline_s = 2;  // so that who waits is named soon
  Result<World> world = World::create(options);
  EXPECT_TRUE(world.ok()) << world.error().message;
  return std::move(world).value();
}

TEST(GpuAttention, IsRightForEveryHeadSize) {
  SKIP_WITHOUT_GPU();
  World world = make_world(1, 1);
  for (const int dim : {64, 96, 128, 256, 8, 72, 136, 192}) {
    for (const bool causal : {false, true}) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
        AttentionOptions options = attention(dim % 64 == 0 ? 512 : 300, 2, dim);
        options.dtype = dtype;
        options.causal = causal;
        EXPECT_EQ(run_attention(world, options), "") << describe(options, {1, 1});
      }
    }
  }
}

TEST(GpuAttention, IsRightOnEdgeLengths) {
  SKIP_WITHOUT_GPU();
  World world = make_world(1, 1);
  for (const int seq : {0, 1, 7, 127, 128, 129, 257, 698, 749}) {
    for (const bool causal : {false, true}) {
      AttentionOptions options = attention(seq, 2, 128);
      options.causal = causal;
      EXPECT_EQ(run_attention(world, options), "") << describe(options, {1, 1});
      options.seq_k = 300;
      EXPECT_EQ(run_attention(world, options), "") << describe(options, {1, 1});
    }
  }
}

TEST(GpuAttention, IsRightWithMasksGroupsAndLayouts) {
  SKIP_WITHOUT_GPU();
  World world = make_world(1, 1);
  AttentionOptions options = attention(700, 8, 128);
  options.kv_heads = 2;
  options.batch = 2;
  EXPECT_EQ(run_attention(world, options, 2, 1, true), "") << describe(options, {1, 1});
  for (const auto& [left, right] : {std::pair{0, 0}, {100, -1}, {-1, 50}, {200, 17}}) {
    options.window_left = left;
    options.window_right = right;
    EXPECT_EQ(run_attention(world, options, 3), "") << describe(options, {1, 1});
  }
  options = attention(700, 2, 64);
  options.packed = true;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    options.causal = seed % 2 == 1;
    EXPECT_EQ(run_attention(world, options, seed), "") << describe(options, {1, 1}) << " seed " << seed;
  }
}

TEST(GpuAttention, IsRightForLargeScores) {
  SKIP_WITHOUT_GPU();
  World world = make_world(1, 1);
  for (const float size : {100.0f, 10000.0f}) {
    for (const int dim : {64, 128}) {
      AttentionOptions options = attention(512, 2, dim);
      EXPECT_EQ(run_attention(world, options, 4, size), "") << size << " " << describe(options, {1, 1});
    }
  }
}

// A test for each world, so that a run that is cut short says which it has seen.
class GpuAttentionWorlds : public testing::TestWithParam<Topology> {};

TEST_P(GpuAttentionWorlds, IsRightForAnyLengthAndMask) {
  SKIP_WITHOUT_GPU();
  const Topology topo = GetParam();
  World world = make_world(topo.nodes, topo.gpus);
  for (const int seq : {1, 7, 749, 1536}) {
    for (const int kind : {0, 1, 2}) {
      AttentionOptions options = attention(seq, 4, 128);
      options.kv_heads = 2;
      options.causal = kind > 0;
      options.zigzag = kind > 1;
      options.chunk_rows = seq == 749 ? 50 : 0;
      ASSERT_EQ(run_attention(world, options), "") << describe(options, topo);
    }
  }
  AttentionOptions options = attention(700, 2, 64);
  options.packed = true;
  options.dtype = Dtype::kFp16;
  ASSERT_EQ(run_attention(world, options, 5), "") << describe(options, topo);
  options.packed = false;
  options.dim = 256;
  options.window_left = 150;
  ASSERT_EQ(run_attention(world, options, 6, 1, true), "") << describe(options, topo);
}

INSTANTIATE_TEST_SUITE_P(Every, GpuAttentionWorlds,
                         testing::ValuesIn(std::initializer_list<Topology>{
                             {1, 2}, {2, 1}, {2, 2}, {1, 3}, {3, 1}, {3, 2}, {2, 4}, {1, 8}, {4, 2}, {8, 1}}),
                         [](const auto& world) { return fmt::format("{}x{}", world.param.nodes, world.param.gpus); });

TEST(GpuAttention, GivesTheSameBitsEveryTimeAndForEveryPartition) {
  SKIP_WITHOUT_GPU();
  AttentionOptions options = attention(4096, 4, 128);
  options.causal = true;
  options.zigzag = true;
  options.chunk_rows = 128;
  std::vector<std::byte> expected;
  for (const Partition& partition : {Partition{16, 0, 0}, {15, 1, 0}, {8, 4, 4}, {1, 15, 0}, {0, 8, 8}}) {
    WorldOptions world_options = gpu_options(2, 4);
    world_options.sms = 16;
    world_options.link = {5, 5};  // so slow that tiles wait
    world_options.deadline_s = 2;
    world_options.partition = partition;
    Result<World> world = World::create(world_options);
    ASSERT_TRUE(world.ok()) << world.error().message;
    Result<Operator> op = Operator::create(*world, options);
    ASSERT_TRUE(op.ok()) << op.error().message;
    GpuAttention problem(*world, options, 7);
    for (int i = 0; i < 10; ++i) {
      const Result<RunReport> report = op->run(problem.arguments());
      ASSERT_TRUE(report.ok()) << report.error().message;
      const std::vector<std::byte> got = problem.result();
      if (expected.empty()) {
        expected = got;
        EXPECT_EQ(problem.mismatch(256), "");
      }
      EXPECT_TRUE(got == expected) << "run " << i << " with " << partition.compute << " SMs that compute";
    }
  }
}

TEST(GpuAttention, RunsBackToBackOnFreshData) {
  SKIP_WITHOUT_GPU();
  World world = make_world(2, 2);
  AttentionOptions options = attention(1024, 2, 128);
  options.causal = true;
  Result<Operator> op = Operator::create(world, options);
  ASSERT_TRUE(op.ok()) << op.error().message;
  std::vector<std::unique_ptr<GpuAttention>> problems;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    problems.push_back(std::make_unique<GpuAttention>(world, options, seed));
  }
  for (const auto& problem : problems) {
    for (int rank = 0; rank < world.size(); ++rank) {
      ASSERT_TRUE(op->launch(rank, problem->arguments()[static_cast<std::size_t>(rank)]).ok());
    }
  }
  for (int rank = 0; rank < world.size(); ++rank) ASSERT_TRUE(op->wait(rank).ok());
  for (const auto& problem : problems) EXPECT_EQ(problem->mismatch(64), "");
}

TEST(GpuAttention, ErrorsDoNotGrowWithTheRanks) {
  SKIP_WITHOUT_GPU();
  AttentionOptions options = attention(4096, 2, 128);
  double alone = 0;
  for (const Topology& topo : {Topology{1, 1}, {1, 2}, {2, 2}, {2, 4}}) {
    World world = make_world(topo.nodes, topo.gpus);
    Result<Operator> op = Operator::create(world, options);
    ASSERT_TRUE(op.ok()) << op.error().message;
    GpuAttention problem(world, options, 8);
    ASSERT_TRUE(op->run(problem.arguments()).ok());
    EXPECT_EQ(problem.mismatch(128), "");
    if (topo.world() == 1) alone = problem.relative_error();
    EXPECT_LE(problem.relative_error(), 1.02 * alone) << topo.world() << " ranks";
  }
}

TEST(GpuAttention, ARankThatIsNotLaunchedIsNamed) {
  SKIP_WITHOUT_GPU();
  WorldOptions world_options = gpu_options(1, 2);
  world_options.deadline_s = 0.5;
  Result<World> world = World::create(world_options);
  ASSERT_TRUE(world.ok()) << world.error().message;
  const AttentionOptions options = attention(1024, 2, 128);
  Result<Operator> op = Operator::create(*world, options);
  ASSERT_TRUE(op.ok()) << op.error().message;
  GpuAttention problem(*world, options, 9);
  ASSERT_TRUE(op->launch(0, problem.arguments()[0]).ok());
  const Status status = op->wait(0);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kTimeout) << status.error().message;
  EXPECT_NE(status.error().message.find("chunk of keys"), std::string::npos) << status.error().message;
}

constexpr double kLinkGbPerS = 6;

// The median of some calls on 16 SMs per rank, the network as fast as a card is beside a whole H200.
double time_us(const Topology& topo, const AttentionOptions& options) {
  WorldOptions world_options = gpu_options(topo.nodes, topo.gpus);
  world_options.sms = 16;
  world_options.link = {kLinkGbPerS, 5};
  Result<World> world = World::create(world_options);
  EXPECT_TRUE(world.ok()) << world.error().message;
  Result<Operator> op = Operator::create(*world, options);
  EXPECT_TRUE(op.ok()) << op.error().message;
  GpuAttention problem(*world, options, 10);
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    const Result<RunReport> report = op->run(problem.arguments());
    EXPECT_TRUE(report.ok()) << report.error().message;
    times.push_back(report.ok() ? report->time_us : 0);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

TEST(GpuAttention, ARingTakesLittleLongerThanAllKeysAtHand) {
  SKIP_WITHOUT_GPU();
  AttentionOptions options = attention(16384, 8, 128);
  AttentionOptions alone = attention(2048, 8, 128);  // what one of eight ranks computes
  alone.seq_k = 16384;
  const double best = time_us({1, 1}, alone);
  for (const Topology& topo : {Topology{1, 8}, {2, 4}, {4, 2}}) {
    const double ring = time_us(topo, options);
    fmt::print(stderr, "{}x{}: {:.0f} us, {:.2f} times the {:.0f} us of one rank\n", topo.nodes, topo.gpus, ring,
               ring / best, best);
    // Eight ranks share power and memory, which one has for itself. What a rank sends goes to N - 1 nodes.
    const double shard_bytes = 2.0 * 2 * static_cast<double>(alone.seq_q * options.heads * options.dim);
    const double wire = (topo.nodes - 1) * shard_bytes / (kLinkGbPerS * 1e3);
    EXPECT_LT(ring, 1.5 * std::max(best, wire)) << topo.nodes << "x" << topo.gpus << ", wire " << wire << " us";
  }
}

TEST(GpuAttention, RefusesWhatItCannotDo) {
  SKIP_WITHOUT_GPU();
  World world = make_world(1, 2, 8);
  AttentionOptions options = attention(4096, 2, 128);
  options.scale = -1;
  EXPECT_EQ(Operator::create(world, options).error().kind, ErrorKind::kUnsupported);
  options.scale = 0;
  options.bm = 64;
  EXPECT_EQ(Operator::create(world, options).error().kind, ErrorKind::kBadArgument);
  options.bm = 0;
  options.slot_rounds = 2;
  options.chunk_rows = 128;
  EXPECT_EQ(Operator::create(world, options).error().kind, ErrorKind::kUnsupported);
}

}  // namespace
}  // namespace mkernel
