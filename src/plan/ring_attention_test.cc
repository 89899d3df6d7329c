#include "plan/ring_attention.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "plan/attention_tiling.h"
#include "plan/operands.h"
#include "plan/print.h"
#include "plan/test_attention_spec.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

using test::make_attention_spec;

TEST(SequenceSplit, EveryTokenBelongsToOneRank) {
  for (const std::int64_t tokens : {0, 1, 7, 64, 127}) {
    for (const std::int32_t ranks : {1, 2, 3, 8}) {
      for (const bool zigzag : {false, true}) {
        const SequenceSplit split{tokens, ranks, zigzag};
        std::set<std::int64_t> seen;
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
          for (std::int64_t t = 0; t < split.tokens(rank); ++t) {
            EXPECT_TRUE(seen.insert(split.position(rank, t)).second);
          }
        }
        EXPECT_EQ(seen.size(), static_cast<std::size_t>(tokens));
      }
    }
  }
}

TEST(SequenceSplit, ZigzagGivesEveryRankTheSameWorkUnderACausalMask) {
  const SequenceSplit split{800, 8, true};
  const SequenceSplit plain{800, 8, false};
  const auto work = [](const SequenceSplit& s, std::int32_t rank) {
    std::int64_t pairs = 0;
    for (std::int64_t t = 0; t < s.tokens(rank); ++t) pairs += s.position(rank, t) + 1;
    return pairs;
  };
  for (std::int32_t rank = 0; rank < 8; ++rank) EXPECT_EQ(work(split, rank), work(split, 0));
  EXPECT_GT(work(plain, 7), 10 * work(plain, 0));
}

// What the mask says of a run of queries is what it says of them one by one.
TEST(AttentionMask, ARunOfQueriesSeesWhatItsQueriesSee) {
  const AttentionMask masks[] = {
      {}, {true, -1, -1}, {true, 3, -1}, {false, 2, 4}, {false, 0, 0}, {false, -1, 1}, {false, 1, -1}, {true, 0, 5}};
  for (const AttentionMask& mask : masks) {
    for (const std::int64_t queries : {1, 6, 9}) {
      for (const std::int64_t keys : {0, 1, 6, 9}) {
        for (std::int64_t first = 0; first < queries; ++first) {
          for (std::int64_t count = 1; first + count <= queries; ++count) {
            std::set<std::int64_t> one_by_one;
            for (std::int64_t q = first; q < first + count; ++q) {
              const KeyRange range = mask.sees(q, 1, queries, keys);
              for (std::int64_t k = range.begin; k < range.end; ++k) one_by_one.insert(k);
            }
            const KeyRange all = mask.sees(first, count, queries, keys);
            std::set<std::int64_t> together;
            for (std::int64_t k = all.begin; k < all.end; ++k) together.insert(k);
            EXPECT_EQ(together, one_by_one);
          }
        }
      }
    }
  }
}

TEST(AttentionMask, TheLastQueryStandsBesideTheLastKey) {
  const AttentionMask causal{true, -1, -1};
  EXPECT_EQ(causal.sees(4, 1, 5, 8).end, 8);
  EXPECT_EQ(causal.sees(0, 1, 5, 8).end, 4);
  EXPECT_TRUE(causal.sees(2, 1, 8, 5).empty());  // three queries more than keys: these see nothing
  EXPECT_EQ(causal.sees(3, 1, 8, 5).end, 1);
}

TEST(RingAttentionPlan, AWorldOfOneIsPlainAttention) {
  for (const bool zigzag : {false, true}) {
    AttentionSpec attention;
    attention.zigzag = zigzag;
    const Plan plan(make_attention_spec({1, 1}, 100, attention));
    EXPECT_EQ(plan.lanes(Role::kIntra) + plan.lanes(Role::kSend) + plan.lanes(Role::kRecv), 0);
    EXPECT_EQ(workspace_bytes(plan.spec()), 0);
    EXPECT_EQ(plan.count(0, Role::kCompute, 0), 13);  // tiles of 8 queries, each with all keys
  }
}

