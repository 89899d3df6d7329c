// A GEMM over a world with inputs that can be checked to the last bit. For tests only.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/half.h"
#include "exec/fill.h"
#include "mkernel/mkernel.h"
#include "plan/topology.h"

namespace mkernel::test {

inline float load(const std::byte* at, Dtype dtype) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return dtype == Dtype::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

// How a matrix is laid out in its own memory.
struct Layout {
  bool transposed = false;
  std::int64_t extra_stride = 0;  // elements between the end of a row (column) and the begin of the next
  std::int64_t base_offset = 0;   // elements before the first
};

// A matrix with memory of its own, and a guard value around its elements.
class TestMatrix {
 public:
  TestMatrix(MatrixShape shape, Dtype dtype, Layout layout = {}) : dtype_(dtype) {
    matrix_.rows = shape.rows;
    matrix_.cols = shape.cols;
    const std::int64_t inner = layout.transposed ? shape.rows : shape.cols;
    const std::int64_t outer = layout.transposed ? shape.cols : shape.rows;
    const std::int64_t pitch = inner + layout.extra_stride;
    matrix_.row_stride = layout.transposed ? 1 : pitch;
    matrix_.col_stride = layout.transposed ? pitch : 1;
    memory_.assign(static_cast<std::size_t>((layout.base_offset + outer * pitch + 1) * dtype_bytes(dtype)), kGuard);
    offset_ = layout.base_offset * dtype_bytes(dtype);
    matrix_.data = memory_.data() + offset_;
  }
  TestMatrix(TestMatrix&& other) noexcept = default;  // a moved vector keeps its memory

  const Matrix& matrix() const { return matrix_; }
  OutMatrix out() { return {matrix_.data, dtype_, matrix_.rows, matrix_.cols, matrix_.row_stride, matrix_.col_stride}; }
  float at(std::int64_t row, std::int64_t col) const {
    const std::int64_t element = row * matrix_.row_stride + col * matrix_.col_stride;
    return load(memory_.data() + offset_ + element * dtype_bytes(dtype_), dtype_);
  }
  void fill(std::byte value) { std::fill(memory_.begin(), memory_.end(), value); }
  // Back to how it was made; no sum of integers has the value of the guard.
  void clear() { fill(kGuard); }
  const std::vector<std::byte>& bytes() const { return memory_; }

  // Whether all bytes that are no element still hold the guard value.
  bool guards_intact() const {
    std::vector<bool> element(memory_.size());
    for (std::int64_t r = 0; r < matrix_.rows; ++r) {
      for (std::int64_t c = 0; c < matrix_.cols; ++c) {
        const std::int64_t at = offset_ + (r * matrix_.row_stride + c * matrix_.col_stride) * dtype_bytes(dtype_);
        for (std::int64_t b = 0; b < dtype_bytes(dtype_); ++b) element[static_cast<std::size_t>(at + b)] = true;
      }
    }
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (!element[i] && memory_[i] != kGuard) return false;
    }
    return true;
  }

  static constexpr std::byte kGuard{0x5a};

 private:
  Dtype dtype_;
  Matrix matrix_;
  std::vector<std::byte> memory_;
  std::int64_t offset_ = 0;
};

// Matrices of all ranks for one call, filled with small integers (or zero-mean reals) from a seed.
class Problem {
 public:
  Problem(const Operator& op, const GemmOptions& options, int world, std::uint64_t seed, Fill kind = Fill::kInteger,
          Layout layout_a = {}, Layout layout_b = {}, Layout layout_c = {})
      : options_(options), world_(world) {
    for (int rank = 0; rank < world; ++rank) {
      a_.emplace_back(op.a_shape(rank), options.dtype, layout_a);
      b_.emplace_back(op.b_shape(rank), options.dtype, layout_b);
      c_.emplace_back(op.c_shape(rank), options.dtype, layout_c);
    }
    refill(seed, kind);
  }

  void refill(std::uint64_t seed, Fill kind = Fill::kInteger) {
    for (int rank = 0; rank < world_; ++rank) {
      fill_random(a_[rank].out(), seed * 1000 + 2 * static_cast<std::uint64_t>(rank), kind);
      fill_random(b_[rank].out(), seed * 1000 + 2 * static_cast<std::uint64_t>(rank) + 1, kind);
    }
  }

