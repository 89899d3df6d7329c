// ring_attention through the public API, on CPU threads and against the simulator.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "exec/attention_problem.h"
#include "ops/attention_spec.h"
#include "ops/test_world.h"

namespace mkernel {
namespace {

using test::failed;
using test::make_world;
using test::Shape;
using test::succeeded;
using test::world_of;

AttentionOptions small(std::int64_t tokens) {
  AttentionOptions options;
  options.dim = 8;
  options.seq_q = tokens;
  options.bm = 8;
  options.chunk_rows = 5;
  return options;
}

Operator make_attention(World& world, const AttentionOptions& options) {
  Result<Operator> op = Operator::create(world, options);
  EXPECT_TRUE(op.ok()) << (op.ok() ? "" : op.error().message);
  return std::move(op).value();
}

Plan plan_of(const World& world, const AttentionOptions& options) {
  return Plan(make_attention_spec({world.options().nodes, world.options().gpus}, options).value());
}

std::vector<AttentionArguments> all_arguments(AttentionProblem& problem, int world) {
  std::vector<AttentionArguments> all;
  for (int rank = 0; rank < world; ++rank) all.push_back(problem.arguments(rank));
  return all;
}

// Runs once, checks every bit and every value against fp64; returns what O and the log-sum-exp are.
CheckReport expect_right(World& world, const AttentionOptions& options, const AttentionProblem::Inputs& inputs = {},
                         std::int64_t rows = 0, bool bits = true) {
  Operator op = make_attention(world, options);
  AttentionProblem problem(plan_of(world, options), 7, inputs);
  const auto report = op.run(all_arguments(problem, world.size()));
  EXPECT_TRUE(succeeded(report));
  if (!report.ok()) return {};
  EXPECT_EQ(report->network_bytes, report->network_bytes_bound);
  if (bits) {
    const auto wrong = problem.mismatch();
    EXPECT_FALSE(wrong) << *wrong;
  }
  const CheckReport check = problem.check(rows);
  EXPECT_TRUE(check.ok) << "an element is at " << check.worst_ratio << " of its bound, row " << check.worst_row
                        << ", column " << check.worst_col;
  return check;
}

TEST(HostAttention, SharesHeadsMasksAndDividesOnEveryWorld) {
  for (const Shape& shape : test::kWorlds) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    int turn = 0;
    for (const std::int64_t tokens : {0, 1, 7, 64, 131}) {
      for (const bool causal : {false, true}) {
        for (const bool zigzag : {false, true}) {
          AttentionOptions options = small(tokens);
          options.causal = causal;
          options.zigzag = zigzag;
          options.heads = 1 + turn % 4;
          options.kv_heads = options.heads % 2 == 0 ? options.heads / 2 : 1;
          options.batch = 1 + turn % 2;
          options.dtype = static_cast<Dtype>(turn % 3);
          options.slot_rounds = turn % 4 == 3 ? -1 : turn % 4;
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

TEST(HostAttention, ServesWorldsOfUpToTwentyFourRanks) {
  for (const Shape& shape :
       {Shape{1, 5}, Shape{1, 7}, Shape{2, 4}, Shape{3, 3}, Shape{4, 3}, Shape{5, 3}, Shape{12, 2}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    AttentionOptions options = small(150);
    options.causal = options.zigzag = true;
    options.slot_rounds = 2;
    expect_right(world, options);
  }
}

TEST(HostAttention, EveryHeadSizeAndTheTilesThatAreChosen) {
  World world = make_world(world_of(2, 2));
  for (const std::int64_t dim : {8, 64, 96, 128, 256}) {
    AttentionOptions options;
    options.dim = dim;
    options.seq_q = 300;
    options.heads = 4;
    options.kv_heads = 2;
    options.causal = dim % 128 == 0;
    expect_right(world, options, {}, 100);
  }
}

TEST(HostAttention, WindowsAndUnequalLengths) {
  World world = make_world(world_of(2, 2));
  for (const std::int64_t left : {-1, 0, 5}) {
    for (const std::int64_t right : {-1, 0, 4}) {
      AttentionOptions options = small(90);
      options.window_left = left;
      options.window_right = right;
      expect_right(world, options);
      options.seq_k = 40;  // longer Q than K
      options.causal = true;
      options.slot_rounds = 1;
      expect_right(world, options);
    }
  }
}

// Lengths {0, 1, 7, 698, 699}, in one run; nobody sees another's keys.
TEST(HostAttention, PackedSequencesOfAnyLength) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 3}, Shape{2, 2}, Shape{3, 1}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    for (const bool causal : {false, true}) {
      AttentionOptions options = small(0 + 1 + 7 + 698 + 699);
      options.packed = true;
      options.causal = causal;
      options.zigzag = causal;
      options.bm = 64;
      options.chunk_rows = 100;
      Operator op = make_attention(world, options);
      AttentionProblem problem(plan_of(world, options), 3);
      problem.q_ends() = problem.k_ends() = {0, 0, 1, 8, 706, 1405};
      ASSERT_TRUE(succeeded(op.run(all_arguments(problem, world.size()))));
      EXPECT_FALSE(problem.mismatch());
      EXPECT_TRUE(problem.check(200).ok);
    }
  }
  // Another number of keys than of queries in each sequence, some without any.
  World world = make_world(world_of(2, 2));
  AttentionOptions options = small(30);
  options.seq_k = 26;
  options.packed = options.causal = true;
  Operator op = make_attention(world, options);
  AttentionProblem problem(plan_of(world, options), 3);
  problem.q_ends() = {0, 10, 18, 18, 30};
  problem.k_ends() = {0, 4, 4, 20, 26};
  ASSERT_TRUE(succeeded(op.run(all_arguments(problem, 4))));
  EXPECT_FALSE(problem.mismatch());
  EXPECT_TRUE(problem.check().ok);
  // The second sequence has no keys: its queries see nothing.
  EXPECT_EQ(problem.lse()[12], -std::numeric_limits<float>::infinity());
}

// The bound is one for all worlds, and so nearly is the error: it does not grow with the steps of the ring.
TEST(HostAttention, TheErrorDoesNotGrowWithTheWorld) {
  for (const float size : {1.0f, 10000.0f}) {
    std::vector<double> errors;
    for (const int ranks : {1, 2, 3, 4, 8}) {
      World world =
          make_world(world_of(ranks > 2 && ranks % 2 == 0 ? 2 : ranks, ranks > 2 && ranks % 2 == 0 ? ranks / 2 : 1));
      AttentionOptions options;
      options.dim = 64;
      options.seq_q = 512;
      options.dtype = Dtype::kFp32;
      options.chunk_rows = 32;
      options.scale = size == 1 ? 0 : 1;
      errors.push_back(expect_right(world, options, {.score_size = size}, 64).max_rel_error);
    }
    const double least = *std::min_element(errors.begin(), errors.end());
    for (const double error : errors) EXPECT_LE(error, 2 * least) << size;
  }
}

TEST(HostAttention, TheLengthsOfTheFieldOnEveryWorld) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const int gpus = ranks % 2 == 0 ? 2 : 1;
    World world = make_world(world_of(ranks / gpus, gpus));
    for (const std::int64_t tokens : {1, 7, 127, 698, 749, 8191}) {
      AttentionOptions options;
      options.dim = 64;
      options.seq_q = tokens;
      options.heads = tokens < 1000 ? 2 : 1;
      options.causal = options.zigzag = true;
      SCOPED_TRACE(fmt::format("{} ranks, {} tokens", ranks, tokens));
      expect_right(world, options, {}, tokens < 1000 ? 64 : 24, tokens < 1000);
    }
  }
}

std::vector<std::byte> bits_of(const WorldOptions& where, const AttentionOptions& options) {
  World world = make_world(where);
  Operator op = make_attention(world, options);
  AttentionProblem problem(plan_of(world, options), 5);
  EXPECT_TRUE(succeeded(op.run(all_arguments(problem, world.size()))));
  std::vector<std::byte> bits = problem.output();
  const auto* lse = reinterpret_cast<const std::byte*>(problem.lse().data());
  bits.insert(bits.end(), lse, lse + problem.lse().size() * sizeof(float));
  return bits;
}

TEST(HostAttention, GivesTheSameBitsForEveryPartitionAndInTheSimulator) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 3}, Shape{3, 1}, Shape{2, 2}}) {
    AttentionOptions options = small(200);
    options.heads = 2;
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
    options.fused = false;
    EXPECT_EQ(bits_of(world_of(shape.nodes, shape.gpus), options), first);
    EXPECT_EQ(bits_of(sim, options), first);
  }
}