TEST(RingAttentionPlan, CountsDoNotDependOnTheMask) {
  AttentionSpec causal;
  causal.mask.causal = true;
  for (const Topology topo : {Topology{1, 3}, Topology{3, 1}, Topology{2, 2}}) {
    const Plan full(make_attention_spec(topo, 50));
    const Plan masked(make_attention_spec(topo, 50, causal));
    EXPECT_EQ(full.flag_count(), masked.flag_count());
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < full.lanes(role); ++lane) {
        for (std::int64_t i = 0; i < full.count(1, role, lane); ++i) {
          const Task a = full.task(1, role, lane, i);
          const Task b = masked.task(1, role, lane, i);
          for (int w = 0; w < 2; ++w) {
            EXPECT_EQ(a.waits[w], b.waits[w]);
            EXPECT_EQ(a.signals[w], b.signals[w]);
          }
        }
      }
    }
  }
}

// 4 nodes of 1: 10 tokens each, causal, not zigzag. Node n needs what nodes 0..n-1 hold: 3 + 2 + 1 shards travel.
TEST(RingAttentionPlan, OnlyWhatANodeSeesGoesThere) {
  AttentionSpec causal;
  causal.mask.causal = true;
  const Plan plan(make_attention_spec({4, 1}, 40, causal));
  const std::int64_t shard = 2 * 10 * 8 * 2;
  for (std::int32_t rank = 0; rank < 4; ++rank) EXPECT_EQ(plan.network_bytes(rank), (3 - rank) * shard);
  AttentionSpec window;
  window.mask.left = 4;
  window.mask.right = 0;
  const Plan narrow(make_attention_spec({4, 1}, 40, window));
  for (std::int32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(narrow.network_bytes(rank), shard / 2);  // its last chunk
}

TEST(RingAttentionPlan, FewSlotsTakeMemoryThatDoesNotGrowWithTheWorld) {
  const auto bytes = [](std::int32_t nodes, std::int64_t rounds) {
    AttentionSpec attention;
    attention.slot_rounds = rounds;
    return Plan(make_attention_spec({nodes, 1}, nodes * 40, attention)).buffer_elements(Buffer::kKv);
  };
  EXPECT_EQ(bytes(2, 2), bytes(16, 2));
  EXPECT_GT(bytes(16, 0), 5 * bytes(2, 0));
}

TEST(RingAttentionPlan, SlotsForAllAreChosenWhereTheyFit) {
  PlanSpec spec = make_attention_spec({2, 2}, 4096);
  EXPECT_EQ(choose_slot_rounds(spec), 0);
  spec.topo = {64, 8};
  spec.attention.kv_heads = spec.attention.heads = 32;
  spec.attention.dim = 128;
  spec.attention.seq_q = spec.attention.seq_k = 1 << 20;
  spec.tiling = choose_attention_tiling(spec);
  ASSERT_TRUE(validate(spec).ok());
  spec.attention.slot_rounds = choose_slot_rounds(spec);
  EXPECT_GE(spec.attention.slot_rounds, 2);
  EXPECT_LE(Plan(spec).buffer_elements(Buffer::kKv) * 2 * 2, (std::int64_t{1} << 30) + (std::int64_t{1} << 28));
}

// Every tile folds in its own rank's keys first, then round after round, the own rail's chunk first.
TEST(RingAttentionPlan, TheOrderOfAccumulationIsTheStatedOne) {
  const Plan plan(make_attention_spec({2, 2}, 80, {}, 10, 32));  // 20 tokens each: 2 chunks per rank, 1 tile
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < plan.count(1, Role::kCompute, 0); ++i) {
    order.push_back(plan.task(1, Role::kCompute, 0, i).kv_position);
  }
  EXPECT_EQ(order, (std::vector<std::int64_t>{20, 0, 10, 60, 40, 70, 50}));
}

// Chunk by chunk in turn from the other nodes, which send at the same time.
TEST(RingAttentionPlan, SeveralNodesTakeTurns) {
  const Plan plan(make_attention_spec({3, 1}, 60, {}, 10, 32));  // 20 tokens each: 2 chunks per rank, 1 tile
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < plan.count(1, Role::kCompute, 0); ++i) {
    order.push_back(plan.task(1, Role::kCompute, 0, i).kv_position);
  }
  EXPECT_EQ(order, (std::vector<std::int64_t>{20, 0, 40, 10, 50}));
}

