#include "exec/tile_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "base/half.h"
#include "exec/fill.h"

namespace mkernel {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};

// How a matrix lies in memory. `shift` moves it away from the start of the allocation, by elements.
enum class Layout { kRowMajor, kPadded, kTransposed, kSpread, kBackwards };
constexpr Layout kLayouts[] = {Layout::kRowMajor, Layout::kPadded, Layout::kTransposed, Layout::kSpread,
                               Layout::kBackwards};

class Matrix {
 public:
  Matrix(Dtype dtype, std::int64_t rows, std::int64_t cols, Layout layout = Layout::kRowMajor, std::int64_t shift = 0)
      : dtype_(dtype), rows_(rows), cols_(cols) {
    std::int64_t first = shift;
    switch (layout) {
      case Layout::kRowMajor: row_stride_ = cols; break;
      case Layout::kPadded: row_stride_ = cols + 3; break;
      case Layout::kTransposed:
        row_stride_ = 1;
        col_stride_ = rows + 1;
        break;
      case Layout::kSpread:
        row_stride_ = 2 * cols + 1;
        col_stride_ = 2;
        break;
      case Layout::kBackwards:
        row_stride_ = -cols;
        first += rows * cols;
        break;
    }
    const std::int64_t elements = 2 * (rows + 2) * (cols + 2) + shift;
    memory_.resize(static_cast<std::size_t>(elements * dtype_bytes(dtype)), kCanary);
    first_ = first * dtype_bytes(dtype);
  }

  OutMatrix out() { return {memory_.data() + first_, dtype_, rows_, cols_, row_stride_, col_stride_}; }
  ConstMatrix in() const { return {memory_.data() + first_, dtype_, rows_, cols_, row_stride_, col_stride_}; }

  std::uint32_t bits(std::int64_t i, std::int64_t j) const {
    std::uint32_t bits = 0;
    std::memcpy(&bits, at(i, j), static_cast<std::size_t>(dtype_bytes(dtype_)));
    return bits;
  }
  float value(std::int64_t i, std::int64_t j) const {
    const std::uint32_t b = bits(i, j);
    if (dtype_ == Dtype::kFp32) return std::bit_cast<float>(b);
    const auto half = static_cast<std::uint16_t>(b);
    return dtype_ == Dtype::kBf16 ? bf16_to_float(half) : fp16_to_float(half);
  }
  void set_bits(std::int64_t i, std::int64_t j, std::uint32_t bits) {
    std::memcpy(const_cast<std::uint8_t*>(at(i, j)), &bits, static_cast<std::size_t>(dtype_bytes(dtype_)));
  }
  void set(std::int64_t i, std::int64_t j, float value) {
    if (dtype_ == Dtype::kFp32) return set_bits(i, j, std::bit_cast<std::uint32_t>(value));
    set_bits(i, j, dtype_ == Dtype::kBf16 ? float_to_bf16(value) : float_to_fp16(value));
  }
  Matrix& fill(std::uint64_t seed, Fill kind) {
    fill_random(out(), seed, kind);
    return *this;
  }
  // Bytes that no element owns and that are no longer what they were.
  std::int64_t damaged_gaps() const {
    std::vector<std::uint8_t> gaps = memory_;
    const std::int64_t width = dtype_bytes(dtype_);
    for (std::int64_t i = 0; i < rows_; ++i) {
      for (std::int64_t j = 0; j < cols_; ++j) std::fill_n(gaps.data() + (at(i, j) - memory_.data()), width, kCanary);
    }
    return static_cast<std::int64_t>(gaps.size()) - std::count(gaps.begin(), gaps.end(), kCanary);
  }

 private:
  static constexpr std::uint8_t kCanary = 0xa5;

  const std::uint8_t* at(std::int64_t i, std::int64_t j) const {
    return memory_.data() + first_ + (i * row_stride_ + j * col_stride_) * dtype_bytes(dtype_);
  }

  Dtype dtype_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t row_stride_ = 0;
  std::int64_t col_stride_ = 1;
  std::int64_t first_ = 0;
  std::vector<std::uint8_t> memory_;  // from operator new: aligned to 16 bytes
};

