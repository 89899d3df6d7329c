#include "exec/reference.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "exec/rounding.h"
#include "plan/topology.h"

// The bound
// =========
// Source of the rules: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, chapters 2 to 4.
// u is the unit roundoff: 2^-24 for fp32, 2^-11 for fp16, 2^-8 for bf16, 2^-53 for fp64; gamma_n(u) = n u / (1 - n u).
//
// 1. Product of rank r, in fp32. A sum of products in which no term passes more than n roundings is off by at most
//    gamma_n |a|^T |b| (Lemma 3.1, eq. 3.5). In any order n = K_r: one multiplication, K_r - 1 additions (a fused
//    multiply-add has one rounding less, an addition to zero has none). In panels of p: p roundings within the panel,
//    then one per further panel: n = p + ceil(K_r / p) - 1. Products that underflow add at most 2^-150 each (eq. 2.8;
//    additions are exact where they underflow), which grows by (1 + gamma_n) on the way: 2^-149 covers it.
//        e_r = gamma_n S_r + K_r 2^-149,   S_r = sum |a| |b|;   zero when S_r is.
// 2. Rounding x to a type is off by at most u |x|, and where the result is subnormal by at most half its smallest
//    number, eta, and never by more than |x| when it gives zero: rho(x) = max(u |x|, min(|x|, eta)); rho = 0 for
//    fp32, since sums are fp32. rho grows with |x|, so it may be taken of an upper limit.
//        G > 1:  e'_r = e_r + rho_p(|P_r| + e_r);   G = 1:  e'_r = e_r.
// 3. Sum over the G partials of node n, G - 1 roundings (eq. 4.4):
//        E_n = sum e'_r + gamma_(G-1) sum (|P_r| + e'_r)
//        N > 1:  E'_n = E_n + rho_p(|P_n| + E_n);   N = 1:  E'_n = E_n.
// 4. Sum over the N nodes and the result:
//        E = sum E'_n + gamma_(N-1) sum (|P_n| + E'_n);   bound = E + rho_out(|ref| + E).
//
// The reference itself is fp64. Its products are exact (two 24-bit numbers), its sums are off by at most
// gamma_(K+W)(2^-53) S; twice that is added to e_r's factor, for the reference and for S_r itself. The few roundings of
// steps 2 to 4 in fp64 are covered by a last factor of 1 + 2^-40: below 4,000 ranks there are fewer than 2^12 in a row.
//
// Overflow: step 1 stays finite while S_r + e_r, steps 3 and 4 while the sums of |P| + e' stay below fp32's maximum;
// a rounding stays finite while |x| is below the type's maximum plus half a unit. Where that is not sure, see the
// header. (An infinite input in an element whose finite terms overflow too is judged by the reference alone.)

namespace mkernel {
namespace {

constexpr std::int64_t kRowBlock = 64;
constexpr std::int64_t kColBlock = 256;
constexpr std::int64_t kDepthBlock = 256;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMaxFloat = std::numeric_limits<float>::max();

using Block = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A sum of the computation: its exact value, how far the computed one may be off, and an upper limit for the sum of
// the magnitudes of its computed terms.
struct Sums {
  Block value, error, terms;

  Sums(std::int64_t rows, std::int64_t cols)
      : value(Block::Zero(rows, cols)), error(Block::Zero(rows, cols)), terms(Block::Zero(rows, cols)) {}
};

// A block of rows and columns on its way through the steps above.
class BlockCheck {
 public:
  BlockCheck(const ReferenceSpec& spec, std::span<const std::int64_t> rows, std::int64_t col, std::int64_t cols)
      : spec_(spec),
        rows_(rows),
        col_(col),
        cols_(cols),
        height_(static_cast<std::int64_t>(rows.size())),
        partial_(rounding_to(spec.partial)),
        total_(height_, cols),
        may_overflow_(Block::Zero(height_, cols)) {}

