#include "exec/tile_math.h"

#include <Eigen/Core>
#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "base/check.h"
#include "base/half.h"

namespace mkernel {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes: a cache line and the widest vector register

// Rows are converted, summed and rounded this many elements at a time, in buffers that stay in the L1 cache.
constexpr std::int64_t kSpan = 256;

// One type per Dtype: how it is stored, and the way to float and back.
struct Bf16 {
  using Storage = std::uint16_t;
  static float load(Storage bits) { return bf16_to_float(bits); }
  static Storage store(float value) { return float_to_bf16(value); }
};
struct Fp16 {
  using Storage = std::uint16_t;
  static float load(Storage bits) { return fp16_to_float(bits); }
  static Storage store(float value) { return float_to_fp16(value); }
};
struct Fp32 {
  using Storage = float;
  static float load(Storage value) { return value; }
  static Storage store(float value) { return value; }
};

template <class F>
void with_element(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kBf16: return f(Bf16{});
    case Dtype::kFp16: return f(Fp16{});
    case Dtype::kFp32: return f(Fp32{});
  }
}

template <class Storage>
const Storage* element(const ConstMatrix& m, std::int64_t row, std::int64_t col) {
  return static_cast<const Storage*>(m.data) + (row * m.row_stride + col * m.col_stride);
}

template <class Storage>
Storage* element(const OutMatrix& m, std::int64_t row, std::int64_t col) {
  return static_cast<Storage*>(m.data) + (row * m.row_stride + col * m.col_stride);
}

// to[i] = float of from[i * stride].
template <class E>
void load_span(const typename E::Storage* __restrict from, std::int64_t stride, std::int64_t count,
               float* __restrict to) {
  if (stride == 1) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = E::load(from[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i] = E::load(from[i * stride]);
  }
}

// Turns an 8 x 8 block around: each round interleaves the upper four rows with the lower four, which rotates the
// six index bits by one; three rounds exchange row and column.
template <class Lane>
struct Block8 {
  typedef Lane Vector __attribute__((vector_size(8 * sizeof(Lane))));
  Vector row[8];

