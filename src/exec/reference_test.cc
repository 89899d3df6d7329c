#include "exec/reference.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/half.h"
#include "exec/fill.h"
#include "plan/topology.h"

namespace mkernel {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A row-major matrix.
class Matrix {
 public:
  Matrix(Dtype dtype, std::int64_t rows, std::int64_t cols)
      : dtype_(dtype), rows_(rows), cols_(cols), memory_(static_cast<std::size_t>(rows * cols)) {}

  OutMatrix out() { return {memory_.data(), dtype_, rows_, cols_, cols_, 1}; }
  ConstMatrix in() const { return {memory_.data(), dtype_, rows_, cols_, cols_, 1}; }
  Matrix& fill(std::uint64_t seed, Fill kind) {
    fill_random(out(), seed, kind);
    return *this;
  }
  Matrix& fill_value(float value) {
    for (std::int64_t i = 0; i < rows_; ++i) {
      for (std::int64_t j = 0; j < cols_; ++j) set(i, j, value);
    }
    return *this;
  }
  float value(std::int64_t i, std::int64_t j) const {
    if (dtype_ == Dtype::kFp32) return static_cast<const float*>(in().data)[i * cols_ + j];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(in().data)[i * cols_ + j];
    return dtype_ == Dtype::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
  }
  void set(std::int64_t i, std::int64_t j, float value) {
    const std::int64_t at = i * cols_ + j;
    switch (dtype_) {
      case Dtype::kBf16: static_cast<std::uint16_t*>(out().data)[at] = float_to_bf16(value); break;
      case Dtype::kFp16: static_cast<std::uint16_t*>(out().data)[at] = float_to_fp16(value); break;
      case Dtype::kFp32: static_cast<float*>(out().data)[at] = value; break;
    }
  }

 private:
  Dtype dtype_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::vector<float> memory_;  // as large as needed for any type
};

// What goes wrong in an emulated run.
struct Fault {
  int missing = -1;     // this rank's partial is not added
  int twice = -1;       // this rank's partial is added twice
  bool coarse = false;  // partials are rounded to bf16 whatever the spec says
};

Matrix sum(const std::vector<Matrix>& terms, Dtype dtype) {
  std::vector<ConstMatrix> inputs;
  for (const Matrix& term : terms) inputs.push_back(term.in());
  Matrix result(dtype, inputs[0].rows, inputs[0].cols);
  const OutMatrix out = result.out();
  TileScratch scratch(0, 0, 0);
  reduce_tile(inputs, &out, 1, scratch);
  return result;
}

// The roundings of the operators, step by step.
Matrix emulate(const ReferenceSpec& spec, const Matrix& a, const Matrix& b, const Fault& fault = {}) {
  const int nodes = spec.split_k ? spec.nodes : 1;
  const int gpus = spec.split_k ? spec.gpus : 1;
  const Dtype partial = fault.coarse ? Dtype::kBf16 : spec.partial;
  const Split slices{spec.k, nodes * gpus};
  TileScratch scratch(spec.m, spec.n, slices.max_size());
  std::vector<Matrix> node_sums;
  for (int n = 0; n < nodes; ++n) {
    std::vector<Matrix> partials;
    for (int g = 0; g < gpus; ++g) {
      const int rank = n * gpus + g;
      const std::int64_t begin = slices.begin(rank);
      ConstMatrix a_slice = a.in();
      ConstMatrix b_slice = b.in();
      a_slice.data = static_cast<const char*>(a_slice.data) + begin * dtype_bytes(spec.in);
      b_slice.data = static_cast<const char*>(b_slice.data) + begin * spec.n * dtype_bytes(spec.in);
      a_slice.cols = b_slice.rows = slices.size(rank);
      Matrix product(nodes * gpus == 1 ? spec.out : partial, spec.m, spec.n);
      const OutMatrix out = product.out();
      gemm_tile(a_slice, b_slice, &out, 1, scratch);
      if (rank == fault.missing) product.fill(0, Fill::kZero);
      partials.push_back(product);
      if (rank == fault.twice) partials.push_back(product);
    }
    node_sums.push_back(partials.size() == 1 ? partials[0] : sum(partials, nodes == 1 ? spec.out : partial));
  }
  return nodes == 1 ? node_sums[0] : sum(node_sums, spec.out);
}

CheckReport check_all(const ReferenceSpec& spec, const Matrix& a, const Matrix& b, const Matrix& out) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(spec.m));
  std::iota(rows.begin(), rows.end(), 0);
  return check_rows(spec, a.in(), b.in(), out.in(), rows);
}

