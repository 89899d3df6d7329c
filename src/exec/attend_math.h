// The arithmetic of one kAttend task: folds a run of keys and values into the running softmax of a tile of queries.
// Host executor and simulator both call it. As in tile_math.h the bits of a result depend on the values, on the sizes
// and on the ranges, on nothing else.
//
// The state of a row is (O, m, l): with base m, the largest score so far, O = sum of exp(s - m) v and l = sum of
// exp(s - m), in fp32, not normalised. Keys are taken in blocks of kAttendKeys from the first on; each block costs
// every row at most one rounding of O and l by exp(m_old - m_new) and one addition, so errors grow with the blocks of a
// sequence and not with how it is divided over ranks (attention_reference.cc counts on it). Weights are not rounded to
// the input type, as a GPU does before it multiplies by V.
#pragma once
#include <cstdint>
#include <vector>

#include "exec/tile_math.h"
#include "plan/attention_spec.h"

namespace mkernel {

inline constexpr std::int64_t kAttendKeys = 128;

// exp(x) for x <= 0 within 2^-22, relative; 0 below -87; NaN stays.
float exp_of_negative(float x);

// Working memory for tiles of up to `rows` queries with heads of `dim`, for one thread at a time.
class AttendScratch {
 public:
  AttendScratch(std::int64_t rows, std::int64_t dim);

  std::int64_t rows() const { return rows_; }
  std::int64_t dim() const { return dim_; }
  // Room for each row's visible keys, for the caller of attend_tile().
  KeyRange* ranges() { return ranges_.data(); }
  // Each is aligned to 64 bytes.
  float* q() { return at(0); }                                       // (rows, dim)
  float* keys() { return q() + room(rows_ * dim_); }                 // (kAttendKeys, dim)
  float* scores() { return keys() + room(kAttendKeys * dim_); }      // (rows, kAttendKeys)
  float* product() { return scores() + room(rows_ * kAttendKeys); }  // (rows, dim)
  float* state() { return product() + room(rows_ * dim_); }          // (rows, dim), (rows), (rows)

 private:
  struct alignas(64) Line {
    float value[16];
  };
  static std::int64_t room(std::int64_t floats) { return (floats + 15) / 16 * 16; }
  float* at(std::size_t line) { return lines_.data()[line].value; }

  std::int64_t rows_;
  std::int64_t dim_;
  std::vector<Line> lines_;
  std::vector<KeyRange> ranges_;
};

// One task. There is at least one row.
struct AttendTile {
  ConstMatrix q;                     // (rows, dim)
  ConstMatrix k;                     // (keys, dim); no keys: nothing is folded in
  ConstMatrix v;                     // (keys, dim)
  const KeyRange* ranges = nullptr;  // by row: which of `keys` it sees
  float scale = 1;
  const float* resume = nullptr;  // the state to go on from; null: begin
  float* park = nullptr;          // where the state goes; null: finish, into `o` and `lse`
  OutMatrix o;                    // (rows, dim)
  OutMatrix lse;                  // (rows, 1) fp32, or no rows when it is not wanted
};

void attend_tile(const AttendTile& tile, AttendScratch& scratch);

}  // namespace mkernel