  void run(const ConstMatrix& a, const ConstMatrix& b) {
    const int nodes = spec_.split_k ? spec_.nodes : 1;
    const int gpus = spec_.split_k ? spec_.gpus : 1;
    const Split slices{spec_.k, nodes * gpus};
    for (int n = 0; n < nodes; ++n) {
      Sums node(height_, cols_);
      for (int g = 0; g < gpus; ++g) {
        const int rank = n * gpus + g;
        Sums product = multiply(a, b, slices.begin(rank), slices.size(rank));
        if (gpus > 1) round(product, partial_);
        add(product, node);
      }
      finish(node, gpus);
      if (nodes > 1) round(node, partial_);
      add(node, total_);
    }
    finish(total_, nodes);
  }

  const Sums& total() const { return total_; }
  // Whether a sum or a partial of this element may have become infinite.
  bool may_overflow(std::int64_t row, std::int64_t col) const { return may_overflow_(row, col) != 0; }

 private:
  // Step 1; `terms` is not used.
  Sums multiply(const ConstMatrix& a, const ConstMatrix& b, std::int64_t begin, std::int64_t size) {
    Sums product(height_, cols_);
    Block magnitude = Block::Zero(height_, cols_);
    Block a_block;  // (rows, p)
    Block b_block;  // (p, cols)
    for (std::int64_t first = begin; first < begin + size; first += kDepthBlock) {
      const std::int64_t depth = std::min(kDepthBlock, begin + size - first);
      a_block.resize(height_, depth);
      b_block.resize(depth, cols_);
      for (std::int64_t i = 0; i < height_; ++i) {
        for (std::int64_t p = 0; p < depth; ++p)
          a_block(i, p) = load_element(a, rows_[static_cast<std::size_t>(i)], first + p);
      }
      for (std::int64_t p = 0; p < depth; ++p) {
        for (std::int64_t j = 0; j < cols_; ++j) b_block(p, j) = load_element(b, first + p, col_ + j);
      }
      product.value.noalias() += a_block * b_block;
      a_block = a_block.cwiseAbs();
      b_block = b_block.cwiseAbs();
      magnitude.noalias() += a_block * b_block;
    }
    const double factor = gamma(roundings(size), kUnit32) + 2 * gamma(spec_.k + spec_.nodes * spec_.gpus, kUnit64);
    const double underflow = static_cast<double>(size) * 0x1p-149;
    for (std::int64_t i = 0; i < magnitude.size(); ++i) {
      const double s = magnitude.data()[i];
      if (s == 0) continue;
      product.error.data()[i] = factor * s + underflow;
      if (!(s + product.error.data()[i] < kMaxFloat)) may_overflow_.data()[i] = 1;
    }
    return product;
  }

  // How many roundings a term of a product of `size` terms passes at most.
  std::int64_t roundings(std::int64_t size) const {
    if (spec_.panel_k == 0 || size <= spec_.panel_k) return size;
    return spec_.panel_k + ceil_div(size, spec_.panel_k) - 1;
  }

  // Step 2.
  void round(Sums& sums, const Rounding& to) {
    for (std::int64_t i = 0; i < sums.value.size(); ++i) {
      const double limit = std::abs(sums.value.data()[i]) + sums.error.data()[i];
      sums.error.data()[i] += rounding_error(limit, to);
      if (!(limit < to.overflow)) may_overflow_.data()[i] = 1;
    }
  }

  static void add(const Sums& term, Sums& sum) {
    sum.value += term.value;
    sum.error += term.error;
    sum.terms += term.value.cwiseAbs() + term.error;
  }

  // The roundings of the `count` - 1 additions of steps 3 and 4.
  void finish(Sums& sum, int count) {
    sum.error += gamma(count - 1, kUnit32) * sum.terms;
    for (std::int64_t i = 0; i < sum.value.size(); ++i) {
      if (!(sum.terms.data()[i] + sum.error.data()[i] < kMaxFloat)) may_overflow_.data()[i] = 1;
    }
  }

  const ReferenceSpec& spec_;
  std::span<const std::int64_t> rows_;
  std::int64_t col_;
  std::int64_t cols_;
  std::int64_t height_;
  Rounding partial_;
  Sums total_;
  Block may_overflow_;  // 0 or 1
};

// Sums up what the elements show.
class Verdict {
 public:
  explicit Verdict(Dtype out) : out_(rounding_to(out)) {}