Matrix input_a(const ReferenceSpec& spec, Fill kind = Fill::kUniform) {
  return Matrix(spec.in, spec.m, spec.k).fill(11, kind);
}
Matrix input_b(const ReferenceSpec& spec, Fill kind = Fill::kUniform) {
  return Matrix(spec.in, spec.k, spec.n).fill(12, kind);
}

// The worlds, types and forms that most tests go through.
std::vector<ReferenceSpec> specs(std::int64_t m, std::int64_t n, std::int64_t k) {
  const Dtype types[][3] = {{Dtype::kBf16, Dtype::kBf16, Dtype::kBf16},
                            {Dtype::kBf16, Dtype::kFp32, Dtype::kBf16},
                            {Dtype::kFp16, Dtype::kFp16, Dtype::kFp16},
                            {Dtype::kFp16, Dtype::kFp32, Dtype::kFp16},
                            {Dtype::kFp32, Dtype::kFp32, Dtype::kFp32}};
  const int worlds[][2] = {{1, 1}, {1, 2}, {1, 5}, {3, 1}, {2, 2}, {2, 3}, {4, 2}};
  std::vector<ReferenceSpec> all;
  for (const auto& type : types) {
    for (const auto& world : worlds) {
      for (const bool split_k : {true, false}) {
        all.push_back({m, n, k, world[0], world[1], type[0], type[1], type[2], split_k});
      }
    }
  }
  return all;
}

std::string name(const ReferenceSpec& spec) {
  return std::to_string(spec.nodes) + "x" + std::to_string(spec.gpus) + " " + std::string(dtype_name(spec.in)) +
         ", partials " + std::string(dtype_name(spec.partial)) + (spec.split_k ? ", split K" : ", whole K");
}

TEST(Reference, CorrectResultsPassWithABoundThatIsNotVacuous) {
  for (const ReferenceSpec& spec : specs(70, 300, 333)) {
    const Matrix a = input_a(spec);
    const Matrix b = input_b(spec);
    const CheckReport report = check_all(spec, a, b, emulate(spec, a, b));
    EXPECT_TRUE(report.ok) << name(spec);
    EXPECT_LE(report.worst_ratio, 1) << name(spec);
    // Random inputs come within a factor of 5 of the bound where roundings to 16 bits dominate. In sums of n random
    // signs errors and sums both grow with sqrt(n) instead of n, so pure fp32 stays below by about n.
    EXPECT_GE(report.worst_ratio, spec.out == Dtype::kFp32 ? 1.0 / kGemmPanelK : 0.2) << name(spec);
    EXPECT_LE(report.max_rel_error, report.rel_bound) << name(spec);
    EXPECT_GT(report.max_rel_error, 0) << name(spec);
    EXPECT_EQ(report.checked_rows, 70);
  }
}

TEST(Reference, LongSumsKeepATightBound) {
  const ReferenceSpec spec{3, 20, 20000, 2, 2, Dtype::kBf16, Dtype::kBf16, Dtype::kBf16};
  const Matrix a = input_a(spec);
  const Matrix b = input_b(spec);
  const Matrix out = emulate(spec, a, b);
  const CheckReport report = check_all(spec, a, b, out);
  EXPECT_TRUE(report.ok);
  EXPECT_GE(report.worst_ratio, 0.1);
  ReferenceSpec any_order = spec;
  any_order.panel_k = 0;
  const CheckReport wider = check_all(any_order, a, b, out);
  EXPECT_TRUE(wider.ok);
  EXPECT_GT(wider.rel_bound, 2 * report.rel_bound);
}

TEST(Reference, IntegerInputsAreExact) {
  for (const ReferenceSpec& spec : specs(9, 10, 64)) {  // |sums| <= 256: exact in bf16
    const Matrix a = input_a(spec, Fill::kInteger);
    const Matrix b = input_b(spec, Fill::kInteger);
    const CheckReport report = check_all(spec, a, b, emulate(spec, a, b));
    EXPECT_TRUE(report.ok) << name(spec);
    EXPECT_EQ(report.max_abs_error, 0) << name(spec);
    EXPECT_EQ(report.worst_ratio, 0) << name(spec);
    EXPECT_EQ(report.worst_row, -1) << name(spec);
  }
}