TEST(RingAttentionPlan, EveryFlagNamesTheRankThatRaisesIt) {
  for (const Topology topo : {Topology{1, 3}, Topology{3, 1}, Topology{2, 2}, Topology{3, 2}}) {
    AttentionSpec attention;
    attention.slot_rounds = 1;
    const Plan plan(make_attention_spec(topo, topo.world() * 12, attention));
    for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
      for (int r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
          for (std::int64_t i = 0; i < plan.count(rank, role, lane); ++i) {
            const Task task = plan.task(rank, role, lane, i);
            for (const Signal& signal : task.signals) {
              for_each_rank(topo, rank, signal.reach, task.peer, [&](std::int32_t reached) {
                ASSERT_LT(signal.flag, plan.flag_count());
                const std::int32_t sender = plan.flag_name(reached, signal.flag).sender;
                EXPECT_TRUE(sender == rank || (sender == -1 && topo.node_of(reached) == topo.node_of(rank)))
                    << describe_task(plan, rank, role, lane, i, task) << " on rank " << reached << " names " << sender;
              });
            }
          }
        }
      }
    }
  }
}

TEST(RingAttentionPlan, IsPrintedForPeople) {
  AttentionSpec attention;
  attention.slot_rounds = 2;
  attention.mask.causal = true;
  const PlanSource source{Plan(make_attention_spec({2, 2}, 80, attention))};
  const std::string text = print_plan(source, 1, 3);
  EXPECT_NE(text.find("ring_attention, 1 x 80 queries and 80 keys of 1 and 1 heads of 8, bf16, causal"),
            std::string::npos);
  EXPECT_NE(text.find("slots for 2 of 8 rounds"), std::string::npos) << text;
  EXPECT_NE(text.find("fold keys 20:40 (K at 0) into state at 0 of O[0:8, :]"), std::string::npos) << text;
  EXPECT_EQ(text.find('?'), std::string::npos) << text;
}

TEST(RingAttentionPlan, ImpossibleShapesAreRefusedByName) {
  const PlanSpec good = make_attention_spec({2, 2}, 80);
  ASSERT_TRUE(validate(good).ok());
  const auto refused = [&](auto damage, const char* word) {
    PlanSpec spec = good;
    damage(spec);
    const Status status = validate(spec);
    EXPECT_FALSE(status.ok()) << word;
    if (status.ok()) return;
    EXPECT_NE(status.error().message.find(word), std::string::npos) << status.error().message;
  };
  refused([](PlanSpec& s) { s.attention.heads = 12, s.attention.kv_heads = 8; }, "multiple of kv_heads");
  refused([](PlanSpec& s) { s.attention.heads = 0; }, "heads is 0");
  refused([](PlanSpec& s) { s.attention.kv_heads = 0; }, "kv_heads is 0");
  refused([](PlanSpec& s) { s.attention.batch = 0; }, "batch is 0");
  refused([](PlanSpec& s) { s.attention.dim = 100; }, "multiple of 8");
  refused([](PlanSpec& s) { s.attention.dim = 264; }, "dim is 264");
  refused([](PlanSpec& s) { s.attention.seq_q = -1; }, "seq_q is -1");
  refused([](PlanSpec& s) { s.attention.seq_k = std::int64_t{1} << 41; }, "seq_k is");
  refused([](PlanSpec& s) { s.attention.mask.left = -2; }, "window_left is -2");
  refused([](PlanSpec& s) { s.attention.mask.right = -2; }, "window_right is -2");
  refused([](PlanSpec& s) { s.attention.scale = 1.0f / 0.0f; }, "scale is inf");
  refused([](PlanSpec& s) { s.attention.slot_rounds = -1; }, "slot_rounds is -1");
  refused([](PlanSpec& s) { s.tiling.bm = 24; }, "bm is 24");
  refused([](PlanSpec& s) { s.tiling.chunk_rows = 0; }, "chunk_rows is 0");
  refused([](PlanSpec& s) { s.attention.seq_q = std::int64_t{1} << 40, s.tiling.bm = 1; }, "larger tiles");
  refused([](PlanSpec& s) { s.attention.seq_k = std::int64_t{1} << 30, s.tiling.chunk_rows = 1; }, "larger");
  refused([](PlanSpec& s) { s.topo = {1 << 10, 1 << 10}; }, "not possible");
  refused([](PlanSpec& s) { s.attention.heads = s.attention.batch = 1 << 20, s.attention.seq_q = 1 << 20; }, "2^52");
}

}  // namespace
}  // namespace mkernel
