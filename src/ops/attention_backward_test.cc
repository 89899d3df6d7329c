// ring_attention_backward through the public API, on CPU threads and against the simulator.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exec/backward_problem.h"
#include "ops/attention_spec.h"
#include "ops/test_world.h"

namespace mkernel {
namespace {

using test::failed;
using test::make_world;
using test::Shape;
using test::succeeded;
using test::world_of;

AttentionBackwardOptions small(std::int64_t tokens) {
  AttentionBackwardOptions options;
  options.dim = 8;
  options.seq_q = tokens;
  options.bm = 8;
  options.bn = 4;
  options.chunk_rows = 5;
  return options;
}

Operator make_backward(World& world, const AttentionBackwardOptions& options) {
  Result<Operator> op = Operator::create(world, options);
  EXPECT_TRUE(op.ok()) << (op.ok() ? "" : op.error().message);
  return std::move(op).value();
}

Plan plan_of(const World& world, const AttentionBackwardOptions& options) {
  return Plan(make_backward_spec({world.options().nodes, world.options().gpus}, options).value());
}

std::vector<AttentionBackwardArguments> all_arguments(BackwardProblem& problem, int world) {
  std::vector<AttentionBackwardArguments> all;
  for (int rank = 0; rank < world; ++rank) all.push_back(problem.arguments(rank));
  return all;
}

// Runs once, checks every bit and every value against fp64.
GradientReport expect_right(World& world, const AttentionBackwardOptions& options,
                            const BackwardProblem::Inputs& inputs = {}, std::int64_t rows = 0, bool bits = true) {
  Operator op = make_backward(world, options);
  BackwardProblem problem(plan_of(world, options), 7, inputs);
  const auto report = op.run(all_arguments(problem, world.size()));
  EXPECT_TRUE(succeeded(report));
  if (!report.ok()) return {};
  EXPECT_EQ(report->network_bytes, report->network_bytes_bound);
  if (bits) {
    const auto wrong = problem.mismatch();
    EXPECT_FALSE(wrong) << *wrong;
  }
  const GradientReport check = problem.check(rows);
  EXPECT_TRUE(check.ok()) << "an element of " << check.worst_name() << " is at " << check.worst().worst_ratio
                          << " of its bound, row " << check.worst().worst_row << ", column " << check.worst().worst_col;
  return check;
}

TEST(HostAttentionBackward, SharesHeadsMasksAndDividesOnEveryWorld) {
  for (const Shape& shape : test::kWorlds) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    int turn = 0;
    for (const std::int64_t tokens : {0, 1, 7, 64, 131}) {
      for (const bool causal : {false, true}) {
        for (const bool zigzag : {false, true}) {
          AttentionBackwardOptions options = small(tokens);
          options.causal = causal;
          options.zigzag = zigzag;
          options.heads = 1 + turn % 4;
          options.kv_heads = options.heads % 2 == 0 ? options.heads / 2 : 1;
          options.batch = 1 + turn % 2;
          options.dtype = static_cast<Dtype>(turn % 3);
          options.fp32_partials = turn % 4 == 1;
          options.slot_rounds = turn % 4 == 3 ? -1 : turn % 4;
          options.bn = 1 + turn % 7;
          if (turn % 5 == 0) options.seq_k = tokens + 3;
          if (turn % 5 == 1) options.seq_k = tokens / 2;
          SCOPED_TRACE(fmt::format("{}x{} {} tokens, turn {}", shape.nodes, shape.gpus, tokens, turn));
          expect_right(world, options, {.by_token = turn % 2 == 1});
          ++turn;
        }
      }
    }
  }
}

TEST(HostAttentionBackward, ServesWorldsOfUpToTwentyFourRanks) {
  for (const Shape& shape :
       {Shape{1, 5}, Shape{1, 7}, Shape{2, 4}, Shape{3, 3}, Shape{4, 3}, Shape{5, 3}, Shape{12, 2}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    AttentionBackwardOptions options = small(150);
    options.causal = options.zigzag = true;
    options.slot_rounds = 2;
    expect_right(world, options);
  }
}

TEST(HostAttentionBackward, EveryHeadSizeAndTheTilesThatAreChosen) {
  World world = make_world(world_of(2, 2));
  for (const std::int64_t dim : {8, 64, 96, 128, 256}) {
    AttentionBackwardOptions options;
    options.dim = dim;
    options.seq_q = 300;
    options.heads = 4;
    options.kv_heads = 2;
    options.causal = dim % 128 == 0;
    expect_right(world, options, {}, 60);
  }
}

TEST(HostAttentionBackward, WindowsAndUnequalLengths) {
  World world = make_world(world_of(2, 2));
  for (const std::int64_t left : {-1, 0, 5}) {
    for (const std::int64_t right : {-1, 0, 4}) {
      AttentionBackwardOptions options = small(90);
      options.window_left = left;
      options.window_right = right;
      expect_right(world, options);
      options.seq_k = 40;  // longer Q than K: the first queries see nothing
      options.causal = true;
      options.slot_rounds = 1;
      expect_right(world, options);
      options.seq_k = 140;
      options.zigzag = true;
      expect_right(world, options);
    }
  }
}

TEST(HostAttentionBackward, PackedSequencesOfAnyLength) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 3}, Shape{2, 2}, Shape{3, 1}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    for (const bool causal : {false, true}) {
      AttentionBackwardOptions options = small(0 + 1 + 7 + 698 + 699);
      options.packed = true;
      options.causal = causal;
      options.zigzag = causal;
      options.bm = options.bn = 64;
      options.chunk_rows = 100;
      Operator op = make_backward(world, options);
      BackwardProblem problem(plan_of(world, options), 3);
      problem.set_ends({0, 0, 1, 8, 706, 1405}, {0, 0, 1, 8, 706, 1405});
      ASSERT_TRUE(succeeded(op.run(all_arguments(problem, world.size()))));
      EXPECT_FALSE(problem.mismatch());
      EXPECT_TRUE(problem.check(100).ok());
    }
  }
  // Another number of keys than of queries in each sequence, some without any.
  World world = make_world(world_of(2, 2));
  AttentionBackwardOptions options = small(30);
  options.seq_k = 26;
  options.packed = options.causal = true;
  Operator op = make_backward(world, options);
  BackwardProblem problem(plan_of(world, options), 3);
  problem.set_ends({0, 10, 18, 18, 30}, {0, 4, 4, 20, 26});
  ASSERT_TRUE(succeeded(op.run(all_arguments(problem, 4))));
  EXPECT_FALSE(problem.mismatch());
  EXPECT_TRUE(problem.check().ok());
}