  void element(std::int64_t row, std::int64_t col, double value, double ref, double sum_error, bool sum_may_overflow) {
    if (!std::isfinite(ref)) {
      const bool same = std::isnan(ref) ? std::isnan(value) : value == ref;
      if (!same) wrong(row, col);
      return;
    }
    const double limit = std::abs(ref) + sum_error;
    const double bound = (sum_error + rounding_error(limit, out_)) * (1 + 0x1p-40);
    if (!std::isfinite(value)) {
      const bool result_overflowed = limit >= out_.overflow && std::isinf(value) && (value > 0) == (ref > 0);
      if (!sum_may_overflow && !result_overflowed) wrong(row, col);
      return;
    }
    const double error = std::abs(value - ref);
    error_squares_ += error * error;
    ref_squares_ += ref * ref;
    bound_squares_ += bound * bound;
    report_.max_abs_error = std::max(report_.max_abs_error, error);
    if (error > 0) worst(row, col, error / bound);
  }

  CheckReport report(std::int64_t checked_rows) {
    report_.checked_rows = checked_rows;
    report_.ok = report_.worst_ratio <= 1;
    report_.rel_bound = relative(bound_squares_);
    report_.max_rel_error = std::isinf(report_.max_abs_error) ? kInfinity : relative(error_squares_);
    return report_;
  }

 private:
  double relative(double squares) const { return squares == 0 ? 0 : std::sqrt(squares / ref_squares_); }

  void wrong(std::int64_t row, std::int64_t col) {
    report_.max_abs_error = kInfinity;
    worst(row, col, kInfinity);
  }

  void worst(std::int64_t row, std::int64_t col, double ratio) {
    if (ratio <= report_.worst_ratio) return;
    report_.worst_ratio = ratio;
    report_.worst_row = row;
    report_.worst_col = col;
  }

  Rounding out_;
  CheckReport report_;
  double error_squares_ = 0;
  double ref_squares_ = 0;
  double bound_squares_ = 0;
};

void check_matrix(const ConstMatrix& matrix, std::int64_t rows, std::int64_t cols, Dtype dtype) {
  MK_CHECK_OP(matrix.rows, ==, rows);
  MK_CHECK_OP(matrix.cols, ==, cols);
  MK_CHECK_OP(static_cast<int>(matrix.dtype), ==, static_cast<int>(dtype));
}

}  // namespace

CheckReport check_rows(const ReferenceSpec& spec, const ConstMatrix& a, const ConstMatrix& b, const ConstMatrix& out,
                       std::span<const std::int64_t> rows) {
  check_matrix(a, spec.m, spec.k, spec.in);
  check_matrix(b, spec.k, spec.n, spec.in);
  check_matrix(out, spec.m, spec.n, spec.out);
  MK_CHECK_OP(spec.nodes, >=, 1);
  MK_CHECK_OP(spec.gpus, >=, 1);
  for (const std::int64_t row : rows) {
    MK_CHECK_OP(row, >=, 0);
    MK_CHECK_OP(row, <, spec.m);
  }
  Verdict verdict(spec.out);
  const auto row_count = static_cast<std::int64_t>(rows.size());
  for (std::int64_t r = 0; r < row_count; r += kRowBlock) {
    const auto block_rows =
        rows.subspan(static_cast<std::size_t>(r), static_cast<std::size_t>(std::min(kRowBlock, row_count - r)));
    for (std::int64_t c = 0; c < spec.n; c += kColBlock) {
      const std::int64_t cols = std::min(kColBlock, spec.n - c);
      BlockCheck check(spec, block_rows, c, cols);
      check.run(a, b);
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(block_rows.size()); ++i) {
        const std::int64_t row = block_rows[static_cast<std::size_t>(i)];
        for (std::int64_t j = 0; j < cols; ++j) {
          verdict.element(row, c + j, load_element(out, row, c + j), check.total().value(i, j),
                          check.total().error(i, j), check.may_overflow(i, j));
        }
      }
    }
  }
  return verdict.report(row_count);
}

}  // namespace mkernel
