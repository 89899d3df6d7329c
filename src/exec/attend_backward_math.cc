#include "exec/attend_backward_math.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "exec/attend_rows.h"

namespace mkernel {
namespace {

using namespace attend_rows;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kHighest =
    88.0f;  // exp of it is still a number; a log-sum-exp that belongs to the scores is never passed

class Backward {
 public:
  Backward(const BackwardTile& tile, BackwardScratch& scratch)
      : tile_(tile),
        scratch_(scratch),
        dim_(scratch.dim()),
        q_size_(tile.rows * (dim_ + 1)),
        k_size_(tile.keys * dim_),
        q_sums_(begin(tile.q_sums, q_size_, scratch.sums())),
        k_sums_(begin(tile.k_sums, k_size_, scratch.k_sums())),
        v_sums_(begin(tile.v_sums, k_size_, scratch.v_sums())) {}

  void run() {
    const bool fresh = tile_.q_sums.resume == nullptr && tile_.rows > 0;
    if (fresh || tile_.meets) load_rows(tile_.d_o, 0, tile_.rows, scratch_.d_o());
    if (fresh) find_deltas();
    if (tile_.meets) add();
    if (tile_.rows > 0 && tile_.q_sums.park == nullptr) finish(q_sums_, tile_.rows, tile_.scale, tile_.dq);
    if (tile_.keys > 0 && tile_.k_sums.park == nullptr) {
      finish(k_sums_, tile_.keys, tile_.scale, tile_.dk);
      finish(v_sums_, tile_.keys, 1, tile_.dv);
    }
  }

 private:
  // Where a running sum is worked on: in its place, or in scratch when it ends here.
  static float* begin(const RunningSums& sums, std::int64_t size, float* scratch) {
    float* at = sums.park != nullptr ? sums.park : scratch;
    if (sums.resume == nullptr) {
      std::fill_n(at, size, 0.0f);
    } else if (sums.resume != at) {
      std::copy_n(sums.resume, size, at);
    }
    return at;
  }

  void find_deltas() {
    load_rows(tile_.o, 0, tile_.rows, scratch_.q());
    for (std::int64_t r = 0; r < tile_.rows; ++r) {
      const float* o = scratch_.q() + r * dim_;
      const float* d_o = scratch_.d_o() + r * dim_;
      float sum = 0;
      for (std::int64_t c = 0; c < dim_; ++c) sum += o[c] * d_o[c];
      deltas()[r] = sum;
    }
  }

  void add() {
    load_rows(tile_.q, 0, tile_.rows, scratch_.q());
    load_rows(tile_.k, 0, tile_.keys, scratch_.k());
    load_rows(tile_.v, 0, tile_.keys, scratch_.v());
    const ConstPanel q(scratch_.q(), tile_.rows, dim_);
    const ConstPanel d_o(scratch_.d_o(), tile_.rows, dim_);
    const ConstPanel k(scratch_.k(), tile_.keys, dim_);
    const ConstPanel v(scratch_.v(), tile_.keys, dim_);
    Panel p(scratch_.weights(), tile_.rows, tile_.keys);
    Panel ds(scratch_.d_weights(), tile_.rows, tile_.keys);
    p.noalias() = q * k.transpose();     // (rows, keys)
    ds.noalias() = d_o * v.transpose();  // (rows, keys)
    for (std::int64_t r = 0; r < tile_.rows; ++r) weigh_row(r);
    Panel keys(scratch_.product(), tile_.keys, dim_);
    keys.noalias() = p.transpose() * d_o;
    add_product(v_sums_, k_size_);
    keys.noalias() = ds.transpose() * q;
    add_product(k_sums_, k_size_);
    Panel queries(scratch_.product(), tile_.rows, dim_);
    queries.noalias() = ds * k;
    add_product(q_sums_, tile_.rows * dim_);
  }

  // A row's scores and dP become P and dS; both are 0 where nothing is seen.
  void weigh_row(std::int64_t row) {
    float* p = scratch_.weights() + row * tile_.keys;
    float* ds = scratch_.d_weights() + row * tile_.keys;
    const float lse = tile_.lse[row];
    const KeyRange& range = tile_.ranges[row];
    const bool sees = !range.empty() && lse != -kInfinity;
    const std::int64_t first = sees ? range.begin : 0;
    const std::int64_t last = sees ? range.end : 0;
    for (float* line : {p, ds}) {
      std::fill(line, line + first, 0.0f);
      std::fill(line + last, line + tile_.keys, 0.0f);
    }
    const float delta = deltas()[row];
    for (std::int64_t i = first; i < last; ++i) {
      const float x = p[i] * tile_.scale - lse;
      const float weight = exp_inline(x > kHighest ? kHighest : x);
      p[i] = weight;
      ds[i] = weight * (ds[i] - delta);
    }
  }

  // Apart from the running sum, so that this is rounded once per tile and not once per row.
  void add_product(float* sums, std::int64_t size) {
    const float* from = scratch_.product();
    for (std::int64_t i = 0; i < size; ++i) sums[i] += from[i];
  }

  void finish(const float* sums, std::int64_t rows, float factor, const OutMatrix& out) {
    float* line = scratch_.product();
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < dim_; ++c) line[c] = sums[r * dim_ + c] * factor;
      store_row(line, out, r);
    }
  }

  float* deltas() { return q_sums_ + tile_.rows * dim_; }

  const BackwardTile& tile_;
  BackwardScratch& scratch_;
  const std::int64_t dim_;
  const std::int64_t q_size_;
  const std::int64_t k_size_;
  float* const q_sums_;
  float* const k_sums_;
  float* const v_sums_;
};

}  // namespace

std::int64_t BackwardScratch::floats(std::int64_t rows, std::int64_t keys, std::int64_t dim) {
  return 2 * room(rows * dim) + room(rows * (dim + 1)) + 4 * room(keys * dim) + 2 * room(rows * keys) +
         room(std::max(rows, keys) * dim);
}

BackwardScratch::BackwardScratch(std::int64_t rows, std::int64_t keys, std::int64_t dim)
    : rows_(rows), keys_(keys), dim_(dim) {
  if (rows == 0) return;
  lines_.resize(static_cast<std::size_t>(floats(rows, keys, dim) / 16));
  ranges_.resize(static_cast<std::size_t>(rows));
}

void backward_tile(const BackwardTile& tile, BackwardScratch& scratch) {
  MK_CHECK_OP(tile.rows, <=, scratch.rows());
  MK_CHECK_OP(tile.keys, <=, scratch.keys());
  Backward(tile, scratch).run();
}

}  // namespace mkernel
