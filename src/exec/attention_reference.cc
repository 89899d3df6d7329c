#include "exec/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "exec/attend_math.h"
#include "exec/key_ranges.h"
#include "exec/rounding.h"
#include "exec/verdict.h"
#include "plan/ring_attention.h"

// The bound
// =========
// u = 2^-24. For one query let s_j be the exact scores of the keys it sees, w_j = exp(s_j) / sum exp(s) their weights,
// o = sum w_j v_j.
//
// 1. A score is a product of dim terms in fp32, then multiplied by the scale:
//        |computed s_j - s_j| <= d_j = gamma_(dim+1) |scale| sum |q| |k| + underflow (2^-126).
// 2. A weight on the way through the running softmax is exp(s_j - m) times factors exp(m_old - m_new), one for each
//    later block that moves the base m. Each argument is a difference that is rounded once, to at most u times its
//    size. A term whose arguments add up to less than -88 is (or becomes) at most 2^-126 times the largest, whatever
//    the rounding did: step 4. For all others the arguments together are at most 88, so their roundings change the
//    exponent by at most 88 u in all. Each exp is within 2^-22 (attend_math.h), each product rounds once:
//        computed weight = exp(s_j - m) exp(h_j),   |h_j| <= d_j + 88 u + (blocks + 1) (2^-22 + u).
//    Whatever base m is in the end, it stands in O and in l alike and cancels.
// 3. Sums: l and O add at most kAttendKeys terms within a block in any order, then block after block:
//        each term passes at most n = kAttendKeys + blocks + 2 roundings, the product with v included.
//    So with e_j = |h_j| + gamma_n:
//        N = sum w_j (exp(e_j) - 1) |v_j|,   M = sum w_j (exp(e_j) - 1),
//        |O/l - o| <= (N + |o| M) / (1 - M), and the division rounds once.
// 4. Terms that vanish: at most seq_k of them, each at most 2^-120 of the sum (the largest weight is 1, and later bases
//    only lower it together with the whole sum): 2^-120 seq_k max|v|.
// 5. O is rounded to its type. The log-sum-exp is m + log(l): |error| <= M / (1 - M) + 2^-22 |log l| + 2 u (|m| +
// |lse|),
//    and m is within max d_j of the largest exact score.
//
// A GPU differs in four things (attention_consumer.cuh). Its tensor cores add terms that are cut off and not rounded
// (no vendor states how; 2^-22 per addition is four times what was ever reported). Weights are rounded to the input
// type before they meet the values, but not in l: one more factor 1 + u' in N alone, and for fp16, whose numbers end at
// 2^-24, at most seq_k 2^-25 max|v| in all, as l >= 1 and each weight is at most 1 when it is rounded. Scores are
// multiplied by scale * log2(e), rounded once, in the fma that subtracts m: two more roundings of a score in step 1.
// O is multiplied by 1 / l, rounded: two roundings instead of one; the log-sum-exp is (m + log2 l) ln 2: two more.
//
// The fp64 reference's own errors are smaller by 2^-29 and covered by a last factor of 1 + 2^-20.

namespace mkernel {
namespace {

// Blocks of keys that a tile folds in at most: those of every chunk and segment, counted whole.
std::int64_t blocks_of(const PlanSpec& spec, std::int64_t block_keys) {
  const RingAttentionPlan plan = RingAttentionPlan::make(spec);
  const SequenceSplit split = spec.attention.k_split(spec.topo);
  const std::int64_t own = plan.segments * ceil_div(split.max_size(), block_keys);
  const std::int64_t rows = min_of(spec.tiling.chunk_rows, split.max_size());
  return own + (spec.topo.world() - 1) * plan.chunks * ceil_div(rows, block_keys);
}

// K and V of one head in fp64, kept from row to row.
struct Head {
  std::int64_t number = -1;
  std::vector<double> k, v;

  void load(const PlanSpec& spec, const AttentionData& data, std::int64_t head) {
    if (head == number) return;
    number = head;
    const AttentionSpec& a = spec.attention;
    const auto read = [&](const void* from, std::vector<double>& to) {
      const ConstMatrix matrix{from, spec.dtype, 0, a.dim, a.dim, 1};
      to.resize(static_cast<std::size_t>(a.seq_k * a.dim));
      for (std::int64_t i = 0; i < a.seq_k; ++i) {
        for (std::int64_t d = 0; d < a.dim; ++d) {
          to[static_cast<std::size_t>(i * a.dim + d)] = load_element(matrix, head * a.seq_k + i, d);
        }
      }
    };
    read(data.k, k);
    read(data.v, v);
  }
};

// What one query should give, and how far it may be off.
struct RowResult {
  std::vector<double> o, error;
  double lse = 0;
  double lse_error = 0;
};

class RowCheck {
 public:
  RowCheck(const PlanSpec& spec, const AttentionArithmetic& arithmetic)
      : a_(spec.attention),
        arithmetic_(arithmetic),
        weights_(rounding_to(arithmetic.rounds_weights ? spec.dtype : Dtype::kFp32)),
        blocks_(blocks_of(spec, arithmetic.block_keys)) {}