// Queries that see nothing, and keys that nobody sees, have gradients of 0, and no NaN comes from a log-sum-exp of
// minus infinity.
TEST(HostAttentionBackward, WhatNobodySeesHasNoGradient) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 2}, Shape{2, 1}, Shape{2, 2}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    AttentionBackwardOptions options = small(40);
    options.seq_k = 64;
    options.dtype = Dtype::kFp32;
    options.packed = true;
    Operator op = make_backward(world, options);
    BackwardProblem problem(plan_of(world, options), 3);
    // Queries 0..9 have no keys, keys 30..63 no queries.
    problem.set_ends({0, 10, 40, 40}, {0, 0, 30, 64});
    ASSERT_TRUE(succeeded(op.run(all_arguments(problem, world.size()))));
    EXPECT_FALSE(problem.mismatch());
    EXPECT_TRUE(problem.check().ok());
    const std::vector<std::byte> all = problem.output();
    const auto* dq = reinterpret_cast<const float*>(all.data());
    const float* dk = dq + options.heads * 40 * 8;
    const float* dv = dk + options.heads * 64 * 8;
    for (std::int64_t i = 0; i < 10 * 8; ++i) EXPECT_EQ(dq[i], 0.0f) << i;
    EXPECT_NE(dq[10 * 8], 0.0f);
    for (std::int64_t i = 30 * 8; i < 64 * 8; ++i) EXPECT_TRUE(dk[i] == 0.0f && dv[i] == 0.0f) << i;
    EXPECT_NE(dv[29 * 8], 0.0f);
  }
}

TEST(HostAttentionBackward, ScoresOfTenThousand) {
  World world = make_world(world_of(2, 2));
  AttentionBackwardOptions options;
  options.dim = 64;
  options.seq_q = 130;
  options.scale = 1;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    options.dtype = dtype;
    options.causal = dtype == Dtype::kFp16;
    expect_right(world, options, {.score_size = 10000});
  }
}

TEST(HostAttentionBackward, TheErrorDoesNotGrowWithTheWorld) {
  for (const bool fp32_partials : {false, true}) {
    std::vector<double> dq, dk, dv;
    for (const Shape& shape : {Shape{1, 1}, Shape{2, 1}, Shape{2, 2}, Shape{2, 4}, Shape{4, 4}}) {
      World world = make_world(world_of(shape.nodes, shape.gpus, 1));
      AttentionBackwardOptions options;
      options.dim = 64;
      options.seq_q = 512;
      options.heads = options.kv_heads = 1;
      options.dtype = fp32_partials ? Dtype::kBf16 : Dtype::kFp32;
      options.fp32_partials = fp32_partials;
      options.chunk_rows = 32;
      const GradientReport check = expect_right(world, options, {}, 64);
      dq.push_back(check.dq.max_rel_error);
      dk.push_back(check.dk.max_rel_error);
      dv.push_back(check.dv.max_rel_error);
    }
    for (const std::vector<double>* errors : {&dq, &dk, &dv}) {
      EXPECT_LE(*std::max_element(errors->begin(), errors->end()),
                2 * *std::min_element(errors->begin(), errors->end()));
    }
  }
}

