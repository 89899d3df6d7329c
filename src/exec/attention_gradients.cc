#include "exec/attention_gradients.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "exec/attend_backward_math.h"
#include "exec/rounding.h"
#include "exec/verdict.h"
#include "plan/ring_attention_backward.h"

// The bound
// =========
// u = 2^-24, i a query, j a key that it sees, L the exact log-sum-exp, D = sum dO * O exact, L' and O' what was given.
// A product of n terms in fp32, in any order, is within gamma_n of the sum of its terms' sizes.
//
// 1. The exponent: a score is a product of dim terms times the scale, from which L' is subtracted, rounded once:
//        |h_ij| <= gamma_(dim+1) |scale| sum |q||k| + |L' - L| + u |s - L'| + 2^-21,
//    the last for exp (2^-22, attend_math.h) and its product. So |P' - P| <= P (e^h - 1) + 2^-125 =: p, the last for
//    what exp takes for 0.
// 2. |dP' - dP| <= gamma_dim sum |dO||v|; |D' - D| <= gamma_dim sum |dO||O'| + sum |dO||O' - O|. With t = dP - D, t' is
//    off by both and one rounding =: t_e, and |dS' - dS| <= P t_e + p (|t| + t_e) + u (P + p)(|t| + t_e) =: s.
// 3. dQ adds up to bn terms per tile of keys, then tile after tile: n = bn + tiles + 1, the scale included:
//        |scale| sum_j (s |k| + gamma_n (|dS| + s) |k|), then rounded to its type.
//    dK the same over own queries in tiles of bm: n = bm + phases + 1; dV without scale: sum_i (p |dO| + gamma_n (P +
//    p) |dO|).
// 4. Parts of dK and dV of a rank are rounded to the partial type, added in a node in fp32, rounded to it again where
//    there are several nodes, added over nodes and rounded to their type. Each step is counted with the exact sum that
//    it rounds and what that may be off by.
// 5. Products below 2^-126 lose at most 2^-149 each; counted with 2^-120 per term.
//
// The fp64 reference's own errors are smaller by 2^-29 and covered by Verdict's factor of 1 + 2^-20.

namespace mkernel {
namespace {

using Matrix64 = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr std::int64_t kBlockRows = 64;  // queries at a time
constexpr double kTiny = 0x1p-120;

Matrix64 load(const PlanSpec& spec, const void* from, std::int64_t first, std::int64_t rows) {
  const std::int64_t dim = spec.attention.dim;
  const ConstMatrix matrix{from, spec.dtype, 0, dim, dim, 1};
  Matrix64 to(rows, dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < dim; ++c) to(r, c) = load_element(matrix, first + r, c);
  }
  return to;
}

std::vector<std::int64_t> spread(std::int64_t all, std::int64_t rows) {
  const std::int64_t count = rows == 0 ? all : std::min(rows, all);
  std::vector<std::int64_t> chosen;
  for (std::int64_t i = 0; i < count; ++i) chosen.push_back(count > 1 ? i * (all - 1) / (count - 1) : 0);
  return chosen;
}

// The chosen rows of one head of `size`, counted in it.
std::vector<std::int64_t> of_head(const std::vector<std::int64_t>& chosen, std::int64_t head, std::int64_t size) {
  std::vector<std::int64_t> rows;
  for (const std::int64_t row : chosen) {
    if (row / size == head) rows.push_back(row % size);
  }
  return rows;
}

Matrix64 pick_rows(const Matrix64& from, const std::vector<std::int64_t>& rows) {
  Matrix64 to(static_cast<Eigen::Index>(rows.size()), from.cols());
  for (std::size_t i = 0; i < rows.size(); ++i) to.row(static_cast<Eigen::Index>(i)) = from.row(rows[i]);
  return to;
}
Matrix64 pick_cols(const Matrix64& from, const std::vector<std::int64_t>& cols) {
  if (static_cast<Eigen::Index>(cols.size()) == from.cols()) return from;
  Matrix64 to(from.rows(), static_cast<Eigen::Index>(cols.size()));
  for (std::size_t i = 0; i < cols.size(); ++i) to.col(static_cast<Eigen::Index>(i)) = from.col(cols[i]);
  return to;
}

// Sums and what they may be off by.
struct Sum {
  Matrix64 value, error;
  Sum(std::int64_t rows, std::int64_t dim) : value(Matrix64::Zero(rows, dim)), error(value) {}
};

// One block of queries against some of the keys: P, dS and their bounds.
struct Pairs {
  Matrix64 p, p_error, ds, ds_error;
};

class GradientCheck {
 public:
  GradientCheck(const PlanSpec& spec, const GradientData& data, std::int64_t rows)
      : spec_(spec),
        a_(spec.attention),
        data_(data),
        plan_(RingAttentionBackwardPlan::make(spec)),
        q_rows_(spread(a_.batch * a_.heads * a_.seq_q, rows)),
        k_rows_(spread(a_.batch * a_.kv_heads * a_.seq_k, rows)) {}