TEST(Reference, AnAllZeroOutputFails) {
  for (const std::int64_t k : {1, 2, 64, 1000, 100'000}) {
    for (ReferenceSpec spec : specs(2, 4, k)) {
      for (const std::int64_t panel_k : {kGemmPanelK, std::int64_t{0}}) {
        spec.panel_k = panel_k;
        const Matrix zero(spec.out, spec.m, spec.n);
        const CheckReport report = check_all(spec, input_a(spec), input_b(spec), zero);
        ASSERT_FALSE(report.ok) << name(spec) << ", K " << k;
        ASSERT_EQ(report.max_rel_error, 1) << name(spec);
      }
    }
  }
}

TEST(Reference, ASwappedPairOfRowsFails) {
  for (const ReferenceSpec& spec : specs(6, 5, 100)) {
    const Matrix a = input_a(spec);
    const Matrix b = input_b(spec);
    Matrix out = emulate(spec, a, b);
    for (std::int64_t j = 0; j < spec.n; ++j) {
      const float value = out.value(2, j);
      out.set(2, j, out.value(4, j));
      out.set(4, j, value);
    }
    const CheckReport report = check_all(spec, a, b, out);
    EXPECT_FALSE(report.ok) << name(spec);
    EXPECT_TRUE(report.worst_row == 2 || report.worst_row == 4) << name(spec);
  }
}

TEST(Reference, AMissingPartialFails) {
  for (const ReferenceSpec& spec : specs(6, 5, 100)) {
    const Matrix a = input_a(spec);
    const Matrix b = input_b(spec);
    for (int rank = 0; rank < (spec.split_k ? spec.nodes * spec.gpus : 1); ++rank) {
      EXPECT_FALSE(check_all(spec, a, b, emulate(spec, a, b, {.missing = rank})).ok) << name(spec) << " rank " << rank;
    }
  }
}

TEST(Reference, APartialCountedTwiceFails) {
  for (const ReferenceSpec& spec : specs(6, 5, 100)) {
    const Matrix a = input_a(spec);
    const Matrix b = input_b(spec);
    for (int rank = 0; rank < (spec.split_k ? spec.nodes * spec.gpus : 1); ++rank) {
      EXPECT_FALSE(check_all(spec, a, b, emulate(spec, a, b, {.twice = rank})).ok) << name(spec) << " rank " << rank;
    }
  }
}

TEST(Reference, AResultRoundedToFewerBitsFails) {
  for (const ReferenceSpec& spec : specs(20, 20, 40)) {
    const Matrix a = input_a(spec);
    const Matrix b = input_b(spec);
    Matrix out = emulate(spec, a, b);
    // Two bits fewer than the type has; where four or more roundings to bf16 precede, their sum could hide one bit.
    const int bits = spec.out == Dtype::kBf16 ? 6 : spec.out == Dtype::kFp16 ? 9 : 16;
    for (std::int64_t i = 0; i < spec.m; ++i) {
      for (std::int64_t j = 0; j < spec.n; ++j) {
        int exponent = 0;
        const double fraction = std::frexp(out.value(i, j), &exponent);
        out.set(i, j, static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, bits)), exponent - bits)));
      }
    }
    EXPECT_FALSE(check_all(spec, a, b, out).ok) << name(spec);
  }
}

TEST(Reference, PartialsRoundedToFewerBitsFail) {
  for (const Dtype partial : {Dtype::kFp16, Dtype::kFp32}) {
    for (const Dtype out : {Dtype::kFp16, Dtype::kFp32}) {
      for (const auto& [nodes, gpus] : {std::pair{1, 4}, {4, 1}, {2, 2}}) {
        const ReferenceSpec spec{20, 20, 80, nodes, gpus, Dtype::kFp16, partial, out};
        const Matrix a = input_a(spec);
        const Matrix b = input_b(spec);
        EXPECT_TRUE(check_all(spec, a, b, emulate(spec, a, b)).ok) << name(spec);
        EXPECT_FALSE(check_all(spec, a, b, emulate(spec, a, b, {.coarse = true})).ok) << name(spec);
      }
    }
  }
}

TEST(Reference, OneWrongElementIsNamedAndOnlyCheckedRowsCount) {
  const ReferenceSpec spec{300, 600, 50, 2, 2, Dtype::kBf16, Dtype::kBf16, Dtype::kBf16};
  const Matrix a = input_a(spec);
  const Matrix b = input_b(spec);
  Matrix out = emulate(spec, a, b);
  out.set(217, 555, out.value(217, 555) + 1);
  const CheckReport report = check_all(spec, a, b, out);
  EXPECT_FALSE(report.ok);
  EXPECT_EQ(report.worst_row, 217);
  EXPECT_EQ(report.worst_col, 555);
  EXPECT_NEAR(report.max_abs_error, 1, 0.25);
  const std::int64_t others[] = {299, 0, 216, 218};
  EXPECT_TRUE(check_rows(spec, a.in(), b.in(), out.in(), others).ok);
  EXPECT_EQ(check_rows(spec, a.in(), b.in(), out.in(), others).checked_rows, 4);
  const std::int64_t one[] = {217};
  EXPECT_FALSE(check_rows(spec, a.in(), b.in(), out.in(), one).ok);
}