// Fresh data each time, no barrier between ranks, and a GEMM in between; flags close to their wrap.
TEST(HostAttention, CallsFollowEachOtherWithoutABarrier) {
  World world = make_world(world_of(2, 2));
  AttentionOptions options = small(100);
  options.slot_rounds = 1;
  Operator op = make_attention(world, options);
  const Plan plan = plan_of(world, options);
  std::vector<std::unique_ptr<AttentionProblem>> problems;
  for (std::uint64_t i = 0; i < 20; ++i) problems.push_back(std::make_unique<AttentionProblem>(plan, i));
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

TEST(HostAttention, TheLogSumExpNeedNotBeWanted) {
  World world = make_world(world_of(2, 1));
  const AttentionOptions options = small(40);
  Operator op = make_attention(world, options);
  AttentionProblem problem(plan_of(world, options), 1);
  std::vector<AttentionArguments> arguments = all_arguments(problem, 2);
  for (AttentionArguments& rank : arguments) rank.lse = nullptr;
  ASSERT_TRUE(succeeded(op.run(arguments)));
  const std::vector<std::byte> without = problem.output();
  ASSERT_TRUE(succeeded(op.run(all_arguments(problem, 2))));
  EXPECT_EQ(problem.output(), without);
}

TEST(Sequences, AreSplitAndJoined) {
  for (const bool zigzag : {false, true}) {
    std::vector<std::int32_t> whole(23), joined(23, -1);
    std::iota(whole.begin(), whole.end(), 0);
    for (int rank = 0; rank < 4; ++rank) {
      std::vector<std::int32_t> part(23);
      split_sequence(whole.data(), 23, 4, 4, rank, zigzag, part.data());
      EXPECT_EQ(part[0], sequence_parts(23, 4, rank, zigzag)[0].begin);
      join_sequence(part.data(), 23, 4, 4, rank, zigzag, joined.data());
    }
    EXPECT_EQ(joined, whole);
  }
  EXPECT_EQ(sequence_parts(16, 2, 1, true), (std::vector<SequencePart>{{4, 4}, {8, 4}}));
  EXPECT_EQ(sequence_parts(16, 2, 1, false), (std::vector<SequencePart>{{8, 8}}));
}

TEST(AttentionArgumentsCheck, BadOptionsAreRefusedByName) {
  World world = make_world(world_of(2, 2));
  const auto refused = [&](auto damage, const std::vector<std::string>& words) {
    AttentionOptions options = small(40);
    damage(options);
    EXPECT_TRUE(failed(Operator::create(world, options), ErrorKind::kBadArgument, words));
  };
  refused([](auto& o) { o.heads = 12, o.kv_heads = 8; }, {"heads is 12", "kv_heads is 8"});
  refused([](auto& o) { o.heads = 0; }, {"heads is 0"});
  refused([](auto& o) { o.kv_heads = -1; }, {"kv_heads is -1"});
  refused([](auto& o) { o.batch = 0; }, {"batch is 0"});
  refused([](auto& o) { o.dim = 12; }, {"dim is 12"});
  refused([](auto& o) { o.dim = 512; }, {"dim is 512"});
  refused([](auto& o) { o.seq_q = -1; }, {"seq_q is -1"});
  refused([](auto& o) { o.seq_k = -2; }, {"seq_k is -2"});
  refused([](auto& o) { o.dtype = static_cast<Dtype>(9); }, {"dtype is 9"});
  refused([](auto& o) { o.window_left = -2; }, {"window_left is -2"});
  refused([](auto& o) { o.scale = std::nan(""); }, {"scale is nan"});
  refused([](auto& o) { o.bm = 3; }, {"bm is 3"});
  refused([](auto& o) { o.bm = -8; }, {"bm is -8"});
  refused([](auto& o) { o.chunk_rows = -1; }, {"chunk_rows is -1"});
  refused([](auto& o) { o.slot_rounds = -2; }, {"slot_rounds is -2"});
  refused([](auto& o) { o.packed = true, o.batch = 2; }, {"batch is 2", "packed"});
  refused([](auto& o) { o.fused = false, o.slot_rounds = 1; }, {"slot_rounds is 1", "fused is false"});
  AttentionOptions shared = small(40);
  shared.heads = 28;
  shared.kv_heads = 7;
  EXPECT_TRUE(succeeded(Operator::create(world, shared)));
}

TEST(AttentionArgumentsCheck, BadTensorsAreRefusedByName) {
  World world = make_world(world_of(2, 1));
  AttentionOptions options = small(41);
  options.heads = 4;
  options.kv_heads = 2;
  Operator op = make_attention(world, options);
  EXPECT_EQ(op.q_tokens(0), 21);
  EXPECT_EQ(op.kv_tokens(1), 20);
  EXPECT_EQ(op.q_tokens(2), 0);
  AttentionProblem problem(plan_of(world, options), 1);
  const std::int32_t ends[] = {0, 41};
  const struct {
    std::function<void(std::vector<AttentionArguments>&)> damage;
    std::vector<std::string> words;
  } table[] = {
      {[](auto& a) { a.pop_back(); }, {"arguments has 1 entries", "2 ranks"}},
      {[](auto& a) { a[0].q.tokens = 20; }, {"rank 0: Q is 1 x 4 x 20 x 8", "1 x 4 x 21 x 8"}},
      {[](auto& a) { a[1].k.heads = 4; }, {"rank 1: K is 1 x 4 x 20 x 8", "1 x 2 x 20 x 8"}},
      {[](auto& a) { a[1].v.dim = 16; }, {"rank 1: V is"}},
      {[](auto& a) { a[1].o.batch = 2; }, {"rank 1: O is 2 x"}},
      {[](auto& a) { a[0].v.data = nullptr; }, {"rank 0: V has no data"}},
      {[](auto& a) { a[0].k.token_stride = -8; }, {"rank 0: K has strides", "0 or more"}},
      {[](auto& a) { a[0].o.token_stride = 4; }, {"rank 0: O has strides", "same place"}},
      {[](auto& a) { a[0].o.head_stride = 8; }, {"rank 0: O has strides", "same place"}},
      {[](auto& a) { a[0].q.head_stride = INT64_MAX; }, {"rank 0: Q has strides", "beyond all addresses"}},
      {[](auto& a) { a[0].q.data = static_cast<std::byte*>(a[0].q.data) + 1; }, {"rank 0: Q starts at", "2 bytes"}},
      {[](auto& a) { a[0].o.data = a[1].k.data; }, {"rank 0: O shares memory with K of rank 1"}},
      {[](auto& a) { a[1].o.data = a[0].o.data; }, {"O shares memory with O"}},
      {[](auto& a) { a[0].lse = static_cast<float*>(a[0].q.data); }, {"rank 0: lse shares memory with Q of rank 0"}},
      {[&](auto& a) { a[0].cu_seqlens_q = ends; }, {"rank 0: cu_seqlens", "not made for packed"}},
  };
  for (const auto& bad : table) {
    std::vector<AttentionArguments> arguments = all_arguments(problem, 2);
    bad.damage(arguments);
    EXPECT_TRUE(failed(op.run(arguments), ErrorKind::kBadArgument, bad.words));
  }
  const std::vector<GemmArguments> matrices(2);
  EXPECT_TRUE(failed(op.run(matrices), ErrorKind::kBadArgument, {"arguments are matrices", "ring_attention"}));
  EXPECT_TRUE(succeeded(op.run(all_arguments(problem, 2))));
}

TEST(AttentionArgumentsCheck, BadEndsOfSequencesAreRefusedByName) {
  World world = make_world(world_of(2, 1));
  AttentionOptions options = small(20);
  options.packed = true;
  Operator op = make_attention(world, options);
  AttentionProblem problem(plan_of(world, options), 1);
  const auto refused = [&](std::vector<std::int32_t> ends, const std::vector<std::string>& words) {
    std::vector<AttentionArguments> arguments = all_arguments(problem, 2);
    arguments[1].cu_seqlens_k = ends.data();
    arguments[1].sequences = static_cast<std::int32_t>(ends.size()) - 1;
    arguments[1].cu_seqlens_q = ends.data();
    EXPECT_TRUE(failed(op.run(arguments), ErrorKind::kBadArgument, words));
  };
  refused({1, 20}, {"rank 1: cu_seqlens_q begins with 1"});
  refused({0, 12, 8, 20}, {"rank 1: cu_seqlens_q falls from 12 to 8"});
  refused({0, 19}, {"rank 1: cu_seqlens_q ends with 19", "20 tokens"});
  refused({0}, {"rank 1: sequences is 0"});
  refused({0, 3, 4, 5, 6, 7, 8, 20}, {"rank 1: cu_seqlens are not those of rank 0"});
  std::vector<AttentionArguments> arguments = all_arguments(problem, 2);
  arguments[0].cu_seqlens_k = nullptr;
  EXPECT_TRUE(failed(op.run(arguments), ErrorKind::kBadArgument, {"rank 0: cu_seqlens_k is null"}));
}

}  // namespace
}  // namespace mkernel
