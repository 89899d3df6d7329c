#include "plan/shard_groups.h"

#include <gtest/gtest.h>

namespace mkernel {
namespace {

// Sizes of groups that a plan may have: up to a node's GPUs, or those of several nodes.
template <class F>
void for_each_grouping(F f) {
  for (std::int32_t nodes = 1; nodes <= 5; ++nodes) {
    for (std::int32_t gpus = 1; gpus <= 8; ++gpus) {
      for (std::int32_t shards = 1; shards <= gpus; ++shards) f(ShardGroups{{nodes, gpus}, shards});
      for (std::int32_t run = 2; run <= nodes; ++run) f(ShardGroups{{nodes, gpus}, run * gpus});
    }
  }
}

TEST(ShardGroups, FollowEachOtherAndHoldEveryShardOnce) {
  for_each_grouping([](const ShardGroups& groups) {
    std::int32_t next = 0;
    for (std::int32_t run = 0; run < groups.runs(); ++run) {
      for (std::int32_t i = 0; i < groups.per_run(); ++i) {
        const ShardGroup group = groups.group(run, i);
        EXPECT_EQ(group.first, next);
        EXPECT_GE(group.count(), 1);
        EXPECT_LE(group.count(), groups.shards);
        next = group.end;
      }
    }
    EXPECT_EQ(next, groups.topo.world());
    EXPECT_EQ(groups.group(0, 0).count(), groups.shards);  // none is larger
  });
}

TEST(ShardGroups, AreFoundByTheRanksInThem) {
  for_each_grouping([](const ShardGroups& groups) {
    for (std::int32_t rank = 0; rank < groups.topo.world(); ++rank) EXPECT_TRUE(groups.holding(rank).contains(rank));
  });
}

// Who signals a group names its first rank and how many of the node follow, or the whole node.
TEST(ShardGroups, AreOfOneNodeOrOfWholeOnes) {
  for_each_grouping([](const ShardGroups& groups) {
    for (std::int32_t rank = 0; rank < groups.topo.world(); ++rank) {
      const ShardGroup group = groups.holding(rank);
      const bool whole = groups.topo.gpu_of(group.first) == 0 && group.end % groups.topo.gpus == 0;
      EXPECT_TRUE(whole || groups.topo.node_of(group.first) == groups.topo.node_of(group.end - 1));
    }
  });
}

}  // namespace
}  // namespace mkernel
