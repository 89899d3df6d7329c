#include "base/half.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace mkernel {
namespace {

constexpr std::uint64_t kSeed = 0x9e3779b97f4a7c15ull;

std::uint64_t next_random(std::uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// A second implementation that shares nothing with half.h: it knows a format by its field widths, decodes with ldexp
// in fp64, and rounds by searching the sorted list of all values.
struct Format {
  int mantissa_bits;
  int exponent_bits;
  std::vector<double> values;  // values[b] is the value of the non-negative pattern b; the last stands for infinity

  Format(int mantissa, int exponent) : mantissa_bits(mantissa), exponent_bits(exponent) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    for (int pattern = 0; pattern <= infinity(); ++pattern) {
      const int biased = pattern >> mantissa_bits;
      const int fraction = pattern & ((1 << mantissa_bits) - 1);
      // Where infinity stands, this is the value that one more exponent would have had: rounding treats it as such.
      values.push_back(biased == 0 ? std::ldexp(fraction, 1 - bias - mantissa_bits)
                                   : std::ldexp((1 << mantissa_bits) + fraction, biased - bias - mantissa_bits));
    }
  }

  int infinity() const { return ((1 << exponent_bits) - 1) << mantissa_bits; }

  std::uint16_t nearest(double value) const {
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude >= values.back()) return static_cast<std::uint16_t>(sign | infinity());
    const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
    const int high = static_cast<int>(above - values.begin());
    const int low = high - 1;
    // Exact: neighbours of at most 11 bits have a middle of at most 12.
    const double middle = (values[low] + values[high]) / 2;
    const bool up = magnitude > middle || (magnitude == middle && low % 2 == 1);
    return static_cast<std::uint16_t>(sign | (up ? high : low));
  }
};

const Format kBf16Format(7, 8);
const Format kFp16Format(10, 5);

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

void expect_decodes(const Format& format, float (*decode)(std::uint16_t)) {
  for (int pattern = 0; pattern < 65536; ++pattern) {
    const float value = decode(static_cast<std::uint16_t>(pattern));
    const int magnitude = pattern & 0x7fff;
    ASSERT_EQ(std::signbit(value), pattern >= 0x8000) << pattern;
    if (magnitude > format.infinity()) {
      ASSERT_TRUE(std::isnan(value)) << pattern;
      const std::uint32_t fraction = static_cast<std::uint32_t>(pattern & ((1 << format.mantissa_bits) - 1));
      ASSERT_EQ(bits_of(value) & 0x007fffffu, fraction << (23 - format.mantissa_bits)) << pattern;
    } else if (magnitude == format.infinity()) {
      ASSERT_TRUE(std::isinf(value)) << pattern;
    } else {
      ASSERT_EQ(std::fabs(static_cast<double>(value)), format.values[magnitude]) << pattern;
    }
  }
}

TEST(Half, EveryBf16PatternDecodesToItsValue) { expect_decodes(kBf16Format, bf16_to_float); }
TEST(Half, EveryFp16PatternDecodesToItsValue) { expect_decodes(kFp16Format, fp16_to_float); }

TEST(Half, EveryPatternSurvivesTheWayUpAndDown) {
  for (int pattern = 0; pattern < 65536; ++pattern) {
    const std::uint16_t bits = static_cast<std::uint16_t>(pattern);
    ASSERT_EQ(float_to_bf16(bf16_to_float(bits)), bits);
    ASSERT_EQ(float_to_fp16(fp16_to_float(bits)), bits);
    if (!std::isnan(bf16_to_float(bits))) {
      ASSERT_EQ(double_to_bf16(bf16_to_float(bits)), bits);
    }
    if (!std::isnan(fp16_to_float(bits))) {
      ASSERT_EQ(double_to_fp16(fp16_to_float(bits)), bits);
    }
  }
}