TEST(HostAttentionBackward, TheLengthsOfTheFieldOnEveryWorld) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const int gpus = ranks % 2 == 0 ? 2 : 1;
    World world = make_world(world_of(ranks / gpus, gpus));
    for (const std::int64_t tokens : {1, 7, 127, 698, 749}) {
      AttentionBackwardOptions options;
      options.dim = 64;
      options.seq_q = tokens;
      options.heads = 2;
      options.kv_heads = tokens % 2 == 0 ? 1 : 2;
      options.causal = options.zigzag = true;
      SCOPED_TRACE(fmt::format("{} ranks, {} tokens", ranks, tokens));
      expect_right(world, options, {}, 16);
    }
  }
}

// Long, and of no round length.
TEST(HostAttentionBackward, EightThousandTokens) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 3}, Shape{2, 4}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    AttentionBackwardOptions options;
    options.dim = 64;
    options.seq_q = 8191;
    options.heads = options.kv_heads = 1;
    options.causal = options.zigzag = true;
    expect_right(world, options, {}, 4, false);
  }
}

std::vector<std::byte> bits_of(const WorldOptions& where, const AttentionBackwardOptions& options) {
  World world = make_world(where);
  Operator op = make_backward(world, options);
  BackwardProblem problem(plan_of(world, options), 5);
  EXPECT_TRUE(succeeded(op.run(all_arguments(problem, world.size()))));
  return problem.output();
}

TEST(HostAttentionBackward, GivesTheSameBitsForEveryPartitionAndInTheSimulator) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 3}, Shape{3, 1}, Shape{2, 2}}) {
    AttentionBackwardOptions options = small(120);
    options.heads = options.kv_heads = 2;
    options.causal = options.zigzag = true;
    const std::vector<std::byte> first = bits_of(world_of(shape.nodes, shape.gpus), options);
    for (const Partition& partition : {Partition{3, 0, 0}, {0, 3, 0}, {0, 0, 3}, {1, 1, 1}}) {
      WorldOptions where = world_of(shape.nodes, shape.gpus, 3);
      where.partition = partition;
      where.link.unordered = shape.nodes > 1;
      EXPECT_EQ(bits_of(where, options), first);
    }
    WorldOptions sim = world_of(shape.nodes, shape.gpus, 5);
    sim.device = Device::kSim;
    EXPECT_EQ(bits_of(sim, options), first);
    for (const int rounds : {1, 2, -1}) {
      options.slot_rounds = rounds;
      EXPECT_EQ(bits_of(world_of(shape.nodes, shape.gpus), options), first);
    }
  }
}

// Fresh data each time, no barrier between ranks.
TEST(HostAttentionBackward, CallsFollowEachOtherWithoutABarrier) {
  for (const int rounds : {1, -1}) {
    World world = make_world(world_of(2, 2));
    AttentionBackwardOptions options = small(60);
    options.slot_rounds = rounds;
    Operator op = make_backward(world, options);
    const Plan plan = plan_of(world, options);
    std::vector<std::unique_ptr<BackwardProblem>> problems;
    for (std::uint64_t i = 0; i < 12; ++i) problems.push_back(std::make_unique<BackwardProblem>(plan, i));
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      ranks.emplace_back([&, rank] {
        for (const auto& problem : problems) EXPECT_TRUE(succeeded(op.launch(rank, problem->arguments(rank))));
        EXPECT_TRUE(succeeded(op.wait(rank)));
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const auto& problem : problems) EXPECT_FALSE(problem->mismatch());
  }
}

// As one layer is trained: what the forward gives goes into the backward of the same world.
TEST(HostAttentionBackward, TakesWhatTheForwardGives) {
  World world = make_world(world_of(2, 2));
  AttentionBackwardOptions options = small(70);
  options.heads = options.kv_heads = 2;
  options.causal = true;
  options.dtype = Dtype::kFp32;
  const AttentionOptions& forward_options = options;
  Result<Operator> forward = Operator::create(world, forward_options);
  ASSERT_TRUE(succeeded(forward));
  Operator backward = make_backward(world, options);
  BackwardProblem problem(plan_of(world, options), 5);
  std::vector<AttentionBackwardArguments> arguments = all_arguments(problem, 4);
  std::vector<std::vector<float>> lse(4);
  std::vector<AttentionArguments> first(4);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    lse[rank].assign(static_cast<std::size_t>(2 * backward.q_tokens(static_cast<int>(rank))), 7.0f);
    AttentionBackwardArguments& own = arguments[rank];
    first[rank] = {own.q, own.k, own.v, own.o, lse[rank].data(), nullptr, nullptr, 0};
    own.lse = lse[rank].data();
  }
  ASSERT_TRUE(succeeded(forward->run(first)));
  ASSERT_TRUE(succeeded(backward.run(arguments)));
  EXPECT_TRUE(problem.check().ok());
}