  GradientReport run() {
    for (std::int64_t head = 0; head < a_.batch * a_.kv_heads; ++head) check_key_head(head);
    GradientReport report;
    report.dq = dq_.report(static_cast<std::int64_t>(q_rows_.size()));
    report.dk = dk_.report(static_cast<std::int64_t>(k_rows_.size()));
    report.dv = dv_.report(static_cast<std::int64_t>(k_rows_.size()));
    return report;
  }

 private:
  void check_key_head(std::int64_t kv_head) {
    k_ = load(spec_, data_.k, kv_head * a_.seq_k, a_.seq_k);
    v_ = load(spec_, data_.v, kv_head * a_.seq_k, a_.seq_k);
    keys_ = a_.seq_k == 0 ? std::vector<std::int64_t>{} : of_head(k_rows_, kv_head, a_.seq_k);
    const auto count = static_cast<std::int64_t>(keys_.size());
    k_parts_.assign(static_cast<std::size_t>(spec_.topo.world()), Sum(count, a_.dim));
    v_parts_ = k_parts_;
    for (std::int64_t h = 0; h < plan_.group; ++h) {
      const std::int64_t head = kv_head * plan_.group + h;
      const std::vector<std::int64_t> wanted =
          a_.seq_q == 0 ? std::vector<std::int64_t>{} : of_head(q_rows_, head, a_.seq_q);
      const SequenceSplit split = a_.q_split(spec_.topo);
      for (std::int32_t rank = 0; rank < spec_.topo.world(); ++rank) {
        for (std::int32_t segment = 0; segment < split.segments(); ++segment) {
          const std::int64_t end = split.begin(rank, segment) + split.size(rank, segment);
          for (std::int64_t q = split.begin(rank, segment); q < end; q += kBlockRows) {
            add_block(head, rank, q, std::min(kBlockRows, end - q), wanted);
          }
        }
      }
    }
    check_keys(kv_head, k_parts_, data_.dk, dk_);
    check_keys(kv_head, v_parts_, data_.dv, dv_);
  }

