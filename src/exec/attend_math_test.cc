#include "exec/attend_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "exec/attention_problem.h"
#include "plan/test_attention_spec.h"

namespace mkernel {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(ExpOfNegative, IsAsExactAsStated) {
  double worst = 0;
  for (double x = -87; x <= 0; x += 0.000983) {
    const auto argument = static_cast<float>(x);
    const double want = std::exp(static_cast<double>(argument));
    worst = std::max(worst, std::abs(exp_of_negative(argument) - want) / want);
  }
  EXPECT_LT(worst, 0x1p-22);
  EXPECT_EQ(exp_of_negative(0), 1.0f);
  EXPECT_EQ(exp_of_negative(-87.1f), 0.0f);
  EXPECT_EQ(exp_of_negative(-kInfinity), 0.0f);
  EXPECT_TRUE(std::isnan(exp_of_negative(std::nanf(""))));
}

// A tile of one row over `scores.size()` keys; dim is 8, q = (1, 0, ...), so that k's first column is the score.
struct OneRow {
  explicit OneRow(std::vector<float> scores) : keys(static_cast<std::int64_t>(scores.size())), k(8 * scores.size()) {
    for (std::size_t i = 0; i < scores.size(); ++i) k[8 * i] = scores[i];
    v.assign(8 * scores.size(), 1.0f);
    tile.q = {q, Dtype::kFp32, 1, 8, 8, 1};
    tile.k = {k.data(), Dtype::kFp32, keys, 8, 8, 1};
    tile.v = {v.data(), Dtype::kFp32, keys, 8, 8, 1};
    range = {0, keys};
    tile.ranges = &range;
    tile.o = {o, Dtype::kFp32, 1, 8, 8, 1};
    tile.lse = {&lse, Dtype::kFp32, 1, 1, 1, 1};
  }
  void run() {
    AttendScratch scratch(1, 8);
    attend_tile(tile, scratch);
  }

  std::int64_t keys;
  float q[8] = {1};
  std::vector<float> k, v;
  KeyRange range;
  float o[8] = {};
  float lse = 0;
  AttendTile tile;
};

TEST(AttendTile, ARowThatSeesNothingGivesZeroAndMinusInfinity) {
  OneRow row({1, 2, 3});
  row.range = {2, 2};
  row.run();
  for (const float value : row.o) EXPECT_EQ(value, 0.0f);
  EXPECT_EQ(row.lse, -kInfinity);
  OneRow none(std::vector<float>{});
  none.run();
  EXPECT_EQ(none.o[0], 0.0f);
  EXPECT_EQ(none.lse, -kInfinity);
}

TEST(AttendTile, ScoresOfTenThousandAreNoProblem) {
  OneRow row({10000, -10000, 10000, 9999});
  row.run();
  EXPECT_NEAR(row.o[0], 1.0f, 1e-6);
  EXPECT_NEAR(row.lse, 10000 + std::log(2 + std::exp(-1.0)), 2e-3);
  OneRow rising({-10000, 0, 10000});
  std::fill(rising.v.begin(), rising.v.end(), 0.0f);
  rising.v[16] = 3;
  rising.run();
  EXPECT_EQ(rising.o[0], 3.0f);
  EXPECT_EQ(rising.lse, 10000.0f);
}

TEST(AttendTile, ScoresOfMinusInfinityCountNothingAndNaNsStay) {
  OneRow row({-kInfinity, -kInfinity});
  row.run();
  EXPECT_EQ(row.o[0], 0.0f);
  EXPECT_EQ(row.lse, -kInfinity);
  OneRow some({-kInfinity, 5, -kInfinity});
  some.run();
  EXPECT_EQ(some.o[0], 1.0f);
  EXPECT_EQ(some.lse, 5.0f);
  OneRow bad({1, std::nanf(""), 2});
  bad.run();
  EXPECT_TRUE(std::isnan(bad.o[0]));
  EXPECT_TRUE(std::isnan(bad.lse));
}

// Parked and taken up again between blocks, the state gives the bits of one uninterrupted run.
TEST(AttendTile, ParkingChangesNoBit) {
  std::vector<float> scores(3 * kAttendKeys);
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = std::sin(static_cast<float>(i)) * 20;
  OneRow whole(scores);
  for (std::size_t i = 0; i < whole.v.size(); ++i) whole.v[i] = std::cos(static_cast<float>(i));
  whole.run();
  OneRow parts(scores);
  parts.v = whole.v;
  std::vector<float> state(8 + 2);
  AttendScratch scratch(1, 8);
  const KeyRange range{0, kAttendKeys};
  for (int part = 0; part < 3; ++part) {
    AttendTile tile = parts.tile;
    tile.k = {parts.k.data() + part * kAttendKeys * 8, Dtype::kFp32, kAttendKeys, 8, 8, 1};
    tile.v = {parts.v.data() + part * kAttendKeys * 8, Dtype::kFp32, kAttendKeys, 8, 8, 1};
    tile.ranges = &range;
    tile.resume = part > 0 ? state.data() : nullptr;
    tile.park = part < 2 ? state.data() : nullptr;
    attend_tile(tile, scratch);
  }
  EXPECT_EQ(std::memcmp(parts.o, whole.o, sizeof whole.o), 0);
  EXPECT_EQ(parts.lse, whole.lse);
}

// The reference refuses results that are wrong, each in its own way.
TEST(AttentionReference, WrongResultsAreNotAccepted) {
  PlanSpec spec = test::make_attention_spec({1, 1}, 40);
  spec.dtype = spec.partial = Dtype::kFp32;
  spec.attention.mask.causal = true;
  spec.attention.scale = 0.3f;
  const std::vector<std::int64_t> rows{0, 7, 39};
  std::vector<float> q(320), k(320), v(320), o(320);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(3 * i));
    k[i] = std::cos(static_cast<float>(5 * i));
    v[i] = std::sin(static_cast<float>(7 * i + 1));
  }
  std::vector<float> lse(40);
  AttendScratch scratch(40, 8);
  std::vector<KeyRange> ranges;
  for (std::int64_t i = 0; i < 40; ++i) ranges.push_back({0, i + 1});
  AttendTile tile;
  tile.q = {q.data(), Dtype::kFp32, 40, 8, 8, 1};
  tile.k = {k.data(), Dtype::kFp32, 40, 8, 8, 1};
  tile.v = {v.data(), Dtype::kFp32, 40, 8, 8, 1};
  tile.ranges = ranges.data();
  tile.scale = 0.3f;
  tile.o = {o.data(), Dtype::kFp32, 40, 8, 8, 1};
  tile.lse = {lse.data(), Dtype::kFp32, 40, 1, 1, 1};
  attend_tile(tile, scratch);
  const auto ok = [&](const std::vector<float>& out, const std::vector<float>& logs, float scale = 0.3f) {
    PlanSpec asked = spec;
    asked.attention.scale = scale;
    return check_attention_rows(asked, {q.data(), k.data(), v.data(), out.data(), logs.data(), {}}, rows).ok;
  };
  EXPECT_TRUE(ok(o, lse));
  EXPECT_FALSE(ok(o, lse, 0.301f));
  std::vector<float> off = o;
  off[7 * 8 + 3] += 1e-4f;
  EXPECT_FALSE(ok(off, lse));
  off = o;
  off[39 * 8] = std::nanf("");
  EXPECT_FALSE(ok(off, lse));
  std::vector<float> logs = lse;
  logs[39] += 1e-3f;
  EXPECT_FALSE(ok(o, logs));
  EXPECT_FALSE(ok(std::vector<float>(320), lse));
}

}  // namespace
}  // namespace mkernel