TEST(Reference, StridesOfTheOperandsDoNotMatter) {
  const ReferenceSpec spec{30, 40, 50, 2, 2, Dtype::kBf16, Dtype::kBf16, Dtype::kBf16};
  const Matrix a = input_a(spec);
  const Matrix b = input_b(spec);
  const Matrix out = emulate(spec, a, b);
  Matrix b_transposed(Dtype::kBf16, spec.n, spec.k);
  const OutMatrix view{b_transposed.out().data, Dtype::kBf16, spec.k, spec.n, 1, spec.k};
  copy_tile(b.in(), &view, 1);
  const std::int64_t rows[] = {0, 7, 29};
  const ConstMatrix b_view{view.data, view.dtype, view.rows, view.cols, view.row_stride, view.col_stride};
  const CheckReport report = check_rows(spec, a.in(), b_view, out.in(), rows);
  EXPECT_TRUE(report.ok);
  EXPECT_EQ(report.worst_ratio, check_rows(spec, a.in(), b.in(), out.in(), rows).worst_ratio);
}

TEST(Reference, NanAndInfinityMustAppearWhereTheyBelongAndNowhereElse) {
  for (const ReferenceSpec& spec : specs(6, 7, 60)) {
    Matrix a = input_a(spec);
    Matrix b = input_b(spec);
    a.set(1, 59, kNan);
    b.set(0, 3, kInf);
    const Matrix good = emulate(spec, a, b);
    const CheckReport report = check_all(spec, a, b, good);
    EXPECT_TRUE(report.ok) << name(spec);
    EXPECT_TRUE(std::isfinite(report.max_rel_error)) << name(spec);
    EXPECT_LE(report.max_rel_error, report.rel_bound) << name(spec);

    const struct {
      std::int64_t row, col;
      float value;
    } wrong[] = {{1, 2, 0.5f}, {1, 2, kInf}, {2, 3, 1}, {2, 3, kNan}, {2, 3, -good.value(2, 3)},
                 {4, 4, kNan}, {4, 4, kInf}};
    for (const auto& w : wrong) {
      Matrix out = good;
      out.set(w.row, w.col, w.value);
      const CheckReport bad = check_all(spec, a, b, out);
      EXPECT_FALSE(bad.ok) << name(spec) << " " << w.row << " " << w.col << " " << w.value;
      EXPECT_EQ(bad.worst_row, w.row);
      EXPECT_EQ(bad.worst_col, w.col);
      EXPECT_EQ(bad.max_rel_error, std::numeric_limits<double>::infinity());
    }
  }
}

TEST(Reference, AResultBeyondFp16MustBeTheRightInfinity) {
  const ReferenceSpec spec{2, 2, 64, 1, 1, Dtype::kFp16, Dtype::kFp16, Dtype::kFp16};
  const Matrix a = Matrix(Dtype::kFp16, 2, 64).fill_value(-60);
  const Matrix b = Matrix(Dtype::kFp16, 64, 2).fill_value(60);  // -230,400
  Matrix out = emulate(spec, a, b);
  EXPECT_EQ(out.value(0, 0), -kInf);
  EXPECT_TRUE(check_all(spec, a, b, out).ok);
  for (const float wrong : {kInf, kNan, -65504.0f}) {
    out.set(0, 0, wrong);
    EXPECT_FALSE(check_all(spec, a, b, out).ok) << wrong;
  }
}

TEST(Reference, AResultThatFitsFp16MustNotBeInfinite) {
  const ReferenceSpec spec{1, 1, 2, 1, 1, Dtype::kFp16, Dtype::kFp16, Dtype::kFp16};
  const Matrix b = Matrix(Dtype::kFp16, 2, 1).fill_value(1);
  // 65520 is the first that rounds to infinity; the fp32 sum of two terms is off by less than 2^-7.
  for (const float rest : {0.0f, 15.0f, 15.984375f, 15.9921875f, 16.0f, 17.0f}) {
    Matrix a(Dtype::kFp16, 1, 2);
    a.set(0, 0, 65504);
    a.set(0, 1, rest);
    EXPECT_TRUE(check_all(spec, a, b, emulate(spec, a, b)).ok) << rest;
    Matrix infinite(Dtype::kFp16, 1, 1);
    infinite.set(0, 0, kInf);
    EXPECT_EQ(check_all(spec, a, b, infinite).ok, rest >= 16) << rest;
  }
}