  GemmArguments arguments(int rank) const { return {a_[rank].matrix(), b_[rank].matrix(), c_[rank].matrix()}; }
  std::vector<GemmArguments> arguments() const {
    std::vector<GemmArguments> all;
    for (int rank = 0; rank < world_; ++rank) all.push_back(arguments(rank));
    return all;
  }
  TestMatrix& a(int rank) { return a_[rank]; }
  TestMatrix& b(int rank) { return b_[rank]; }
  TestMatrix& c(int rank) { return c_[rank]; }

  // All ranks' outputs, byte by byte.
  std::vector<std::byte> output_bytes() const {
    std::vector<std::byte> all;
    for (const TestMatrix& c : c_) all.insert(all.end(), c.bytes().begin(), c.bytes().end());
    return all;
  }

  // Compares every element of every rank's C with the exact product; for integer inputs whose sums the type holds.
  ::testing::AssertionResult is_exact() const {
    const std::vector<double> product = global_product();
    for (int rank = 0; rank < world_; ++rank) {
      if (auto result = rank_is_exact(rank, product); !result) return result;
    }
    return ::testing::AssertionSuccess();
  }
  ::testing::AssertionResult rank_is_exact(int rank) const { return rank_is_exact(rank, global_product()); }

 private:
  // A (M, K) and B (K, N) put together from the ranks' parts, multiplied.
  std::vector<double> global_product() const {
    const auto m = options_.m, n = options_.n, k = options_.k;
    std::vector<double> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n));
    std::vector<double> product(static_cast<std::size_t>(m * n));
    const bool gather = options_.op == Op::kAllGatherGemm;
    for (int rank = 0; rank < world_; ++rank) {
      const std::int64_t k_begin = Split{k, world_}.begin(rank);
      copy(a_[rank], a, gather ? Split{m, world_}.begin(rank) : 0, gather ? 0 : k_begin, k);
      copy(b_[rank], b, gather ? 0 : k_begin, gather ? Split{n, world_}.begin(rank) : 0, n);
    }
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t p = 0; p < k; ++p) {
        const double value = a[static_cast<std::size_t>(i * k + p)];
        for (std::int64_t j = 0; j < n; ++j) {
          product[static_cast<std::size_t>(i * n + j)] += value * b[static_cast<std::size_t>(p * n + j)];
        }
      }
    }
    return product;
  }

  static void copy(const TestMatrix& part, std::vector<double>& whole, std::int64_t row, std::int64_t col,
                   std::int64_t cols) {
    for (std::int64_t r = 0; r < part.matrix().rows; ++r) {
      for (std::int64_t c = 0; c < part.matrix().cols; ++c) {
        whole[static_cast<std::size_t>((row + r) * cols + col + c)] = part.at(r, c);
      }
    }
  }

  ::testing::AssertionResult rank_is_exact(int rank, const std::vector<double>& product) const {
    const TestMatrix& c = c_[rank];
    const std::int64_t row = options_.op == Op::kGemmReduceScatter ? Split{options_.m, world_}.begin(rank) : 0;
    const std::int64_t col = options_.op == Op::kAllGatherGemm ? Split{options_.n, world_}.begin(rank) : 0;
    for (std::int64_t i = 0; i < c.matrix().rows; ++i) {
      for (std::int64_t j = 0; j < c.matrix().cols; ++j) {
        const double want = product[static_cast<std::size_t>((row + i) * options_.n + col + j)];
        if (static_cast<double>(c.at(i, j)) != want) {
          return ::testing::AssertionFailure()
                 << "rank " << rank << ", C(" << i << ", " << j << ") is " << c.at(i, j) << " instead of " << want;
        }
      }
    }
    if (!c.guards_intact()) return ::testing::AssertionFailure() << "rank " << rank << " wrote outside of C";
    return ::testing::AssertionSuccess();
  }

  GemmOptions options_;
  int world_;
  std::vector<TestMatrix> a_, b_, c_;
};

// Tiles small enough that a small matrix has many of them.
inline GemmOptions small_tiles(Op op, std::int64_t m, std::int64_t n, std::int64_t k, Dtype dtype = Dtype::kBf16) {
  GemmOptions options;
  options.op = op;
  options.m = m;
  options.n = n;
  options.k = k;
  options.dtype = dtype;
  options.bm = 16;
  options.bn = 16;
  options.band = 2;
  options.chunk_tiles = 2;
  options.chunk_rows = 16;
  return options;
}

inline constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};

}  // namespace mkernel::test
