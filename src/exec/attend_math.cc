#include "exec/attend_math.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "exec/attend_rows.h"

namespace mkernel {
namespace {

using namespace attend_rows;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kLanes = 16;  // running maxima and sums of a row, so that they fill vector registers

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
