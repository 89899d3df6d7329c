#include "exec/attend_math.h"

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/half.h"

namespace mkernel {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kLanes = 16;  // running maxima and sums of a row, so that they fill vector registers

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Panel = Eigen::Map<RowMajor, Eigen::Aligned64>;
using ConstPanel = Eigen::Map<const RowMajor, Eigen::Aligned64>;

// Cephes' expf (S. Moshier): x = n ln 2 + f, a polynomial of f, times 2^n. Written without branches, for vectors.
inline float exp_inline(float x) {
  constexpr float kLowest = -87.0f;  // the result is still a normal number
  const float c = x >= kLowest ? x : kLowest;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float n = (c * 1.44269504088896341f + kMagic) - kMagic;
  const float f = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * (f * f) + f + 1.0f;
  const float power = std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
  return x >= kLowest ? y * power : x < kLowest ? 0.0f : x;
}

// Rows [first, first + rows) of `from` as floats, row-major without gaps.
void load_rows(const ConstMatrix& from, std::int64_t first, std::int64_t rows, float* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t offset = (first + r) * from.row_stride;
    float* line = to + r * from.cols;
    switch (from.dtype) {
      case Dtype::kBf16: {
        const auto* at = static_cast<const std::uint16_t*>(from.data) + offset;
        for (std::int64_t c = 0; c < from.cols; ++c) line[c] = bf16_to_float(at[c]);
        break;
      }
      case Dtype::kFp16: {
        const auto* at = static_cast<const std::uint16_t*>(from.data) + offset;
        for (std::int64_t c = 0; c < from.cols; ++c) line[c] = fp16_to_float(at[c]);
        break;
      }
      case Dtype::kFp32: std::copy_n(static_cast<const float*>(from.data) + offset, from.cols, line); break;
    }
  }
}

void store_row(const float* from, const OutMatrix& to, std::int64_t row) {
  const std::int64_t offset = row * to.row_stride;
  for (std::int64_t c = 0; c < to.cols; ++c) {
    switch (to.dtype) {
      case Dtype::kBf16: static_cast<std::uint16_t*>(to.data)[offset + c] = float_to_bf16(from[c]); break;
      case Dtype::kFp16: static_cast<std::uint16_t*>(to.data)[offset + c] = float_to_fp16(from[c]); break;
      case Dtype::kFp32: static_cast<float*>(to.data)[offset + c] = from[c]; break;
    }
  }
}

// A row's scores, scaled in place; returns their maximum (NaNs left out).
float scale_and_max(float* scores, std::int64_t count, float scale) {
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -kInfinity);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float s = scores[i + l] * scale;
      scores[i + l] = s;
      lanes[l] = s > lanes[l] ? s : lanes[l];
    }
  }
  for (; i < count; ++i) {
    scores[i] *= scale;
    lanes[0] = scores[i] > lanes[0] ? scores[i] : lanes[0];
  }
  return *std::max_element(lanes, lanes + kLanes);
}

// A row's scores become weights exp(s - base); returns their sum.
float weigh_and_sum(float* scores, std::int64_t count, float base) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      scores[i + l] = exp_inline(scores[i + l] - base);
      lanes[l] += scores[i + l];
    }
  }
  for (; i < count; ++i) {
    scores[i] = exp_inline(scores[i] - base);
    lanes[0] += scores[i];
  }
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

class Fold {
 public:
  Fold(const AttendTile& tile, AttendScratch& scratch)
      : tile_(tile),
        scratch_(scratch),
        rows_(tile.q.rows),
        dim_(tile.o.cols),
        sums_(scratch.state()),
        maxima_(sums_ + rows_ * dim_),
        weights_(maxima_ + rows_) {}

  void begin() {
    const std::int64_t size = rows_ * (dim_ + 2);
    if (tile_.resume != nullptr) {
      std::copy_n(tile_.resume, size, sums_);
    } else {
      std::fill_n(sums_, size, 0.0f);
      std::fill_n(maxima_, rows_, -kInfinity);
    }
  }

  // All blocks that some row sees.
  void fold_all() {
    std::int64_t first = tile_.k.rows;
    std::int64_t last = 0;
    for (std::int64_t r = 0; r < rows_; ++r) {
      if (tile_.ranges[r].empty()) continue;
      first = std::min(first, tile_.ranges[r].begin);
      last = std::max(last, tile_.ranges[r].end);
    }
    if (first >= last) return;
    load_rows(tile_.q, 0, rows_, scratch_.q());
    for (std::int64_t block = first / kAttendKeys * kAttendKeys; block < last; block += kAttendKeys) {
      fold_block(block, std::min(kAttendKeys, tile_.k.rows - block));
    }
  }