// Each middle between neighbours (the last: between the largest finite value and overflow) and the numbers beside it.
template <class Real>
void expect_ties_round_to_even(const Format& format, std::uint16_t (*encode)(Real)) {
  const Real infinity = std::numeric_limits<Real>::infinity();
  for (int low = 0; low < format.infinity(); ++low) {
    const double middle = (format.values[low] + format.values[low + 1]) / 2;
    const Real tie = static_cast<Real>(middle);
    ASSERT_EQ(static_cast<double>(tie), middle);
    for (const Real value : {tie, std::nextafter(tie, Real(0)), std::nextafter(tie, infinity)}) {
      ASSERT_EQ(encode(value), format.nearest(value)) << value;
      ASSERT_EQ(encode(-value), format.nearest(-value)) << value;
    }
    ASSERT_EQ(encode(tie) & 1, 0) << tie;
  }
}

TEST(Half, EveryTieRoundsToEvenAndItsNeighboursToTheNearest) {
  expect_ties_round_to_even<float>(kBf16Format, float_to_bf16);
  expect_ties_round_to_even<float>(kFp16Format, float_to_fp16);
  expect_ties_round_to_even<double>(kBf16Format, double_to_bf16);
  expect_ties_round_to_even<double>(kFp16Format, double_to_fp16);
}

TEST(Half, RandomFloatsRoundToTheNearest) {
  std::uint64_t state = kSeed;
  for (int i = 0; i < 300'000; ++i) {
    const float any = std::bit_cast<float>(static_cast<std::uint32_t>(next_random(state) >> 32));
    // Uniform bit patterns seldom fall in fp16's range: a second number has its exponent, and a little on both sides.
    const float near = std::ldexp(1.0f + static_cast<float>(next_random(state) >> 41) * 0x1p-23f,
                                  static_cast<int>(next_random(state) % 48) - 30);
    for (const float value : {any, near, -near}) {
      if (std::isnan(value)) continue;
      ASSERT_EQ(float_to_bf16(value), kBf16Format.nearest(value)) << value;
      ASSERT_EQ(float_to_fp16(value), kFp16Format.nearest(value)) << value;
    }
  }
}

TEST(Half, RandomDoublesRoundOnceNotTwice) {
  std::uint64_t state = kSeed;
  for (int i = 0; i < 150'000; ++i) {
    const double any = std::bit_cast<double>(next_random(state));
    const double fraction = 1.0 + static_cast<double>(next_random(state) >> 12) * 0x1p-52;
    const double near_fp16 = std::ldexp(fraction, static_cast<int>(next_random(state) % 48) - 30);
    const double near_bf16 = std::ldexp(fraction, static_cast<int>(next_random(state) % 300) - 160);
    for (const double value : {any, near_fp16, -near_fp16, near_bf16, -near_bf16}) {
      if (std::isnan(value)) continue;
      ASSERT_EQ(double_to_bf16(value), kBf16Format.nearest(value)) << value;
      ASSERT_EQ(double_to_fp16(value), kFp16Format.nearest(value)) << value;
    }
  }
  // Just above a tie of bf16, by less than a float can tell: two roundings to nearest would give 1.
  EXPECT_EQ(double_to_bf16(1.0 + 0x1p-8 + 0x1p-40), 0x3f81);
  EXPECT_EQ(float_to_bf16(static_cast<float>(1.0 + 0x1p-8 + 0x1p-40)), 0x3f80);
}