// The number of elements of `x` whose bits differ from those of `y`.
std::int64_t differences(const Matrix& x, const Matrix& y) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < x.in().rows; ++i) {
    for (std::int64_t j = 0; j < x.in().cols; ++j) count += x.bits(i, j) != y.bits(i, j);
  }
  return count;
}

void gemm(const Matrix& a, const Matrix& b, Matrix& c) {
  TileScratch scratch(a.in().rows, b.in().cols, a.in().cols);
  const OutMatrix out = c.out();
  gemm_tile(a.in(), b.in(), &out, 1, scratch);
}

void reduce(const std::vector<ConstMatrix>& inputs, Matrix& sum) {
  TileScratch scratch(0, 0, 0);
  const OutMatrix out = sum.out();
  reduce_tile(inputs, &out, 1, scratch);
}

std::int64_t wrong_products(const Matrix& a, const Matrix& b, const Matrix& c) {
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < c.in().rows; ++i) {
    for (std::int64_t j = 0; j < c.in().cols; ++j) {
      std::int64_t sum = 0;
      for (std::int64_t p = 0; p < a.in().cols; ++p) sum += std::lround(a.value(i, p)) * std::lround(b.value(p, j));
      wrong += c.value(i, j) != static_cast<float>(sum);
    }
  }
  return wrong;
}

TEST(GemmTile, IntegerProductsAreExactForEverySizeTypeAndLayout) {
  const std::int64_t sizes[] = {1, 7, 8, 16, 17, 65};
  std::uint64_t seed = 0;
  for (const std::int64_t rows : sizes) {
    for (const std::int64_t cols : sizes) {
      for (const std::int64_t k : {1, 9, 64, 255, 256, 257, 600}) {
        const Dtype dtype = kDtypes[seed % 3];
        const Layout a_layout = kLayouts[seed % 5];
        const Layout b_layout = kLayouts[seed / 5 % 5];
        const Layout c_layout = kLayouts[seed / 25 % 5];
        const Matrix a = Matrix(dtype, rows, k, a_layout).fill(++seed, Fill::kInteger);
        const Matrix b = Matrix(dtype, k, cols, b_layout).fill(++seed, Fill::kInteger);
        Matrix c(Dtype::kFp32, rows, cols, c_layout);
        gemm(a, b, c);
        ASSERT_EQ(wrong_products(a, b, c), 0) << dtype_name(dtype) << " " << rows << "x" << cols << "x" << k;
        ASSERT_EQ(c.damaged_gaps(), 0);
      }
    }
  }
}

TEST(GemmTile, BitsDoNotDependOnStridesAlignmentOrScratch) {
  for (const Dtype dtype : kDtypes) {
    for (const auto [rows, cols, k] : {std::array{1, 40, 300}, {40, 1, 300}, {3, 5, 7}, {37, 61, 700}}) {
      const Matrix a0 = Matrix(dtype, rows, k).fill(1, Fill::kUniform);
      const Matrix b0 = Matrix(dtype, k, cols).fill(2, Fill::kUniform);
      Matrix c0(dtype, rows, cols);
      gemm(a0, b0, c0);
      TileScratch reused(rows + 9, cols + 30, k + 1);
      for (std::int64_t shift = 0; shift < 20; ++shift) {
        const Matrix a = Matrix(dtype, rows, k, kLayouts[shift % 5], shift).fill(1, Fill::kUniform);
        const Matrix b = Matrix(dtype, k, cols, kLayouts[shift / 2 % 5], shift / 3).fill(2, Fill::kUniform);
        Matrix c(dtype, rows, cols, kLayouts[shift / 4 % 5], shift);
        const OutMatrix out = c.out();
        gemm_tile(a.in(), b.in(), &out, 1, reused);
        ASSERT_EQ(differences(c, c0), 0) << dtype_name(dtype) << " " << rows << "x" << cols << " shift " << shift;
      }
    }
  }
}

