// The arithmetic of one tile: product, sum and copy. The host executor and the simulator both call it, so that their
// results have the same bits.
//
// The bits of a result depend on the values and on rows, cols and k of the call, on nothing else: not on strides, on
// the alignment of pointers, on the thread, or on what ran before. (Another CPU may give other bits: Eigen chooses its
// kernels and its blocking by instruction set and cache size.)
//
// Pointers are aligned to their element. They may be null when the matrix has no elements.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "mkernel/types.h"

namespace mkernel {

// Element (i, j) is at data + (i * row_stride + j * col_stride) elements: row-major has col_stride 1, the transpose of
// a row-major matrix has row_stride 1. Strides may be negative, for inputs also zero.
struct ConstMatrix {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFp32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

struct OutMatrix {
  void* data = nullptr;
  Dtype dtype = Dtype::kFp32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

// gemm_tile cuts K into panels of this many terms. Each panel is summed by itself, then the panels are added from
// first to last, so a term takes part in at most kGemmPanelK - 1 + (panels - 1) additions: rounding errors grow with
// K / kGemmPanelK, not with K (reference.cc counts on it). 256 keeps the panels of a 128 x 256 tile in half of a 1 MiB
// L2 cache and costs under 2 % of speed against 1024 (Zen 4, one core, 2025-12).
inline constexpr std::int64_t kGemmPanelK = 256;

// Working memory of gemm_tile, for one thread at a time: with p = min(k, kGemmPanelK), two operand panels of
// (max_rows + max_cols) * p floats and one or two accumulators of max_rows * max_cols floats; 512 KiB for 128 x 256.
// Nothing grows afterwards, though Eigen takes up to as much again from the heap while it multiplies.
class TileScratch {
 public:
  // Serves tiles of up to max_rows x max_cols with inner sizes of up to `k`.
  TileScratch(std::int64_t max_rows, std::int64_t max_cols, std::int64_t k);

  std::int64_t max_rows() const { return max_rows_; }
  std::int64_t max_cols() const { return max_cols_; }
  std::int64_t max_k() const { return max_k_; }

  // Each is aligned to 64 bytes.
  float* a_panel() { return a_panel_; }
  float* b_panel() { return b_panel_; }
  float* sum() { return sum_; }
  float* product() { return product_; }  // null when one panel holds all of k

 private:
  struct Free {
    void operator()(float* memory) const;
  };

  std::int64_t max_rows_;
  std::int64_t max_cols_;
  std::int64_t max_k_;
  std::unique_ptr<float, Free> memory_;
  float* a_panel_ = nullptr;
  float* b_panel_ = nullptr;
  float* sum_ = nullptr;
  float* product_ = nullptr;
};

// Every out (R, C) = a (R, K) * b (K, C), summed in fp32 and rounded once to the type of that out. K = 0 gives zeros;
// no rows or no columns: nothing happens. Outs overlap neither the inputs nor each other.
void gemm_tile(const ConstMatrix& a, const ConstMatrix& b, const OutMatrix* outs, int out_count, TileScratch& scratch);

// Every out = inputs[0] + inputs[1] + ..., added in this order in fp32 and rounded once. The sum starts from the first
// input, not from 0, so a sum of -0.0 stays -0.0. There is at least one input, and any size is served. An out may be
// exactly one of the inputs (same place, same strides, same type); no other overlap.
void reduce_tile(std::span<const ConstMatrix> inputs, const OutMatrix* outs, int out_count, TileScratch& scratch);

// Every out gets the bytes of `in`, which has the same type: NaN payloads survive. Any size; no overlap.
void copy_tile(const ConstMatrix& in, const OutMatrix* outs, int out_count);

}  // namespace mkernel
