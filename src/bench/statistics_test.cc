#include "bench/statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace mkernel::bench {
namespace {

TEST(Statistics, MedianIsTheMiddleOrTheMeanOfTheMiddleTwo) {
  EXPECT_EQ(median(std::vector<double>{3}), 3);
  EXPECT_EQ(median(std::vector<double>{5, 1, 3}), 3);
  EXPECT_EQ(median(std::vector<double>{4, 1, 3, 2}), 2.5);
}

TEST(Statistics, SpreadIsRangeOverMedian) {
  const Summary summary = summarise(std::vector<double>{1.0, 1.1, 0.9});
  EXPECT_DOUBLE_EQ(summary.median, 1.0);
  EXPECT_DOUBLE_EQ(summary.spread, (1.1 - 0.9) / 1.0);
  EXPECT_EQ(summarise(std::vector<double>{2, 2, 2}).spread, 0);
}

TEST(Statistics, RatioComparesWithBothNeighbours) {
  EXPECT_DOUBLE_EQ(paired_ratio(100, 100, 120), 1.1);
  // A clock that falls steadily does not show: ours lies between.
  EXPECT_DOUBLE_EQ(paired_ratio(100, 110, 120), 1.0);
}

TEST(Statistics, EveryContestantTakesPartOnceARound) {
  for (std::size_t count = 1; count < 10; ++count) {
    for (int round = 0; round < 12; ++round) {
      const std::vector<std::size_t> order = rotated_order(count, round);
      EXPECT_EQ(order.size(), count);
      const std::set<std::size_t> all(order.begin(), order.end());
      EXPECT_EQ(all.size(), count);
      EXPECT_EQ(*std::max_element(order.begin(), order.end()), count - 1);
    }
  }
  EXPECT_TRUE(rotated_order(0, 3).empty());
}

TEST(Statistics, NobodyFollowsTheSameNeighbourInNeighbouringRounds) {
  constexpr std::size_t kFirst = 99;
  const auto before = [](int round, std::size_t who) {
    const std::vector<std::size_t> order = rotated_order(5, round);
    const auto at = std::find(order.begin(), order.end(), who);
    return at == order.begin() ? kFirst : *(at - 1);
  };
  for (std::size_t who = 0; who < 5; ++who) {
    for (int round = 0; round < 4; ++round) {
      if (before(round, who) == kFirst) continue;
      EXPECT_NE(before(round, who), before(round + 1, who));
    }
  }
}

}  // namespace
}  // namespace mkernel::bench