TEST(GemmTile, BitsDoNotDependOnStridesForEveryBitPattern) {
  for (const Dtype dtype : kDtypes) {
    Matrix c0(Dtype::kFp32, 24, 32);
    gemm(Matrix(dtype, 24, 20).fill(3, Fill::kBits), Matrix(dtype, 20, 32).fill(4, Fill::kBits), c0);
    for (const Layout layout : kLayouts) {
      Matrix c(Dtype::kFp32, 24, 32, layout, 5);
      gemm(Matrix(dtype, 24, 20, layout, 3).fill(3, Fill::kBits), Matrix(dtype, 20, 32, layout, 1).fill(4, Fill::kBits),
           c);
      ASSERT_EQ(differences(c, c0), 0) << dtype_name(dtype) << " layout " << static_cast<int>(layout);
    }
  }
}

TEST(GemmTile, ThreadsWithTheirOwnScratchGetTheSameBits) {
  const Matrix a = Matrix(Dtype::kBf16, 48, 600).fill(1, Fill::kUniform);
  const Matrix b = Matrix(Dtype::kBf16, 600, 80).fill(2, Fill::kUniform);
  std::vector<Matrix> results(4, Matrix(Dtype::kFp32, 48, 80));
  std::vector<std::thread> threads;
  for (Matrix& c : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) gemm(a, b, c);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Matrix& c : results) EXPECT_EQ(differences(c, results[0]), 0);
}

TEST(GemmTile, RoundsTheSumOnceToNearestEven) {
  // Sums of 1 and two small terms, in units of half a bf16 step: 2^-8.
  const struct {
    float x, y, want;
  } cases[] = {
      {0x1p-8f, 0, 1},                             // tie: even is below
      {0x1p-8f, 0x1p-20f, 1 + 0x1p-7f},            // just above the tie; rounded twice it would be 1
      {0x1p-7f, 0x1p-8f, 1 + 0x1p-6f},             // tie: even is above
      {0x1p-7f, 0x1p-8f - 0x1p-16f, 1 + 0x1p-7f},  // just below the tie
  };
  for (const auto& c : cases) {
    Matrix a(Dtype::kFp32, 1, 3);
    Matrix b(Dtype::kFp32, 3, 1);
    Matrix out(Dtype::kBf16, 1, 1);
    a.set(0, 0, 1);
    a.set(0, 1, c.x);
    a.set(0, 2, c.y);
    for (int p = 0; p < 3; ++p) b.set(p, 0, 1);
    gemm(a, b, out);
    EXPECT_EQ(out.value(0, 0), c.want) << c.x << " " << c.y;
  }
}

TEST(GemmTile, EveryOutGetsTheSameSumRoundedToItsOwnType) {
  const Matrix a = Matrix(Dtype::kBf16, 20, 300).fill(1, Fill::kUniform);
  const Matrix b = Matrix(Dtype::kBf16, 300, 300).fill(2, Fill::kUniform);
  Matrix outs[] = {{Dtype::kFp32, 20, 300},
                   {Dtype::kBf16, 20, 300, Layout::kTransposed},
                   {Dtype::kBf16, 20, 300, Layout::kPadded},
                   {Dtype::kFp16, 20, 300, Layout::kSpread},
                   {Dtype::kBf16, 20, 300, Layout::kRowMajor, 7}};
  std::vector<OutMatrix> views;
  for (Matrix& out : outs) views.push_back(out.out());
  TileScratch scratch(20, 300, 300);
  gemm_tile(a.in(), b.in(), views.data(), static_cast<int>(views.size()), scratch);
  for (const Matrix& out : outs) EXPECT_EQ(out.damaged_gaps(), 0);
  for (int i = 0; i < 20; ++i) {
    for (int j = 0; j < 300; ++j) {
      for (const int o : {1, 2, 4}) ASSERT_EQ(outs[o].bits(i, j), float_to_bf16(outs[0].value(i, j)));
      ASSERT_EQ(outs[3].bits(i, j), float_to_fp16(outs[0].value(i, j)));
    }
  }
}

