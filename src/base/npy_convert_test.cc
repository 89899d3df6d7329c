#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "base/half.h"
#include "base/npy.h"

namespace mkernel {
namespace {

template <class T>
NpyMatrix matrix_of(NpyType type, const std::vector<T>& values) {
  NpyMatrix matrix{1, static_cast<std::int64_t>(values.size()), type, {}, "a.npy"};
  matrix.data.resize(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(matrix.data.data(), values.data(), matrix.data.size());
  return matrix;
}

template <class T>
std::vector<T> converted(const NpyMatrix& matrix, Dtype dtype, U2Meaning u2 = U2Meaning::kUnknown) {
  const Result<std::vector<std::byte>> bytes = npy_to_dtype(matrix, dtype, u2);
  EXPECT_TRUE(bytes);
  EXPECT_EQ(static_cast<std::int64_t>(bytes->size()), matrix.rows * matrix.cols * dtype_bytes(dtype));
  std::vector<T> values(bytes->size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes->data(), bytes->size());
  return values;
}

using Bits = std::vector<std::uint16_t>;
using Floats = std::vector<float>;

TEST(NpyConvert, SmallNumbersOfEveryTypeArriveExactlyInEveryType) {
  const Floats numbers = {-8, -1, 0, 1, 2, 100};
  Bits bf16, fp16;
  for (const float number : numbers) {
    bf16.push_back(float_to_bf16(number));
    fp16.push_back(float_to_fp16(number));
  }
  const NpyMatrix sources[] = {
      matrix_of<std::uint16_t>(NpyType::kF16, fp16),
      matrix_of<std::uint16_t>(NpyType::kBf16, bf16),
      matrix_of<float>(NpyType::kF32, numbers),
      matrix_of<double>(NpyType::kF64, {-8, -1, 0, 1, 2, 100}),
      matrix_of<std::uint16_t>(NpyType::kU16, bf16),
      matrix_of<std::int8_t>(NpyType::kI8, {-8, -1, 0, 1, 2, 100}),
      matrix_of<std::int32_t>(NpyType::kI32, {-8, -1, 0, 1, 2, 100}),
      matrix_of<std::int64_t>(NpyType::kI64, {-8, -1, 0, 1, 2, 100}),
  };
  static_assert(std::size(sources) == kNpyTypeCount);
  for (const NpyMatrix& source : sources) {
    SCOPED_TRACE(npy_descr(source.type));
    EXPECT_EQ(converted<std::uint16_t>(source, Dtype::kBf16, U2Meaning::kBf16Bits), bf16);
    EXPECT_EQ(converted<std::uint16_t>(source, Dtype::kFp16, U2Meaning::kBf16Bits), fp16);
    EXPECT_EQ(converted<float>(source, Dtype::kFp32, U2Meaning::kBf16Bits), numbers);
  }
}

TEST(NpyConvert, U2IsRefusedUnlessTheCallerSaysWhatItMeans) {
  const NpyMatrix matrix = matrix_of<std::uint16_t>(NpyType::kU16, {0x3f80});
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    const Result<std::vector<std::byte>> result = npy_to_dtype(matrix, dtype);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().kind, ErrorKind::kBadArgument);
    EXPECT_EQ(result.error().message.rfind("a.npy: the element type is '<u2'", 0), 0u) << result.error().message;
  }
}

TEST(NpyConvert, SameTypesKeepEveryBitPattern) {
  Bits patterns;
  for (int i = 0; i < 65536; ++i) patterns.push_back(static_cast<std::uint16_t>(i));
  EXPECT_EQ(converted<std::uint16_t>(matrix_of(NpyType::kBf16, patterns), Dtype::kBf16), patterns);
  EXPECT_EQ(converted<std::uint16_t>(matrix_of(NpyType::kF16, patterns), Dtype::kFp16), patterns);
  const NpyMatrix u2 = matrix_of(NpyType::kU16, patterns);
  EXPECT_EQ(converted<std::uint16_t>(u2, Dtype::kBf16, U2Meaning::kBf16Bits), patterns);
  const std::vector<std::uint32_t> words = {0x00000001, 0x80000000, 0x7f800001, 0xffc12345, 0x7f800000, 0xff7fffff};
  EXPECT_EQ(converted<std::uint32_t>(matrix_of(NpyType::kF32, words), Dtype::kFp32), words);
}

TEST(NpyConvert, MovingAMatrixOfTheSameTypeReusesItsMemory) {
  NpyMatrix matrix = matrix_of<float>(NpyType::kF32, {1, 2, 3});
  const std::byte* const memory = matrix.data.data();
  const Result<std::vector<std::byte>> result = npy_to_dtype(std::move(matrix), Dtype::kFp32);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->data(), memory);
  NpyMatrix other = matrix_of<float>(NpyType::kF32, {1, 2, 3});
  const Result<std::vector<std::byte>> narrow = npy_to_dtype(std::move(other), Dtype::kBf16);
  ASSERT_TRUE(narrow);
  EXPECT_EQ(narrow->size(), 6u);
}

TEST(NpyConvert, DoublesAreRoundedOnce) {
  // Each is a tie of the target plus less than a float can hold: rounding to float first would make it the tie.
  const NpyMatrix matrix = matrix_of<double>(
      NpyType::kF64, {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-11 + 0x1p-40, 1e300, -1e300, 5e-324, -0.0, 65519.999999999});
  EXPECT_EQ(converted<std::uint16_t>(matrix, Dtype::kBf16), (Bits{0x3f81, 0x3f80, 0x7f80, 0xff80, 0, 0x8000, 0x4780}));
  EXPECT_EQ(converted<std::uint16_t>(matrix, Dtype::kFp16), (Bits{0x3c04, 0x3c01, 0x7c00, 0xfc00, 0, 0x8000, 0x7bff}));
  const Floats floats = converted<float>(matrix, Dtype::kFp32);
  EXPECT_EQ(floats[0], 1 + 0x1p-8f);
  EXPECT_EQ(floats[2], std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::signbit(floats[5]));
}

