// The arithmetic of one kAttendBackward task: what a tile of keys and a tile of queries are to each other, added to the
// gradients of both. Host executor and simulator both call it. As in tile_math.h the bits of a result depend on the
// values, on the sizes and on the ranges, on nothing else.
//
// With the log-sum-exp L of a query from the forward, P = exp(scale q k - L), dP = dO V^T, delta = rowsum(dO * O),
// dS = P * (dP - delta): dV += P^T dO, dK += dS^T Q and dQ += dS K, the last two times the scale when they are
// finished. Everything is fp32, and each product of a tile is summed by itself before it is added, so a running sum is
// rounded once per tile that it has met (attention_gradients.cc counts on it). P and dS are not rounded to the input
// type, as a GPU does before it multiplies by them.
#pragma once
#include <cstdint>
#include <vector>

#include "exec/tile_math.h"
#include "plan/attention_spec.h"

namespace mkernel {

// Working memory for up to `rows` queries and `keys` keys with heads of `dim`, for one thread at a time.
class BackwardScratch {
 public:
  BackwardScratch(std::int64_t rows, std::int64_t keys, std::int64_t dim);

  std::int64_t rows() const { return rows_; }
  std::int64_t keys() const { return keys_; }
  std::int64_t dim() const { return dim_; }
  // Room for each row's visible keys, for the caller of backward_tile().
  KeyRange* ranges() { return ranges_.data(); }
  static std::int64_t floats(std::int64_t rows, std::int64_t keys, std::int64_t dim);
  // Each is aligned to 64 bytes.
  float* q() { return lines_.data()->value; }                     // (rows, dim)
  float* d_o() { return q() + room(rows_ * dim_); }               // (rows, dim)
  float* sums() { return d_o() + room(rows_ * dim_); }            // (rows, dim), then (rows) deltas
  float* k() { return sums() + room(rows_ * (dim_ + 1)); }        // (keys, dim)
  float* v() { return k() + room(keys_ * dim_); }                 // (keys, dim)
  float* k_sums() { return v() + room(keys_ * dim_); }            // (keys, dim)
  float* v_sums() { return k_sums() + room(keys_ * dim_); }       // (keys, dim)
  float* weights() { return v_sums() + room(keys_ * dim_); }      // (rows, keys)
  float* d_weights() { return weights() + room(rows_ * keys_); }  // (rows, keys)
  float* product() { return d_weights() + room(rows_ * keys_); }  // (rows or keys, dim)

 private:
  struct alignas(64) Line {
    float value[16];
  };
  static std::int64_t room(std::int64_t floats) { return (floats + 15) / 16 * 16; }

  std::int64_t rows_;
  std::int64_t keys_;
  std::int64_t dim_;
  std::vector<Line> lines_;
  std::vector<KeyRange> ranges_;
};

// Running sums: gone on from, and left or finished. Null: they begin here, or are finished here. Both may be the same
// memory.
struct RunningSums {
  const float* resume = nullptr;
  float* park = nullptr;
};

// One task. Matrices without rows are left alone: a tile may have no queries, no keys, or neither.
struct BackwardTile {
  std::int64_t rows = 0;
  std::int64_t keys = 0;
  bool meets = false;  // some query sees some key; else only what follows `ranges` and, to begin, O and dO count
  ConstMatrix q;       // (rows, dim)
  ConstMatrix k;       // (keys, dim)
  ConstMatrix v;       // (keys, dim)
  const float* lse = nullptr;        // (rows)
  const KeyRange* ranges = nullptr;  // by row: which of the keys it sees
  float scale = 1;
  ConstMatrix o;    // (rows, dim), to begin
  ConstMatrix d_o;  // (rows, dim), to begin or when they meet
  RunningSums q_sums;
  OutMatrix dq;  // (rows, dim)
  RunningSums k_sums;
  OutMatrix dk;  // (keys, dim)
  RunningSums v_sums;
  OutMatrix dv;  // (keys, dim)
};

void backward_tile(const BackwardTile& tile, BackwardScratch& scratch);

}  // namespace mkernel