TEST(GemmTile, InnerSizeZeroGivesPositiveZeros) {
  for (const Dtype dtype : kDtypes) {
    Matrix c(dtype, 5, 6, Layout::kPadded);
    const OutMatrix out = c.out();
    TileScratch scratch(5, 6, 0);
    gemm_tile({nullptr, dtype, 5, 0, 0, 1}, {nullptr, dtype, 0, 6, 6, 1}, &out, 1, scratch);
    for (int i = 0; i < 5; ++i) {
      for (int j = 0; j < 6; ++j) EXPECT_EQ(c.bits(i, j), 0u);
    }
    EXPECT_EQ(c.damaged_gaps(), 0);
  }
}

TEST(GemmTile, NoRowsOrNoColumnsTouchesNoMemory) {
  TileScratch scratch(0, 0, 0);
  const OutMatrix no_rows{nullptr, Dtype::kBf16, 0, 6, 6, 1};
  gemm_tile({nullptr, Dtype::kBf16, 0, 9, 9, 1}, {nullptr, Dtype::kBf16, 9, 6, 6, 1}, &no_rows, 1, scratch);
  reduce_tile(std::vector<ConstMatrix>{{nullptr, Dtype::kBf16, 0, 6, 6, 1}}, &no_rows, 1, scratch);
  copy_tile({nullptr, Dtype::kBf16, 0, 6, 6, 1}, &no_rows, 1);
  const OutMatrix no_cols{nullptr, Dtype::kBf16, 6, 0, 0, 1};
  gemm_tile({nullptr, Dtype::kBf16, 6, 9, 9, 1}, {nullptr, Dtype::kBf16, 9, 0, 0, 1}, &no_cols, 1, scratch);
  reduce_tile(std::vector<ConstMatrix>{{nullptr, Dtype::kBf16, 6, 0, 0, 1}}, &no_cols, 1, scratch);
  copy_tile({nullptr, Dtype::kBf16, 6, 0, 0, 1}, &no_cols, 1);
}

// What reference.cc counts on: a large sum does not swallow the terms of later panels, whichever way Eigen takes for
// the shape. Terms are 1/16, so that even 16 of them vanish beside 2^24.
TEST(GemmTile, LaterPanelsAreSummedApart) {
  for (const auto& [rows, cols] : {std::pair{1, 1}, {1, 40}, {40, 1}, {1, 200}, {200, 1}, {3, 2}, {24, 32}}) {
    const std::int64_t k = 9 * kGemmPanelK;
    Matrix a(Dtype::kFp32, rows, k);
    Matrix b(Dtype::kFp32, k, cols);
    for (std::int64_t p = 0; p < k; ++p) {
      for (std::int64_t i = 0; i < rows; ++i) a.set(i, p, p == 0 ? 0x1p24f : 0x1p-4f);
      for (std::int64_t j = 0; j < cols; ++j) b.set(p, j, 1);
    }
    Matrix c(Dtype::kFp32, rows, cols);
    gemm(a, b, c);
    const float panel = 0x1p-4f * kGemmPanelK;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        ASSERT_GE(c.value(i, j), 0x1p24f + 8 * panel) << rows << "x" << cols;
        ASSERT_LE(c.value(i, j), 0x1p24f + 9 * panel) << rows << "x" << cols;
      }
    }
  }
}

TEST(GemmTile, SpecialValuesStayInTheirRowAndColumn) {
  Matrix a = Matrix(Dtype::kBf16, 19, 33).fill(1, Fill::kUniform);
  Matrix b = Matrix(Dtype::kBf16, 33, 21).fill(2, Fill::kUniform);
  a.set(5, 32, std::numeric_limits<float>::quiet_NaN());
  b.set(0, 20, -std::numeric_limits<float>::infinity());
  a.set(7, 0, 0);
  Matrix c(Dtype::kBf16, 19, 21);
  gemm(a, b, c);
  for (int i = 0; i < 19; ++i) {
    for (int j = 0; j < 21; ++j) {
      const bool nan = i == 5 || (i == 7 && j == 20);  // 0 * infinity
      EXPECT_EQ(std::isnan(c.value(i, j)), nan) << i << " " << j;
      EXPECT_EQ(std::isinf(c.value(i, j)), !nan && j == 20) << i << " " << j;
    }
  }
  EXPECT_EQ(c.value(0, 20) > 0, a.value(0, 0) < 0);
}