TEST(NpyConvert, LongIntegersAreRoundedOnce) {
  // Ties of bf16 (8 bits), fp32 (24 bits) and one more in the last place, which a double would drop.
  const std::int64_t bf16_tie = (std::int64_t{1} << 62) + (std::int64_t{1} << 54);
  const std::int64_t fp32_tie = (std::int64_t{1} << 62) + (std::int64_t{1} << 38);
  const NpyMatrix matrix =
      matrix_of<std::int64_t>(NpyType::kI64, {bf16_tie, bf16_tie + 1, -bf16_tie - 1, fp32_tie, fp32_tie + 1,
                                              -fp32_tie - 1, INT64_MAX, INT64_MIN, (std::int64_t{1} << 53) + 1});
  EXPECT_EQ(converted<std::uint16_t>(matrix, Dtype::kBf16),
            (Bits{0x5e80, 0x5e81, 0xde81, 0x5e80, 0x5e80, 0xde80, 0x5f00, 0xdf00, 0x5a00}));
  EXPECT_EQ(converted<std::uint16_t>(matrix, Dtype::kFp16),
            (Bits{0x7c00, 0x7c00, 0xfc00, 0x7c00, 0x7c00, 0xfc00, 0x7c00, 0xfc00, 0x7c00}));
  const Floats above = {std::nextafter(0x1p62f, 0x1p63f)};
  const Floats floats = converted<float>(matrix, Dtype::kFp32);
  EXPECT_EQ(floats[3], 0x1p62f);
  EXPECT_EQ(floats[4], above[0]);
  EXPECT_EQ(floats[5], -above[0]);
  EXPECT_EQ(floats[6], 0x1p63f);
  EXPECT_EQ(floats[7], -0x1p63f);
}

TEST(NpyConvert, LongIntegersGoToTheNearestFloatLikeTheProcessorsOwnConversion) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  std::vector<std::int64_t> values;
  for (int i = 0; i < 100'000; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    values.push_back(static_cast<std::int64_t>(state) >> (i % 40));
  }
  const Floats floats = converted<float>(matrix_of(NpyType::kI64, values), Dtype::kFp32);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(floats[i], static_cast<float>(values[i])) << values[i];
}

TEST(NpyConvert, IntegersOf32BitsAreRoundedOnce) {
  const NpyMatrix matrix =
      matrix_of<std::int32_t>(NpyType::kI32, {0x40400000, 0x40400001, INT32_MAX, INT32_MIN, 65519, 65520, 2049, 2051});
  EXPECT_EQ(converted<std::uint16_t>(matrix, Dtype::kBf16),
            (Bits{0x4e80, 0x4e81, 0x4f00, 0xcf00, 0x4780, 0x4780, 0x4500, 0x4500}));
  EXPECT_EQ(converted<std::uint16_t>(matrix, Dtype::kFp16),
            (Bits{0x7c00, 0x7c00, 0x7c00, 0xfc00, 0x7bff, 0x7c00, 0x6800, 0x6802}));
  EXPECT_EQ(converted<float>(matrix, Dtype::kFp32)[2], 0x1p31f);
}

TEST(NpyConvert, NanStaysNanAndInfinityStaysInfinityInEveryDirection) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const NpyMatrix sources[] = {
      matrix_of<double>(NpyType::kF64, {nan, infinity, -infinity}),
      matrix_of<float>(NpyType::kF32, {std::bit_cast<float>(0x7f800001u), static_cast<float>(infinity),
                                       static_cast<float>(-infinity)}),
      matrix_of<std::uint16_t>(NpyType::kF16, {0x7c01, 0x7c00, 0xfc00}),
      matrix_of<std::uint16_t>(NpyType::kBf16, {0x7f81, 0x7f80, 0xff80}),
  };
  for (const NpyMatrix& source : sources) {
    SCOPED_TRACE(npy_descr(source.type));
    const Bits bf16 = converted<std::uint16_t>(source, Dtype::kBf16);
    const Bits fp16 = converted<std::uint16_t>(source, Dtype::kFp16);
    const Floats floats = converted<float>(source, Dtype::kFp32);
    EXPECT_GT(bf16[0] & 0x7fff, 0x7f80);
    EXPECT_EQ(bf16[1], 0x7f80);
    EXPECT_EQ(bf16[2], 0xff80);
    EXPECT_GT(fp16[0] & 0x7fff, 0x7c00);
    EXPECT_EQ(fp16[1], 0x7c00);
    EXPECT_EQ(fp16[2], 0xfc00);
    EXPECT_TRUE(std::isnan(floats[0]));
    EXPECT_EQ(floats[1], static_cast<float>(infinity));
    EXPECT_EQ(floats[2], static_cast<float>(-infinity));
  }
}

TEST(NpyConvert, NoElementsGiveNoBytes) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    EXPECT_TRUE(converted<float>(NpyMatrix{0, 7, NpyType::kF64, {}, "a.npy"}, dtype).empty());
  }
}

TEST(NpyConvert, AResultIsWrittenAsTheTypeThatNamesItsDtype) {
  EXPECT_EQ(npy_descr(npy_type_of(Dtype::kBf16)), "<V2");
  EXPECT_EQ(npy_descr(npy_type_of(Dtype::kFp16)), "<f2");
  EXPECT_EQ(npy_descr(npy_type_of(Dtype::kFp32)), "<f4");
}

}  // namespace
}  // namespace mkernel