  void transpose() {
    for (int round = 0; round < 3; ++round) {
      Vector next[8];
      for (int i = 0; i < 4; ++i) {
        next[2 * i] = __builtin_shufflevector(row[i], row[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
      }
      std::copy(next, next + 8, row);
    }
  }
};

// Packs columns [col, col + cols) and rows [row, row + rows) of `from`, row-major without gaps, for a matrix whose
// columns are contiguous (row_stride 1).
template <class E>
void pack_transposed(const ConstMatrix& from, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols,
                     float* __restrict to) {
  using Storage = typename E::Storage;
  const std::int64_t block_rows = rows / 8 * 8;
  const std::int64_t block_cols = cols / 8 * 8;
  for (std::int64_t c = 0; c < block_cols; c += 8) {
    for (std::int64_t r = 0; r < block_rows; r += 8) {
      Block8<Storage> block;
      for (int i = 0; i < 8; ++i) {
        std::memcpy(&block.row[i], element<Storage>(from, row + r, col + c + i), 8 * sizeof(Storage));
      }
      block.transpose();
      for (int i = 0; i < 8; ++i) {
        float* __restrict line = to + (r + i) * cols + c;
        for (int j = 0; j < 8; ++j) line[j] = E::load(block.row[i][j]);
      }
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t first = r < block_rows ? block_cols : 0;
    load_span<E>(element<Storage>(from, row + r, col + first), from.col_stride, cols - first, to + r * cols + first);
  }
}

// Copies a block of `from` as floats into `to`, row-major without gaps whatever the strides of `from`.
void pack(const ConstMatrix& from, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols,
          float* to) {
  with_element(from.dtype, [&](auto e) {
    using E = decltype(e);
    if (from.row_stride == 1 && from.col_stride != 1) return pack_transposed<E>(from, row, rows, col, cols, to);
    for (std::int64_t r = 0; r < rows; ++r) {
      load_span<E>(element<typename E::Storage>(from, row + r, col), from.col_stride, cols, to + r * cols);
    }
  });
}

template <class Storage>
void scatter(const Storage* from, std::int64_t count, const OutMatrix& out, std::int64_t row, std::int64_t col) {
  Storage* to = element<Storage>(out, row, col);
  if (out.col_stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(Storage));
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i * out.col_stride] = from[i];
  }
}

// Rounds `count` <= kSpan sums and stores them in every out, from (row, col) on. All outs of a type get the same bits:
// there is one conversion, whatever their strides.
void store_span(const float* sums, std::int64_t count, const OutMatrix* outs, int out_count, std::int64_t row,
                std::int64_t col) {
  alignas(kAlignment) std::uint16_t rounded[kSpan];
  for (int o = 0; o < out_count; ++o) {
    with_element(outs[o].dtype, [&](auto e) {
      using E = decltype(e);
      if constexpr (std::is_same_v<typename E::Storage, float>) {
        scatter(sums, count, outs[o], row, col);
      } else {
        if (o == 0 || outs[o].dtype != outs[o - 1].dtype) {
          for (std::int64_t i = 0; i < count; ++i) rounded[i] = E::store(sums[i]);
        }
        scatter(rounded, count, outs[o], row, col);
      }
    });
  }
}

void check_outs(std::int64_t rows, std::int64_t cols, const OutMatrix* outs, int out_count) {
  for (int o = 0; o < out_count; ++o) {
    MK_CHECK_OP(outs[o].rows, ==, rows);
    MK_CHECK_OP(outs[o].cols, ==, cols);
  }
}

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Panel = Eigen::Map<RowMajor, Eigen::Aligned64>;
using ConstPanel = Eigen::Map<const RowMajor, Eigen::Aligned64>;

// scratch.sum() = a * b, row-major without gaps.
void multiply(const ConstMatrix& a, const ConstMatrix& b, TileScratch& scratch) {
  Panel sum(scratch.sum(), a.rows, b.cols);
  for (std::int64_t first = 0; first < a.cols; first += kGemmPanelK) {
    const std::int64_t terms = std::min(kGemmPanelK, a.cols - first);
    pack(a, 0, a.rows, first, terms, scratch.a_panel());
    pack(b, first, terms, 0, b.cols, scratch.b_panel());
    const ConstPanel a_panel(scratch.a_panel(), a.rows, terms);  // (R, p)
    const ConstPanel b_panel(scratch.b_panel(), terms, b.cols);  // (p, C)
    if (first == 0) {
      sum.noalias() = a_panel * b_panel;  // (R, C)
      continue;
    }
    // Not `sum += a_panel * b_panel`: Eigen may then carry the sum through every addition of the panel.
    Panel product(scratch.product(), a.rows, b.cols);
    product.noalias() = a_panel * b_panel;
    sum += product;
  }
}

std::int64_t round_up(std::int64_t floats) {
  constexpr std::int64_t kStep = kAlignment / static_cast<std::int64_t>(sizeof(float));
  return (floats + kStep - 1) / kStep * kStep;
}

template <std::size_t kBytes>
void copy_elements(const ConstMatrix& in, const OutMatrix& out) {
  constexpr auto kStep = static_cast<std::int64_t>(kBytes);
  const bool rows_contiguous = in.col_stride == 1 && out.col_stride == 1;
  for (std::int64_t r = 0; r < in.rows; ++r) {
    const char* from = static_cast<const char*>(in.data) + r * in.row_stride * kStep;
    char* to = static_cast<char*>(out.data) + r * out.row_stride * kStep;
    if (rows_contiguous) {
      std::memcpy(to, from, static_cast<std::size_t>(in.cols) * kBytes);
    } else {
      for (std::int64_t c = 0; c < in.cols; ++c) {
        std::memcpy(to + c * out.col_stride * kStep, from + c * in.col_stride * kStep, kBytes);
      }
    }
  }
}

}  // namespace

void TileScratch::Free::operator()(float* memory) const {
  ::operator delete (memory, std::align_val_t{static_cast<std::size_t>(kAlignment)});
}