TEST(GemmTile, SubnormalInputsAndResultsAreKept) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp32}) {
    Matrix a(dtype, 2, 1);
    Matrix b(dtype, 1, 2);
    a.set(0, 0, 0x1p-130f);
    a.set(1, 0, 0x1p-100f);
    b.set(0, 0, 1);
    b.set(0, 1, 0x1p-32f);
    Matrix c(dtype, 2, 2);
    gemm(a, b, c);
    EXPECT_EQ(c.value(0, 0), 0x1p-130f);
    EXPECT_EQ(c.value(1, 1), 0x1p-132f);
  }
}

TEST(GemmTileDeathTest, TilesBeyondTheScratchAreRefused) {
  Matrix a(Dtype::kFp32, 5, 5);
  Matrix c(Dtype::kFp32, 5, 5);
  const OutMatrix out = c.out();
  TileScratch narrow(5, 4, 5);
  TileScratch shallow(5, 5, 4);
  EXPECT_DEATH(gemm_tile(a.in(), a.in(), &out, 1, narrow), "max_cols");
  EXPECT_DEATH(gemm_tile(a.in(), a.in(), &out, 1, shallow), "max_k");
}

TEST(ReduceTile, AddsInTheOrderGiven) {
  const float values[] = {0x1p24f, 1, 1, -0x1p24f};
  std::vector<Matrix> inputs(4, Matrix(Dtype::kFp32, 1, 1));
  for (std::size_t i = 0; i < 4; ++i) inputs[i].set(0, 0, values[i]);
  Matrix sum(Dtype::kFp32, 1, 1);
  reduce({inputs[0].in(), inputs[1].in(), inputs[2].in(), inputs[3].in()}, sum);
  EXPECT_EQ(sum.value(0, 0), 0.0f);  // 2^24 + 1 rounds to 2^24, twice
  reduce({inputs[1].in(), inputs[2].in(), inputs[0].in(), inputs[3].in()}, sum);
  EXPECT_EQ(sum.value(0, 0), 2.0f);
  reduce({inputs[0].in(), inputs[3].in(), inputs[1].in(), inputs[2].in()}, sum);
  EXPECT_EQ(sum.value(0, 0), 2.0f);
}

TEST(ReduceTile, RoundsOnlyAtTheEnd) {
  std::vector<Matrix> inputs(3, Matrix(Dtype::kBf16, 1, 1));
  inputs[0].set(0, 0, 1);
  inputs[1].set(0, 0, 0x1p-8f);  // 1 + 2^-8 would round back to 1
  inputs[2].set(0, 0, 0x1p-9f);
  Matrix sum(Dtype::kBf16, 1, 1);
  reduce({inputs[0].in(), inputs[1].in(), inputs[2].in()}, sum);
  EXPECT_EQ(sum.value(0, 0), 1 + 0x1p-7f);
}

TEST(ReduceTile, SumsOfNegativeZeroStayNegative) {
  for (const Dtype dtype : kDtypes) {
    Matrix zero(dtype, 3, 20);
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 20; ++j) zero.set(i, j, -0.0f);
    }
    Matrix sum(dtype, 3, 20);
    reduce({zero.in(), zero.in(), zero.in()}, sum);
    EXPECT_EQ(differences(sum, zero), 0);
  }
}

TEST(ReduceTile, OneInputConvertsAndKeepsSubnormalsAndInfinities) {
  Matrix in(Dtype::kBf16, 1, 3);
  in.set(0, 0, 0x1p-133f);
  in.set(0, 1, std::numeric_limits<float>::infinity());
  in.set(0, 2, 1e30f);
  Matrix wide(Dtype::kFp32, 1, 3);
  Matrix half(Dtype::kFp16, 1, 3);
  reduce({in.in()}, wide);
  reduce({in.in()}, half);
  for (int j = 0; j < 3; ++j) EXPECT_EQ(wide.value(0, j), in.value(0, j));
  EXPECT_EQ(half.value(0, 0), 0.0f);
  EXPECT_TRUE(std::isinf(half.value(0, 2)));
}

