#include "plan/ring_attention_backward.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "plan/attention_tiling.h"
#include "plan/operands.h"
#include "plan/print.h"
#include "plan/test_attention_spec.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

using test::make_backward_spec;

TEST(RingAttentionBackwardPlan, AWorldOfOneComputesAndDoesNothingElse) {
  const Plan plan(make_backward_spec({1, 1}, 20, {}, 32, 8, 7));
  EXPECT_EQ(plan.lanes(Role::kIntra) + plan.lanes(Role::kSend) + plan.lanes(Role::kRecv), 0);
  EXPECT_EQ(plan.count(0, Role::kCompute, 0), 9);  // 3 tiles of queries, 3 of keys
  // One tile of each: nothing is kept.
  const Plan one(make_backward_spec({1, 1}, 8, {}, 32, 8, 8));
  EXPECT_EQ(one.buffer_elements(Buffer::kState) + one.buffer_elements(Buffer::kKeyState), 0);
}

// Every tile of queries meets every tile of keys once, for each head; the last task of each tile ends it.
TEST(RingAttentionBackwardPlan, EveryPairOfTilesMeetsOnce) {
  for (const std::int32_t bn : {1, 3, 5}) {
    for (const std::int64_t tokens : {24, 37, 61}) {
      AttentionSpec attention;
      attention.heads = 4;
      attention.kv_heads = 2;
      const Plan plan(make_backward_spec({1, 2}, tokens, attention, 5, 4, bn));
      std::map<std::pair<std::int64_t, std::int64_t>, int> meetings;  // row of Q, key
      std::map<std::int64_t, int> begun, ended;                       // by row of Q
      for (std::int64_t i = 0; i < plan.count(1, Role::kCompute, 0); ++i) {
        const Task task = plan.task(1, Role::kCompute, 0, i);
        if (task.block.empty()) continue;
        begun[task.block.row] += task.resume ? 0 : 1;
        ended[task.block.row] += task.park ? 0 : 1;
        for (std::int64_t k = 0; k < task.key_rows; ++k) ++meetings[{task.block.row, task.kv_position + k}];
      }
      EXPECT_EQ(meetings.size(), begun.size() * static_cast<std::size_t>(tokens));
      for (const auto& [pair, count] : meetings) EXPECT_EQ(count, 1) << pair.first << ", " << pair.second;
      for (const auto& [row, count] : begun) EXPECT_EQ(count, 1) << row;
      for (const auto& [row, count] : ended) EXPECT_EQ(count, 1) << row;
    }
  }
}

TEST(RingAttentionBackwardPlan, CountsDoNotDependOnTheMask) {
  AttentionSpec causal;
  causal.mask.causal = true;
  for (const Topology topo : {Topology{1, 3}, Topology{3, 1}, Topology{2, 2}}) {
    const Plan full(make_backward_spec(topo, 50));
    const Plan masked(make_backward_spec(topo, 50, causal));
    EXPECT_EQ(full.flag_count(), masked.flag_count());
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < full.lanes(role); ++lane) {
        ASSERT_EQ(full.count(1, role, lane), masked.count(1, role, lane));
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

// 4 nodes of 1: 10 tokens each, causal. Keys travel as in the forward: node n needs what nodes 0 to n - 1 hold, and
// sends as many gradients back, in the partial type.
TEST(RingAttentionBackwardPlan, GradientsTravelBackWhereKeysHaveCome) {
  AttentionSpec causal;
  causal.mask.causal = true;
  PlanSpec spec = make_backward_spec({4, 1}, 40, causal);
  const std::int64_t shard = 2 * 10 * 8 * 2;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(Plan(spec).network_bytes(rank), (3 - rank) * shard + rank * shard);
  }
  spec.partial = Dtype::kFp32;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(Plan(spec).network_bytes(rank), (3 - rank) * shard + rank * 2 * shard);
  }
}

// What few slots bound, and what they do not: node sums and arrivals have a place for every chunk of the rail.
TEST(RingAttentionBackwardPlan, FewSlotsBoundChunksSumsAndParts) {
  const auto elements = [](std::int32_t nodes, Buffer buffer) {
    AttentionSpec attention;
    attention.slot_rounds = 2;
    attention.heads = 2;
    return Plan(make_backward_spec({nodes, 2}, nodes * 80, attention)).buffer_elements(buffer);
  };
  for (const Buffer buffer : {Buffer::kKv, Buffer::kKeyState, Buffer::kPartial}) {
    EXPECT_EQ(elements(2, buffer), elements(16, buffer));
    EXPECT_GT(elements(2, buffer), 0);
  }
  EXPECT_EQ(elements(16, Buffer::kNodePartial), 8 * elements(2, Buffer::kNodePartial));
}

TEST(RingAttentionBackwardPlan, EveryFlagNamesTheRankThatRaisesIt) {
  for (const Topology topo : {Topology{1, 3}, Topology{3, 1}, Topology{2, 2}, Topology{3, 2}}) {
    AttentionSpec attention;
    attention.slot_rounds = 1;
    const Plan plan(make_backward_spec(topo, topo.world() * 12, attention));
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

TEST(RingAttentionBackwardPlan, SpecsBeyondItsLimitsAreRefused) {
  PlanSpec spec = make_backward_spec({2, 2}, 100);
  ASSERT_TRUE(validate(spec).ok());
  spec.tiling.bn = 0;
  EXPECT_FALSE(validate(spec).ok());
  spec.tiling.bn = 1025;
  EXPECT_FALSE(validate(spec).ok());
  spec = make_backward_spec({2, 2}, std::int64_t{1} << 30, {}, 2048, 8, 1);
  const Status many = validate(spec);
  ASSERT_FALSE(many.ok());
  EXPECT_NE(many.error().message.find("larger"), std::string::npos) << many.error().message;
}

// A million tokens on 512 ranks still make a plan of its own accord.
TEST(RingAttentionBackwardPlan, LargeWorldsGetATilingThatFits) {
  PlanSpec spec = make_backward_spec({64, 8}, 1 << 20);
  spec.attention.heads = 32;
  spec.attention.kv_heads = 8;
  spec.attention.dim = 128;
  spec.tiling = choose_backward_tiling(spec);
  spec.attention.slot_rounds = choose_slot_rounds(spec);
  EXPECT_TRUE(validate(spec).ok());
  EXPECT_GE(spec.attention.slot_rounds, 2);
}

}  // namespace
}  // namespace mkernel