TileScratch::TileScratch(std::int64_t max_rows, std::int64_t max_cols, std::int64_t k)
    : max_rows_(max_rows), max_cols_(max_cols), max_k_(k) {
  MK_CHECK_OP(max_rows, >=, 0);
  MK_CHECK_OP(max_cols, >=, 0);
  MK_CHECK_OP(k, >=, 0);
  constexpr std::int64_t kMaxSide = std::int64_t{1} << 28;  // keeps every product below in 64 bits
  MK_CHECK_OP(max_rows, <=, kMaxSide);
  MK_CHECK_OP(max_cols, <=, kMaxSide);
  const std::int64_t depth = std::min(k, kGemmPanelK);
  const std::int64_t a_size = round_up(max_rows * depth);
  const std::int64_t b_size = round_up(max_cols * depth);
  const std::int64_t sum_size = round_up(max_rows * max_cols);
  const std::int64_t product_size = k > kGemmPanelK ? sum_size : 0;
  const auto bytes = static_cast<std::size_t>(a_size + b_size + sum_size + product_size) * sizeof(float);
  memory_.reset(static_cast<float*>(::operator new (bytes, std::align_val_t{static_cast<std::size_t>(kAlignment)})));
  a_panel_ = memory_.get();
  b_panel_ = a_panel_ + a_size;
  sum_ = b_panel_ + b_size;
  if (product_size > 0) product_ = sum_ + sum_size;
}

void gemm_tile(const ConstMatrix& a, const ConstMatrix& b, const OutMatrix* outs, int out_count, TileScratch& scratch) {
  MK_CHECK_OP(a.cols, ==, b.rows);
  check_outs(a.rows, b.cols, outs, out_count);
  if (a.rows == 0 || b.cols == 0) return;
  MK_CHECK_OP(a.rows, <=, scratch.max_rows());
  MK_CHECK_OP(b.cols, <=, scratch.max_cols());
  MK_CHECK_OP(a.cols, <=, scratch.max_k());
  if (a.cols == 0) {
    std::fill_n(scratch.sum(), a.rows * b.cols, 0.0f);
  } else {
    multiply(a, b, scratch);
  }
  for (std::int64_t r = 0; r < a.rows; ++r) {
    for (std::int64_t c = 0; c < b.cols; c += kSpan) {
      store_span(scratch.sum() + r * b.cols + c, std::min(kSpan, b.cols - c), outs, out_count, r, c);
    }
  }
}

void reduce_tile(std::span<const ConstMatrix> inputs, const OutMatrix* outs, int out_count, TileScratch&) {
  MK_CHECK(!inputs.empty());
  const std::int64_t rows = inputs[0].rows;
  const std::int64_t cols = inputs[0].cols;
  for (const ConstMatrix& input : inputs) {
    MK_CHECK_OP(input.rows, ==, rows);
    MK_CHECK_OP(input.cols, ==, cols);
  }
  check_outs(rows, cols, outs, out_count);
  alignas(kAlignment) float sum[kSpan];
  alignas(kAlignment) float addend[kSpan];
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; c += kSpan) {
      const std::int64_t count = std::min(kSpan, cols - c);
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        with_element(inputs[i].dtype, [&](auto e) {
          using E = decltype(e);
          load_span<E>(element<typename E::Storage>(inputs[i], r, c), inputs[i].col_stride, count,
                       i == 0 ? sum : addend);
        });
        if (i == 0) continue;
        for (std::int64_t j = 0; j < count; ++j) sum[j] += addend[j];
      }
      store_span(sum, count, outs, out_count, r, c);
    }
  }
}

void copy_tile(const ConstMatrix& in, const OutMatrix* outs, int out_count) {
  check_outs(in.rows, in.cols, outs, out_count);
  if (in.rows == 0 || in.cols == 0) return;
  for (int o = 0; o < out_count; ++o) {
    MK_CHECK_OP(static_cast<int>(outs[o].dtype), ==, static_cast<int>(in.dtype));
    if (dtype_bytes(in.dtype) == 2) {
      copy_elements<2>(in, outs[o]);
    } else {
      copy_elements<4>(in, outs[o]);
    }
  }
}

}  // namespace mkernel