TEST(ReduceTile, EqualsTheScalarSumForEveryWidthTypeAndLayout) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t cols : {1, 2, 15, 16, 17, 100, 255, 256, 257, 600}) {
      const Matrix x = Matrix(dtype, 4, cols, kLayouts[cols % 5]).fill(1, Fill::kUniform);
      const Matrix y = Matrix(Dtype::kFp32, 4, cols, kLayouts[cols % 3], 1).fill(2, Fill::kUniform);
      const Matrix z = Matrix(dtype, 4, cols, Layout::kTransposed, 3).fill(3, Fill::kUniform);
      Matrix sum(dtype, 4, cols, kLayouts[(cols + 1) % 5], 5);
      reduce({x.in(), y.in(), z.in()}, sum);
      Matrix want(dtype, 4, cols);
      for (std::int64_t i = 0; i < 4; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) want.set(i, j, x.value(i, j) + y.value(i, j) + z.value(i, j));
      }
      ASSERT_EQ(differences(sum, want), 0) << dtype_name(dtype) << " " << cols;
      ASSERT_EQ(sum.damaged_gaps(), 0);
    }
  }
}

TEST(ReduceTile, BitsDoNotDependOnStridesForEveryBitPattern) {
  for (const Dtype dtype : kDtypes) {
    const Matrix x0 = Matrix(dtype, 16, 300).fill(1, Fill::kBits);
    const Matrix y0 = Matrix(dtype, 16, 300).fill(2, Fill::kBits);
    Matrix sum0(dtype, 16, 300);
    reduce({x0.in(), y0.in()}, sum0);
    for (std::int64_t shift = 0; shift < 20; ++shift) {
      const Matrix x = Matrix(dtype, 16, 300, kLayouts[shift % 5], shift).fill(1, Fill::kBits);
      const Matrix y = Matrix(dtype, 16, 300, kLayouts[shift / 3 % 5], shift / 2).fill(2, Fill::kBits);
      Matrix sum(dtype, 16, 300, kLayouts[shift / 4 % 5], shift);
      reduce({x.in(), y.in()}, sum);
      ASSERT_EQ(differences(sum, sum0), 0) << dtype_name(dtype) << " shift " << shift;
    }
  }
}

TEST(ReduceTile, AnOutMayBeOneOfTheInputs) {
  for (const Layout layout : kLayouts) {
    Matrix x = Matrix(Dtype::kBf16, 9, 300, layout).fill(1, Fill::kUniform);
    const Matrix y = Matrix(Dtype::kBf16, 9, 300).fill(2, Fill::kUniform);
    Matrix want(Dtype::kBf16, 9, 300);
    reduce({y.in(), x.in()}, want);
    reduce({y.in(), x.in()}, x);
    EXPECT_EQ(differences(x, want), 0);
  }
}

TEST(CopyTile, KeepsEveryBitInEveryLayout) {
  for (const Dtype dtype : kDtypes) {
    for (const Layout from : kLayouts) {
      const Matrix in = Matrix(dtype, 33, 70, from, 1).fill(1, Fill::kBits);
      Matrix plain(dtype, 33, 70);
      Matrix padded(dtype, 33, 70, Layout::kPadded, 3);
      Matrix spread(dtype, 33, 70, Layout::kSpread);
      const OutMatrix outs[] = {plain.out(), padded.out(), spread.out()};
      copy_tile(in.in(), outs, 3);
      for (const Matrix* out : {&plain, &padded, &spread}) {
        EXPECT_EQ(differences(*out, in), 0);
        EXPECT_EQ(out->damaged_gaps(), 0);
      }
    }
  }
}

TEST(CopyTile, KeepsAllPatternsOfSixteenBits) {
  Matrix in(Dtype::kFp16, 256, 256);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) in.set_bits(bits / 256, bits % 256, bits);
  Matrix copy(Dtype::kFp16, 256, 256, Layout::kTransposed);
  const OutMatrix out = copy.out();
  copy_tile(in.in(), &out, 1);
  EXPECT_EQ(differences(copy, in), 0);
}

}  // namespace
}  // namespace mkernel