TEST(Reference, OverflowOfAPartialExcusesNanAndOverflowOfNoneDoesNot) {
  for (const auto& [nodes, gpus] : {std::pair{1, 2}, {2, 1}}) {
    ReferenceSpec spec{1, 1, 128, nodes, gpus, Dtype::kFp16, Dtype::kFp16, Dtype::kFp16};
    Matrix a(Dtype::kFp16, 1, 128);
    for (int p = 0; p < 128; ++p) a.set(0, p, p < 64 ? 60 : -60);
    const Matrix b = Matrix(Dtype::kFp16, 128, 1).fill_value(60);
    const Matrix out = emulate(spec, a, b);
    EXPECT_TRUE(std::isnan(out.value(0, 0)));
    EXPECT_TRUE(check_all(spec, a, b, out).ok);
    spec.partial = Dtype::kFp32;
    EXPECT_FALSE(check_all(spec, a, b, out).ok);
    EXPECT_EQ(emulate(spec, a, b).value(0, 0), 0);
    EXPECT_TRUE(check_all(spec, a, b, emulate(spec, a, b)).ok);
  }
}

TEST(Reference, OverflowOfAnFp32SumIsAccepted) {
  const ReferenceSpec spec{1, 1, 4, 1, 1, Dtype::kBf16, Dtype::kBf16, Dtype::kBf16};
  Matrix a(Dtype::kBf16, 1, 4);
  for (int p = 0; p < 4; ++p) a.set(0, p, p < 2 ? 0x1p100f : -0x1p100f);
  const Matrix b = Matrix(Dtype::kBf16, 4, 1).fill_value(0x1p27f);  // 2^127 twice is infinite
  EXPECT_TRUE(check_all(spec, a, b, emulate(spec, a, b)).ok);
  Matrix out(Dtype::kBf16, 1, 1);
  EXPECT_TRUE(check_all(spec, a, b, out).ok);  // the exact result
  out.set(0, 0, 0x1p126f);
  EXPECT_FALSE(check_all(spec, a, b, out).ok);
}

TEST(Reference, SubnormalResultsAreKeptAndFlushingThemFails) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp32}) {
    for (const bool large : {true, false}) {
      const ReferenceSpec spec{8, 8, 16, 2, 2, dtype, dtype, dtype};
      Matrix a = input_a(spec);
      Matrix b = input_b(spec);
      for (std::int64_t i = 0; i < 8; ++i) {
        for (std::int64_t p = 0; p < 16; ++p) {
          a.set(i, p, std::ldexp(a.value(i, p), -65));
          b.set(p, i, std::ldexp(b.value(p, i), large ? -63 : -75));  // results near 2^-127, or rounding to nothing
        }
      }
      EXPECT_TRUE(check_all(spec, a, b, emulate(spec, a, b)).ok) << dtype_name(dtype);
      if (large || dtype == Dtype::kFp32) {
        EXPECT_FALSE(check_all(spec, a, b, Matrix(dtype, 8, 8)).ok) << dtype_name(dtype);
      }
    }
  }
}

TEST(Reference, InnerSizeZeroMustGiveZeros) {
  for (const ReferenceSpec& spec : specs(3, 4, 0)) {
    const Matrix a(spec.in, 3, 0);
    const Matrix b(spec.in, 0, 4);
    Matrix out(spec.out, 3, 4);
    const CheckReport report = check_all(spec, a, b, out);
    EXPECT_TRUE(report.ok);
    EXPECT_EQ(report.max_rel_error, 0);
    EXPECT_EQ(report.rel_bound, 0);
    out.set(2, 1, 0x1p-20f);
    EXPECT_FALSE(check_all(spec, a, b, out).ok);
    EXPECT_EQ(check_all(spec, a, b, out).worst_row, 2);
  }
}

TEST(Reference, AnEmptyMatrixPasses) {
  for (const auto& [m, n] : {std::pair{0, 4}, {4, 0}, {0, 0}}) {
    const ReferenceSpec spec{m, n, 5};
    EXPECT_TRUE(check_all(spec, Matrix(spec.in, m, 5), Matrix(spec.in, 5, n), Matrix(spec.out, m, n)).ok);
  }
}

TEST(ReferenceDeathTest, RowsOutsideTheMatrixAreRefused) {
  const ReferenceSpec spec{2, 2, 2};
  const Matrix square(Dtype::kBf16, 2, 2);
  const std::int64_t rows[] = {2};
  EXPECT_DEATH(check_rows(spec, square.in(), square.in(), square.in(), rows), "spec.m");
}

}  // namespace
}  // namespace mkernel
