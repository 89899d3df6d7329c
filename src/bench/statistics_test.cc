#include "bench/statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
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
      const std::vector<std::size_t> order = balanced_order(count, round);
      EXPECT_EQ(order.size(), count);
      const std::set<std::size_t> all(order.begin(), order.end());
      EXPECT_EQ(all.size(), count);
      EXPECT_EQ(*std::max_element(order.begin(), order.end()), count - 1);
    }
  }
  EXPECT_TRUE(balanced_order(0, 3).empty());
}

// Whom `who` comes after in each of the first `count` rounds, for those in which it is not the first.
std::map<std::size_t, int> seen_before(std::size_t who, std::size_t count) {
  std::map<std::size_t, int> seen;
  for (int round = 0; round < static_cast<int>(count); ++round) {
    const std::vector<std::size_t> order = balanced_order(count, round);
    const auto at = std::find(order.begin(), order.end(), who);
    if (at != order.begin()) ++seen[*(at - 1)];
  }
  return seen;
}

TEST(Statistics, NobodyKeepsTheNeighbourBeforeIt) {
  for (const std::size_t count : {2, 3, 4, 5, 8, 9, 10, 15, 16}) {
    SCOPED_TRACE(count);
    const int most = count % 2 == 0 ? 1 : 2;
    for (std::size_t who = 0; who < count; ++who) {
      for (const auto& [before, times] : seen_before(who, count)) {
        EXPECT_LE(times, most) << who << " comes after " << before;
      }
    }
  }
}

}  // namespace
}  // namespace mkernel::bench