TEST(AttentionBackwardCheck, BadOptionsAreRefusedByName) {
  World world = make_world(world_of(2, 2));
  const auto refused = [&](auto damage, const std::vector<std::string>& words,
                           ErrorKind kind = ErrorKind::kBadArgument) {
    AttentionBackwardOptions options = small(40);
    damage(options);
    EXPECT_TRUE(failed(Operator::create(world, options), kind, words));
  };
  refused([](auto& o) { o.heads = 12, o.kv_heads = 8; }, {"heads is 12", "kv_heads is 8"});
  refused([](auto& o) { o.dim = 12; }, {"dim is 12"});
  refused([](auto& o) { o.seq_q = -1; }, {"seq_q is -1"});
  refused([](auto& o) { o.bm = 3; }, {"bm is 3"});
  refused([](auto& o) { o.bn = -1; }, {"bn is -1"});
  refused([](auto& o) { o.bn = 1025; }, {"bn is 1025"});
  refused([](auto& o) { o.slot_rounds = -2; }, {"slot_rounds is -2"});
  refused([](auto& o) { o.fused = false; }, {"fused is false", "mkernel sim"}, ErrorKind::kUnsupported);
}

TEST(AttentionBackwardCheck, BadTensorsAreRefusedByName) {
  World world = make_world(world_of(2, 1));
  AttentionBackwardOptions options = small(41);
  options.heads = 4;
  options.kv_heads = 2;
  Operator op = make_backward(world, options);
  EXPECT_EQ(op.q_tokens(0), 21);
  EXPECT_EQ(op.kv_tokens(1), 20);
  BackwardProblem problem(plan_of(world, options), 1);
  const std::int32_t ends[] = {0, 41};
  const struct {
    std::function<void(std::vector<AttentionBackwardArguments>&)> damage;
    std::vector<std::string> words;
  } table[] = {
      {[](auto& a) { a.pop_back(); }, {"arguments has 1 entries", "2 ranks"}},
      {[](auto& a) { a[0].d_o.tokens = 20; }, {"rank 0: dO is 1 x 4 x 20 x 8", "1 x 4 x 21 x 8"}},
      {[](auto& a) { a[1].dk.heads = 4; }, {"rank 1: dK is 1 x 4 x 20 x 8", "1 x 2 x 20 x 8"}},
      {[](auto& a) { a[1].dv.dim = 16; }, {"rank 1: dV is"}},
      {[](auto& a) { a[0].dq.data = nullptr; }, {"rank 0: dQ has no data"}},
      {[](auto& a) { a[0].o.data = nullptr; }, {"rank 0: O has no data"}},
      {[](auto& a) { a[0].lse = nullptr; }, {"rank 0: lse is null", "the forward"}},
      {[](auto& a) { a[0].dk.token_stride = 4; }, {"rank 0: dK has strides", "same place"}},
      {[](auto& a) { a[0].dq.data = a[0].q.data; }, {"dQ", "shares memory with", "Q of rank 0"}},
      {[](auto& a) { a[0].dv.data = a[1].dk.data; }, {"shares memory with"}},
      {[](auto& a) { a[0].dq.data = const_cast<float*>(a[0].lse); }, {"shares memory with", "lse"}},
      {[&](auto& a) { a[0].cu_seqlens_q = ends; }, {"rank 0: cu_seqlens", "not made for packed"}},
  };
  for (const auto& bad : table) {
    std::vector<AttentionBackwardArguments> arguments = all_arguments(problem, 2);
    bad.damage(arguments);
    EXPECT_TRUE(failed(op.run(arguments), ErrorKind::kBadArgument, bad.words));
  }
  const std::vector<GemmArguments> matrices(2);
  EXPECT_TRUE(failed(op.run(matrices), ErrorKind::kBadArgument, {"are matrices", "AttentionBackwardArguments"}));
  const std::vector<AttentionArguments> tensors(2);
  EXPECT_TRUE(failed(op.run(tensors), ErrorKind::kBadArgument, {"of the forward", "AttentionBackwardArguments"}));
  // Inputs may share memory with each other.
  std::vector<AttentionBackwardArguments> shared = all_arguments(problem, 2);
  for (auto& rank : shared) rank.v = rank.k, rank.d_o = rank.o;
  EXPECT_TRUE(succeeded(op.run(shared)));
}

}  // namespace
}  // namespace mkernel