  RowResult run(const std::vector<double>& q, const Head& head, const KeyRange& range) {
    const auto dim = static_cast<std::size_t>(a_.dim);
    RowResult result;
    result.o.assign(dim, 0);
    result.error.assign(dim, 0);
    if (range.empty()) {
      result.lse = -std::numeric_limits<double>::infinity();
      return result;
    }
    const auto keys = static_cast<std::size_t>(range.end - range.begin);
    const double* k = head.k.data() + static_cast<std::size_t>(range.begin) * dim;
    const double* v = head.v.data() + static_cast<std::size_t>(range.begin) * dim;
    const double scale = a_.scale;
    scores_.resize(keys);
    offs_.resize(keys);
    double most = -std::numeric_limits<double>::infinity();
    double widest = 0;
    for (std::size_t j = 0; j < keys; ++j) {
      double sum = 0, size = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        const double term = q[d] * k[j * dim + d];
        sum += term;
        size += std::abs(term);
      }
      scores_[j] = scale * sum;
      offs_[j] = gamma(a_.dim + 1 + arithmetic_.more_roundings, arithmetic_.sum_unit) * std::abs(scale) * size +
                 0x1p-126;  // step 1
      most = std::max(most, scores_[j]);
      widest = std::max(widest, offs_[j]);
    }
    double total = 0;
    for (std::size_t j = 0; j < keys; ++j) total += std::exp(scores_[j] - most);
    const double common = 88 * kUnit32 + static_cast<double>(blocks_ + 1) * (0x1p-22 + kUnit32) +
                          gamma(kAttendKeys + blocks_ + 2, arithmetic_.sum_unit);
    double m = 0, largest = 0;
    for (std::size_t j = 0; j < keys; ++j) {
      const double weight = std::exp(scores_[j] - most) / total;
      const double off = weight * std::expm1(offs_[j] + common);  // steps 2 and 3
      m += off;
      for (std::size_t d = 0; d < dim; ++d) {
        result.o[d] += weight * v[j * dim + d];
        result.error[d] += (off + weights_.unit * (weight + off)) * std::abs(v[j * dim + d]);
        largest = std::max(largest, std::abs(v[j * dim + d]));
      }
    }
    const double left = m < 1 ? 1 - m : 0;  // 0: no bound
    const double vanished = (0x1p-120 + weights_.eta) * static_cast<double>(keys) * largest;
    for (std::size_t d = 0; d < dim; ++d) {
      const double size = std::abs(result.o[d]);
      result.error[d] = (result.error[d] + size * m) / left + vanished;
      result.error[d] += (1 + arithmetic_.more_roundings) * kUnit32 * (size + result.error[d]);
    }
    result.lse = most + std::log(total);
    result.lse_error = m / left + 0x1p-22 * (std::abs(std::log(total)) + widest) +
                       (2 + arithmetic_.more_roundings) * kUnit32 * (std::abs(most) + widest + std::abs(result.lse));
    return result;
  }

 private:
  const AttentionSpec& a_;
  const AttentionArithmetic& arithmetic_;
  const Rounding weights_;
  const std::int64_t blocks_;
  std::vector<double> scores_, offs_;
};

}  // namespace

AttentionArithmetic AttentionArithmetic::gpu() {
  // Heads of more than 128 are folded in 64 keys at a time.
  return {64, 0x1p-22, true, 2};
}

CheckReport check_attention_rows(const PlanSpec& spec, const AttentionData& data, std::span<const std::int64_t> rows,
                                 const AttentionArithmetic& arithmetic) {
  const AttentionSpec& a = spec.attention;
  const ConstMatrix q{data.q, spec.dtype, 0, a.dim, a.dim, 1};
  const ConstMatrix o{data.o, spec.dtype, 0, a.dim, a.dim, 1};
  const Rounding rounding = rounding_to(spec.dtype);
  const PackedEnds ends{data.sequences.cu_seqlens_q, data.sequences.cu_seqlens_k, data.sequences.sequences};
  Verdict verdict;
  RowCheck check(spec, arithmetic);
  Head head;
  std::vector<double> query(static_cast<std::size_t>(a.dim));
  for (const std::int64_t row : rows) {
    MK_CHECK_OP(row, <, a.batch * a.heads * a.seq_q);
    const std::int64_t q_head = row / a.seq_q;
    head.load(spec, data, q_head / a.heads * a.kv_heads + q_head % a.heads / (a.heads / a.kv_heads));
    for (std::int64_t d = 0; d < a.dim; ++d) query[static_cast<std::size_t>(d)] = load_element(q, row, d);
    KeyRange range;
    fill_key_ranges(a, ends, {row % a.seq_q, 1}, {0, a.seq_k}, &range);
    const RowResult want = check.run(query, head, range);
    for (std::int64_t d = 0; d < a.dim; ++d) {
      const auto i = static_cast<std::size_t>(d);
      const double error = want.error[i];
      const double bound = error + rounding_error(std::abs(want.o[i]) + error, rounding);
      verdict.element(row, d, load_element(o, row, d), want.o[i], bound, true);
    }
    if (data.lse != nullptr) verdict.element(row, a.dim, data.lse[row], want.lse, want.lse_error, false);
  }
  return verdict.report(static_cast<std::int64_t>(rows.size()));
}

}  // namespace mkernel
