#include "bench/link.h"

#include <gtest/gtest.h>

namespace mkernel::bench {
namespace {

using Kind = LinkRule::Kind;

TEST(BenchLink, ScaledIsTheRanksShareOfAPort) {
  const LinkRate rate = resolve_link({Kind::kScaled, 0, 5}, 16, 132, 1, 1);
  EXPECT_DOUBLE_EQ(rate.gigabytes_per_s, 50.0 * 16 / 132);
  EXPECT_EQ(rate.latency_us, 5);
}

TEST(BenchLink, BalancedWireTakesAsLongAsTheGemm) {
  const LinkRate rate = resolve_link({Kind::kBalanced, 0, 5}, 16, 132, 8'000'000, 800);
  EXPECT_DOUBLE_EQ(rate.gigabytes_per_s, 10);  // 8 MB in 800 us
  EXPECT_DOUBLE_EQ(wire_us(rate, 8'000'000), 805);
}

TEST(BenchLink, BalancedWithoutBytesIsUnlimited) {
  EXPECT_EQ(resolve_link({Kind::kBalanced, 0, 5}, 16, 132, 0, 800).gigabytes_per_s, 0);
  EXPECT_EQ(resolve_link({Kind::kBalanced, 0, 5}, 16, 132, 100, 0).gigabytes_per_s, 0);
}

TEST(BenchLink, NoneAndFixedAreWhatTheySay) {
  EXPECT_EQ(resolve_link({Kind::kNone, 7, 5}, 16, 132, 1, 1).gigabytes_per_s, 0);
  EXPECT_EQ(resolve_link({Kind::kNone, 7, 5}, 16, 132, 1, 1).latency_us, 0);
  const LinkRate fixed = resolve_link({Kind::kFixed, 7, 3}, 16, 132, 1, 1);
  EXPECT_EQ(fixed.gigabytes_per_s, 7);
  EXPECT_EQ(fixed.latency_us, 3);
  EXPECT_EQ(link_text({Kind::kFixed, 7.5, 3}), "7.5:3");
}

TEST(BenchLink, WireTimeIsBytesOverRatePlusLatency) {
  EXPECT_DOUBLE_EQ(wire_us({50, 2}, 50'000), 3);
  EXPECT_EQ(wire_us({0, 2}, 50'000), 2);  // no limit
  EXPECT_EQ(wire_us({50, 2}, 0), 0);      // nothing to send, nothing to wait for
}

TEST(BenchLink, FloorIsTheLargerOfFasterGemmAndSlowerCommunication) {
  EXPECT_EQ(floor_us(100, 110, 50, 60), 100);
  EXPECT_EQ(floor_us(120, 110, 50, 60), 110);
  EXPECT_EQ(floor_us(100, 110, 200, 60), 200);
  EXPECT_EQ(floor_us(100, 110, 0, 300), 300);
}

}  // namespace
}  // namespace mkernel::bench
