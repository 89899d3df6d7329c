#include "plan/topology.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace mkernel {
namespace {

TEST(Split, PartsAreConsecutiveAndDifferByAtMostOne) {
  for (std::int32_t parts = 1; parts <= 24; ++parts) {
    for (std::int64_t total = 0; total <= 100; ++total) {
      const Split split{total, parts};
      std::int64_t at = 0;
      for (std::int32_t i = 0; i < parts; ++i) {
        ASSERT_EQ(split.begin(i), at) << total << " over " << parts;
        ASSERT_GE(split.size(i), total / parts);
        ASSERT_LE(split.size(i), split.max_size());
        ASSERT_LE(split.max_size() - split.size(i), 1);
        at += split.size(i);
      }
      ASSERT_EQ(at, total) << parts;
      ASSERT_EQ(split.max_size(), split.size(0));
    }
  }
}

TEST(Split, TheFirstPartsAreTheLargerOnes) {
  const Split split{10, 4};  // as numpy.array_split: 3, 3, 2, 2
  EXPECT_EQ(split.size(0), 3);
  EXPECT_EQ(split.size(1), 3);
  EXPECT_EQ(split.size(2), 2);
  EXPECT_EQ(split.begin(3), 8);
}

TEST(Split, TotalsBeyond32BitsAreDividedExactly) {
  const Split split{(std::int64_t{1} << 55) + 5, 1024};
  EXPECT_EQ(split.begin(1023) + split.size(1023), split.total);
  EXPECT_EQ(split.begin(5), 5 * ((std::int64_t{1} << 45) + 1));
}

TEST(Topology, RanksNodesAndGpusConvertBothWays) {
  const Topology topo{3, 5};
  EXPECT_EQ(topo.world(), 15);
  for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
    EXPECT_LT(topo.node_of(rank), 3);
    EXPECT_LT(topo.gpu_of(rank), 5);
    EXPECT_EQ(topo.rank_of(topo.node_of(rank), topo.gpu_of(rank)), rank);
  }
  EXPECT_EQ(topo.rank_of(1, 0), 5);
}

TEST(Topology, CeilDivRoundsUp) {
  EXPECT_EQ(ceil_div(0, 7), 0);
  EXPECT_EQ(ceil_div(1, 7), 1);
  EXPECT_EQ(ceil_div(7, 7), 1);
  EXPECT_EQ(ceil_div(8, 7), 2);
  static_assert(min_of(2, 3) == 2 && max_of(2, 3) == 3);
}

}  // namespace
}  // namespace mkernel