  void finish() {
    if (tile_.park != nullptr) {
      std::copy_n(sums_, rows_ * (dim_ + 2), tile_.park);
      return;
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      float* line = sums_ + r * dim_;
      const float total = weights_[r];
      // Nothing was seen: O is 0 already. (A NaN is no 0 and stays.)
      if (total != 0) {
        for (std::int64_t c = 0; c < dim_; ++c) line[c] /= total;
      }
      store_row(line, tile_.o, r);
      if (tile_.lse.rows == 0) continue;
      const float lse = total == 0 ? -kInfinity : maxima_[r] + std::log(total);
      store_row(&lse, tile_.lse, r);
    }
  }

 private:
  void fold_block(std::int64_t first, std::int64_t keys) {
    const ConstPanel q(scratch_.q(), rows_, dim_);
    Panel kv(scratch_.keys(), keys, dim_);
    Panel scores(scratch_.scores(), rows_, keys);
    load_rows(tile_.k, first, keys, scratch_.keys());
    scores.noalias() = q * kv.transpose();  // (rows, keys)
    for (std::int64_t r = 0; r < rows_; ++r) weigh_row(r, first, keys, scratch_.scores() + r * keys);
    load_rows(tile_.v, first, keys, scratch_.keys());
    // Apart from the running sum, so that this is rounded once per block and not once per key.
    Panel product(scratch_.product(), rows_, dim_);
    product.noalias() = scores * kv;  // (rows, dim)
    const float* from = scratch_.product();
    for (std::int64_t i = 0; i < rows_ * dim_; ++i) sums_[i] += from[i];
  }

  // Scores of a row become weights on a new base, to which its state is brought too.
  void weigh_row(std::int64_t row, std::int64_t first, std::int64_t keys, float* scores) {
    const KeyRange& range = tile_.ranges[row];
    const std::int64_t begin = std::clamp<std::int64_t>(range.begin - first, 0, keys);
    const std::int64_t end = std::clamp<std::int64_t>(range.end - first, begin, keys);
    std::fill(scores, scores + begin, 0.0f);
    std::fill(scores + end, scores + keys, 0.0f);
    if (begin == end) return;
    const float old = maxima_[row];
    const float found = scale_and_max(scores + begin, end - begin, tile_.scale);
    const float now = found > old ? found : old;
    const float base = now == -kInfinity ? 0 : now;  // all scores are -infinity or NaN: weights 0 or NaN, not inf - inf
    if (now != old && old != -kInfinity) {
      const float factor = exp_inline(old - base);
      weights_[row] *= factor;
      float* line = sums_ + row * dim_;
      for (std::int64_t c = 0; c < dim_; ++c) line[c] *= factor;
    }
    maxima_[row] = now;
    weights_[row] += weigh_and_sum(scores + begin, end - begin, base);
  }

  const AttendTile& tile_;
  AttendScratch& scratch_;
  const std::int64_t rows_;
  const std::int64_t dim_;
  float* const sums_;
  float* const maxima_;
  float* const weights_;
};

}  // namespace

float exp_of_negative(float x) { return exp_inline(x); }

AttendScratch::AttendScratch(std::int64_t rows, std::int64_t dim) : rows_(rows), dim_(dim) {
  if (rows == 0) return;
  const std::int64_t floats =
      2 * room(rows * dim) + room(kAttendKeys * dim) + room(rows * kAttendKeys) + room(rows * (dim + 2));
  lines_.resize(static_cast<std::size_t>(floats / 16));
  ranges_.resize(static_cast<std::size_t>(rows));
}

void attend_tile(const AttendTile& tile, AttendScratch& scratch) {
  MK_CHECK_OP(tile.q.rows, <=, scratch.rows());
  MK_CHECK_OP(tile.o.cols, ==, scratch.dim());
  MK_CHECK_OP(tile.k.rows, ==, tile.v.rows);
  Fold fold(tile, scratch);
  fold.begin();
  if (tile.k.rows > 0) fold.fold_all();
  fold.finish();
}

}  // namespace mkernel