TEST(Half, BoundaryValuesAreRight) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(float_to_bf16(0.0f), 0x0000);
  EXPECT_EQ(float_to_bf16(-0.0f), 0x8000);
  EXPECT_EQ(float_to_fp16(0.0f), 0x0000);
  EXPECT_EQ(float_to_fp16(-0.0f), 0x8000);
  EXPECT_EQ(float_to_bf16(infinity), 0x7f80);
  EXPECT_EQ(float_to_bf16(-infinity), 0xff80);
  EXPECT_EQ(float_to_fp16(infinity), 0x7c00);
  EXPECT_EQ(float_to_fp16(-infinity), 0xfc00);
  EXPECT_EQ(float_to_bf16(largest), 0x7f80);
  EXPECT_EQ(float_to_fp16(largest), 0x7c00);
  EXPECT_EQ(float_to_bf16(smallest), 0x0000);
  EXPECT_EQ(float_to_bf16(-smallest), 0x8000);
  EXPECT_EQ(float_to_bf16(0x1p-133f), 0x0001);
  EXPECT_EQ(float_to_bf16(0x1p-134f), 0x0000);
  EXPECT_EQ(float_to_fp16(0x1p-24f), 0x0001);
  EXPECT_EQ(float_to_fp16(0x1p-25f), 0x0000);
  EXPECT_EQ(float_to_fp16(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(float_to_fp16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_fp16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7c00);
  EXPECT_EQ(double_to_bf16(1e300), 0x7f80);
  EXPECT_EQ(double_to_fp16(-1e300), 0xfc00);
  EXPECT_EQ(double_to_bf16(-5e-324), 0x8000);
  EXPECT_EQ(double_to_fp16(5e-324), 0x0000);
}

TEST(Half, EveryNanStaysNanWithItsSignAndTopPayloadBits) {
  std::uint64_t state = kSeed;
  for (int i = 0; i < 1'000'000; ++i) {
    // Small payloads are the ones that truncation would lose.
    const std::uint32_t payload = i < 100'000 ? static_cast<std::uint32_t>(i + 1)
                                              : std::max(1u, static_cast<std::uint32_t>(next_random(state)) >> 9);
    const std::uint32_t sign = i % 2 == 0 ? 0u : 0x80000000u;
    const float value = std::bit_cast<float>(sign | 0x7f800000u | payload);
    const std::uint32_t top_bf16 = payload >> 16;
    const std::uint32_t top_fp16 = payload >> 13;
    ASSERT_EQ(float_to_bf16(value), (sign >> 16) | 0x7f80u | (top_bf16 != 0 ? top_bf16 : 0x40u)) << payload;
    ASSERT_EQ(float_to_fp16(value), (sign >> 16) | 0x7c00u | (top_fp16 != 0 ? top_fp16 : 0x200u)) << payload;
  }
  for (const std::uint64_t payload : {1ull, 1ull << 28, 1ull << 51, (1ull << 52) - 1}) {
    const double value = std::bit_cast<double>(0xfff0000000000000ull | payload);
    EXPECT_GT(double_to_bf16(value), 0xff80) << payload;
    EXPECT_GT(double_to_fp16(value), 0xfc00) << payload;
  }
}

TEST(Half, WorksInConstantExpressions) {
  static_assert(float_to_bf16(1.0f) == 0x3f80);
  static_assert(bf16_to_float(0xc000) == -2.0f);
  static_assert(float_to_fp16(-2.0f) == 0xc000);
  static_assert(float_to_fp16(std::numeric_limits<float>::infinity()) == 0x7c00);
  static_assert(float_to_fp16(std::numeric_limits<float>::quiet_NaN()) == 0x7e00);
  static_assert(fp16_to_float(0x0001) == 0x1p-24f);
  static_assert(double_to_bf16(1e300) == 0x7f80);
}

// A loop like the ones over matrices, which compilers turn into vector code, gives what the single call gives.
TEST(Half, LoopsGiveWhatSingleCallsGive) {
  std::vector<std::uint16_t> patterns(65536);
  std::vector<float> bf16(65536), fp16(65536);
  for (int i = 0; i < 65536; ++i) patterns[i] = static_cast<std::uint16_t>(i);
  for (int i = 0; i < 65536; ++i) bf16[i] = bf16_to_float(patterns[i]);
  for (int i = 0; i < 65536; ++i) fp16[i] = fp16_to_float(patterns[i]);
  std::vector<std::uint16_t> bf16_back(65536), fp16_back(65536);
  for (int i = 0; i < 65536; ++i) bf16_back[i] = float_to_bf16(bf16[i]);
  for (int i = 0; i < 65536; ++i) fp16_back[i] = float_to_fp16(fp16[i]);
  EXPECT_EQ(bf16_back, patterns);
  EXPECT_EQ(fp16_back, patterns);
}

}  // namespace
}  // namespace mkernel