  void add_block(std::int64_t head, std::int32_t rank, std::int64_t query, std::int64_t rows,
                 const std::vector<std::int64_t>& wanted) {
    load_block(head, query, rows);
    std::vector<std::int64_t> own;  // of the wanted rows, counted in the block
    for (const std::int64_t row : wanted) {
      if (row >= query && row < query + rows) own.push_back(row - query);
    }
    if (!own.empty()) check_queries(head, query, own);
    if (keys_.empty()) return;
    std::vector<std::int64_t> all(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
    const Pairs pairs = make_pairs(all, keys_);
    const std::int64_t terms = spec_.tiling.bm + plan_.phases() + 1;
    add_keys(pairs.ds, pairs.ds_error, q_, std::abs(static_cast<double>(a_.scale)), a_.scale, terms,
             k_parts_[static_cast<std::size_t>(rank)]);
    add_keys(pairs.p, pairs.p_error, d_o_, 1, 1, terms, v_parts_[static_cast<std::size_t>(rank)]);
  }

  // Scores, what each query sees, and its exact log-sum-exp and delta.
  void load_block(std::int64_t head, std::int64_t query, std::int64_t rows) {
    const std::int64_t first = head * a_.seq_q + query;
    q_ = load(spec_, data_.q, first, rows);
    d_o_ = load(spec_, data_.d_o, first, rows);
    const Matrix64 given = load(spec_, data_.o, first, rows);
    ranges_.resize(static_cast<std::size_t>(rows));
    fill_key_ranges(a_, data_.ends, {query, rows}, {0, a_.seq_k}, ranges_.data());
    scores_.noalias() = q_ * k_.transpose();
    scores_ *= static_cast<double>(a_.scale);
    Matrix64 weights = Matrix64::Zero(rows, a_.seq_k);
    lse_.assign(static_cast<std::size_t>(rows), -std::numeric_limits<double>::infinity());
    lse_error_.assign(static_cast<std::size_t>(rows), 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      const KeyRange& range = ranges_[static_cast<std::size_t>(r)];
      if (range.empty()) continue;
      const auto seen = scores_.row(r).segment(range.begin, range.end - range.begin);
      const double most = seen.maxCoeff();
      const double lse = most + std::log((seen.array() - most).exp().sum());
      weights.row(r).segment(range.begin, range.end - range.begin) = (seen.array() - lse).exp().matrix();
      lse_[static_cast<std::size_t>(r)] = lse;
      lse_error_[static_cast<std::size_t>(r)] = std::abs(static_cast<double>(data_.lse[first + r]) - lse);
    }
    const Matrix64 o = weights * v_;
    delta_ = (d_o_.array() * o.array()).rowwise().sum();
    delta_error_ = (d_o_.array().abs() * (given - o).array().abs()).rowwise().sum() +
                   gamma(a_.dim, kUnit32) * (d_o_.array() * given.array()).abs().rowwise().sum() + kTiny;
  }

  // Steps 1 and 2, for some rows of the block and some keys.
  Pairs make_pairs(const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& keys) const {
    const Matrix64 k = pick_rows(k_, keys);
    const Matrix64 v = pick_rows(v_, keys);
    const Matrix64 q = pick_rows(q_, rows);
    const Matrix64 d_o = pick_rows(d_o_, rows);
    const Matrix64 dp = d_o * v.transpose();
    const Matrix64 score_size = q.cwiseAbs() * k.cwiseAbs().transpose();
    const Matrix64 dp_size = d_o.cwiseAbs() * v.cwiseAbs().transpose();
    const Matrix64 scores = pick_cols(pick_rows(scores_, rows), keys);
    Pairs pairs{Matrix64::Zero(dp.rows(), dp.cols()), Matrix64::Zero(dp.rows(), dp.cols()),
                Matrix64::Zero(dp.rows(), dp.cols()), Matrix64::Zero(dp.rows(), dp.cols())};
    const double score_unit = gamma(a_.dim + 1, kUnit32) * std::abs(static_cast<double>(a_.scale));
    const double product_unit = gamma(a_.dim, kUnit32);
    for (Eigen::Index r = 0; r < dp.rows(); ++r) {
      const auto row = static_cast<std::size_t>(rows[static_cast<std::size_t>(r)]);
      const double lse = lse_[row];
      const double delta = delta_(static_cast<Eigen::Index>(row));
      const double delta_error = delta_error_(static_cast<Eigen::Index>(row));
      for (Eigen::Index c = 0; c < dp.cols(); ++c) {
        const std::int64_t key = keys[static_cast<std::size_t>(c)];
        if (key < ranges_[row].begin || key >= ranges_[row].end) continue;
        const double off = score_unit * score_size(r, c) + lse_error_[row] + kTiny;
        const double h = off + kUnit32 * (std::abs(scores(r, c) - lse) + off) + 0x1p-21;
        const double p = std::exp(scores(r, c) - lse);
        const double p_error = p * std::expm1(h) + 0x1p-125;
        const double t = dp(r, c) - delta;
        double t_error = product_unit * dp_size(r, c) + delta_error + kTiny;
        t_error += kUnit32 * (std::abs(t) + t_error);
        pairs.p(r, c) = p;
        pairs.p_error(r, c) = p_error;
        pairs.ds(r, c) = p * t;
        pairs.ds_error(r, c) =
            p * t_error + p_error * (std::abs(t) + t_error) + kUnit32 * (p + p_error) * (std::abs(t) + t_error) + kTiny;
      }
    }
    return pairs;
  }

  // dQ of some rows of the block: step 3.
  void check_queries(std::int64_t head, std::int64_t query, const std::vector<std::int64_t>& rows) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(a_.seq_k));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
    const Pairs pairs = make_pairs(rows, all);
    const double scale = a_.scale;
    const double unit = gamma(spec_.tiling.bn + plan_.steps() * plan_.kv_tiles + 1, kUnit32);
    const Matrix64 value = scale * (pairs.ds * k_);
    const Matrix64 bound =
        std::abs(scale) * ((pairs.ds_error + unit * (pairs.ds.cwiseAbs() + pairs.ds_error)) * k_.cwiseAbs());
    const double tiny = kTiny * static_cast<double>(a_.seq_k + 1);
    const Rounding rounding = rounding_to(spec_.dtype);
    const ConstMatrix out{data_.dq, spec_.dtype, 0, a_.dim, a_.dim, 1};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t row = head * a_.seq_q + query + rows[i];
      for (std::int64_t d = 0; d < a_.dim; ++d) {
        const double want = value(static_cast<Eigen::Index>(i), d);
        const double error = bound(static_cast<Eigen::Index>(i), d) + tiny;
        const double limit = error + rounding_error(std::abs(want) + error, rounding);
        dq_.element(row, d, load_element(out, row, d), want, limit, true);
      }
    }
  }

  // Adds to a rank's part of dK or dV: step 3.
  static void add_keys(const Matrix64& factor, const Matrix64& factor_error, const Matrix64& rows, double size,
                       double scale, std::int64_t terms, Sum& sum) {
    const double unit = gamma(terms, kUnit32);
    sum.value.noalias() += scale * (factor.transpose() * rows);
    sum.error.noalias() +=
        size * ((factor_error + unit * (factor.cwiseAbs() + factor_error)).transpose() * rows.cwiseAbs());
    sum.error.array() += kTiny * static_cast<double>(rows.rows() + 1);
  }

  // Step 4.
  void check_keys(std::int64_t kv_head, const std::vector<Sum>& parts, const void* data, Verdict& verdict) const {
    const Topology& topo = spec_.topo;
    const Rounding partial = rounding_to(spec_.partial);
    const Rounding result = rounding_to(spec_.dtype);
    const ConstMatrix out{data, spec_.dtype, 0, a_.dim, a_.dim, 1};
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      for (std::int64_t d = 0; d < a_.dim; ++d) {
        double want = 0, error = 0, size = 0;
        for (std::int32_t node = 0; node < topo.nodes; ++node) {
          double node_want = 0, node_error = 0, node_size = 0;
          for (std::int32_t gpu = 0; gpu < topo.gpus; ++gpu) {
            const Sum& part = parts[static_cast<std::size_t>(topo.rank_of(node, gpu))];
            const double value = part.value(static_cast<Eigen::Index>(i), d);
            double off = part.error(static_cast<Eigen::Index>(i), d);
            if (topo.world() > 1) off += rounding_error(std::abs(value) + off, partial);
            node_want += value;
            node_error += off;
            node_size += std::abs(value) + off;
          }
          node_error += gamma(topo.gpus, kUnit32) * node_size;
          if (topo.nodes > 1) node_error += rounding_error(std::abs(node_want) + node_error, partial);
          want += node_want;
          error += node_error;
          size += std::abs(node_want) + node_error;
        }
        error += gamma(topo.nodes, kUnit32) * size;
        const double limit = error + rounding_error(std::abs(want) + error, result);
        const std::int64_t row = kv_head * a_.seq_k + keys_[i];
        verdict.element(row, d, load_element(out, row, d), want, limit, true);
      }
    }
  }

  const PlanSpec& spec_;
  const AttentionSpec& a_;
  const GradientData& data_;
  const RingAttentionBackwardPlan plan_;
  const std::vector<std::int64_t> q_rows_, k_rows_;  // that are compared
  Verdict dq_, dk_, dv_;
  // Of the key head at hand.
  Matrix64 k_, v_;
  std::vector<std::int64_t> keys_;
  std::vector<Sum> k_parts_, v_parts_;  // by rank
  // Of the block of queries at hand.
  Matrix64 q_, d_o_, scores_;
  std::vector<KeyRange> ranges_;
  std::vector<double> lse_, lse_error_;
  Eigen::ArrayXd delta_, delta_error_;
};

}  // namespace

const CheckReport& GradientReport::worst() const {
  const CheckReport* worst = &dq;
  for (const CheckReport* other : {&dk, &dv}) {
    if (other->worst_ratio > worst->worst_ratio) worst = other;
  }
  return *worst;
}

const char* GradientReport::worst_name() const {
  const CheckReport* of = &worst();
  return of == &dq ? "dQ" : of == &dk ? "dK" : "dV";
}

GradientReport check_gradients(const PlanSpec& spec, const GradientData& data, std::int64_t rows) {
  return GradientCheck(spec, data, rows).run();
}

}  // namespace mkernel
