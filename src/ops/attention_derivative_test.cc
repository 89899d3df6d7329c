// The gradients of ring_attention_backward are derivatives: each rank's, of every element, against those of a plain
// forward in fp64, by complex steps: the derivative of an analytic f at x is Im f(x + ih) / h, and as nothing is
// subtracted, h may be so small that it is exact to the last bits of fp64. Source: Squire, Trapp, Using Complex
// Variables to Estimate Derivatives of Real Functions, SIAM Review, 1998. The forward below shares nothing with the
// library but the meaning of the options.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstdint>
#include <string>
#include <vector>

#include "base/random.h"
#include "ops/test_world.h"

namespace mkernel {
namespace {

using test::make_world;
using test::Shape;
using test::succeeded;
using test::world_of;

using Complex = std::complex<double>;
constexpr double kStep = 1e-30;

// A whole tensor (batch, heads, tokens, dim).
struct Whole {
  std::int64_t heads = 0;  // of all batches
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::vector<float> data;

  std::size_t index(std::int64_t head, std::int64_t token, std::int64_t d) const {
    return static_cast<std::size_t>((head * tokens + token) * dim + d);
  }
};

Whole random_whole(Random& random, std::int64_t heads, std::int64_t tokens, std::int64_t dim) {
  Whole whole{heads, tokens, dim, {}};
  for (std::int64_t i = 0; i < heads * tokens * dim; ++i) {
    whole.data.push_back(static_cast<float>(static_cast<double>(random.below(2001)) / 1000 - 1));
  }
  return whole;
}

struct Case {
  AttentionBackwardOptions options;
  std::vector<std::int32_t> ends_q, ends_k;  // of packed sequences
};

bool sees(const Case& c, std::int64_t query, std::int64_t key) {
  std::int64_t q_begin = 0, k_begin = 0, q_count = c.options.seq_q, k_count = c.options.seq_k;
  if (c.options.packed) {
    std::size_t i = 0;
    while (query >= c.ends_q[i + 1]) ++i;
    if (key < c.ends_k[i] || key >= c.ends_k[i + 1]) return false;
    q_begin = c.ends_q[i], q_count = c.ends_q[i + 1] - q_begin;
    k_begin = c.ends_k[i], k_count = c.ends_k[i + 1] - k_begin;
  }
  const std::int64_t beside = query - q_begin + k_count - q_count;
  const std::int64_t distance = key - k_begin - beside;
  if (c.options.causal && distance > 0) return false;
  if (c.options.window_left >= 0 && distance < -c.options.window_left) return false;
  return c.options.window_right < 0 || distance <= c.options.window_right;
}

class Loss {
 public:
  Loss(const Case& c, const Whole& q, const Whole& k, const Whole& v, const Whole& d_o) : case_(c), d_o_(d_o) {
    const Whole* from[] = {&q, &k, &v};
    for (int i = 0; i < 3; ++i) {
      shape_[i] = from[i];
      data_[i].assign(from[i]->data.begin(), from[i]->data.end());
    }
    scale_ = c.options.scale != 0 ? static_cast<float>(c.options.scale)
                                  : static_cast<float>(1 / std::sqrt(static_cast<double>(c.options.dim)));
  }

  // d loss / d element of Q (0), K (1) or V (2). Only query heads of the group that uses the element depend on it.
  double derivative(int tensor, std::int64_t head, std::int64_t token, std::int64_t d) {
    const std::int64_t group = shape_[0]->heads / shape_[1]->heads;
    Complex& x = data_[tensor][shape_[tensor]->index(head, token, d)];
    x += Complex(0, kStep);
    double sum = 0;
    if (tensor == 0) {
      sum = row(head, token).imag();
    } else {
      for (std::int64_t h = head * group; h < (head + 1) * group; ++h) {
        for (std::int64_t i = 0; i < shape_[0]->tokens; ++i) sum += row(h, i).imag();
      }
    }
    x = x.real();
    return sum / kStep;
  }

 private:
  // sum over d of dO * O of one query.
  Complex row(std::int64_t head, std::int64_t query) const {
    const std::int64_t dim = shape_[0]->dim;
    const std::int64_t kv_head = head / (shape_[0]->heads / shape_[1]->heads);
    Complex sum = 0, weighted = 0;
    double most = -1e300;
    std::vector<Complex> scores(static_cast<std::size_t>(shape_[1]->tokens));
    for (std::int64_t j = 0; j < shape_[1]->tokens; ++j) {
      if (!sees(case_, query, j)) continue;
      Complex& score = scores[static_cast<std::size_t>(j)];
      for (std::int64_t d = 0; d < dim; ++d) {
        score += data_[0][shape_[0]->index(head, query, d)] * data_[1][shape_[1]->index(kv_head, j, d)];
      }
      score *= scale_;
      most = std::max(most, score.real());
    }
    for (std::int64_t j = 0; j < shape_[1]->tokens; ++j) {
      if (!sees(case_, query, j)) continue;
      const Complex weight = std::exp(scores[static_cast<std::size_t>(j)] - most);
      sum += weight;
      Complex product = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        product +=
            static_cast<double>(d_o_.data[d_o_.index(head, query, d)]) * data_[2][shape_[2]->index(kv_head, j, d)];
      }
      weighted += weight * product;
    }
    return sum == 0.0 ? 0.0 : weighted / sum;
  }

  const Case& case_;
  const Whole& d_o_;
  const Whole* shape_[3];
  std::vector<Complex> data_[3];
  double scale_ = 1;
};

// A rank's part of a whole tensor, and its tensor.
struct Part {
  std::vector<float> data;
  AttentionTensor tensor;
};
Part part_of(const Whole& whole, std::int64_t batch, const std::vector<std::int64_t>& positions) {
  Part part;
  for (std::int64_t head = 0; head < whole.heads; ++head) {
    for (const std::int64_t position : positions) {
      for (std::int64_t d = 0; d < whole.dim; ++d) part.data.push_back(whole.data[whole.index(head, position, d)]);
    }
  }
  part.tensor = AttentionTensor::by_head(part.data.data(), batch, whole.heads / batch,
                                         static_cast<std::int64_t>(positions.size()), whole.dim);
  return part;
}

std::vector<std::int64_t> positions_of(std::int64_t tokens, int ranks, int rank, bool zigzag) {
  std::vector<std::int64_t> positions;
  for (const SequencePart& run : sequence_parts(tokens, ranks, rank, zigzag)) {
    for (std::int64_t i = 0; i < run.count; ++i) positions.push_back(run.begin + i);
  }
  return positions;
}

struct Rank {
  std::vector<std::int64_t> q_positions, k_positions;
  Part q, k, v, o, d_o, dq, dk, dv;
  std::vector<float> lse;
};

// |got - want| / |want| of one rank's part of a gradient, in the norm of its elements. Rounding errors of some hundred
// terms mostly cancel.
void expect_derivatives(Loss& loss, int tensor, const Part& got, const std::vector<std::int64_t>& positions,
                        std::int64_t heads, const std::string& what) {
  double errors = 0, wants = 0;
  std::size_t i = 0;
  for (std::int64_t head = 0; head < heads; ++head) {
    for (const std::int64_t position : positions) {
      for (std::int64_t d = 0; d < got.tensor.dim; ++d) {
        const double want = loss.derivative(tensor, head, position, d);
        const double error = static_cast<double>(got.data[i++]) - want;
        errors += error * error;
        wants += want * want;
      }
    }
  }
  EXPECT_TRUE(std::isfinite(errors)) << what;
  EXPECT_LE(std::sqrt(errors), 64 * 0x1p-24 * std::sqrt(wants) + 0x1p-24) << what;
}

void expect_right(const Shape& shape, const Case& c, std::uint64_t seed) {
  World world = make_world(world_of(shape.nodes, shape.gpus));
  const AttentionBackwardOptions& o = c.options;
  Random random(seed);
  const std::int64_t q_heads = o.batch * o.heads;
  const std::int64_t kv_heads = o.batch * (o.kv_heads == 0 ? o.heads : o.kv_heads);
  const Whole q = random_whole(random, q_heads, o.seq_q, o.dim);
  const Whole k = random_whole(random, kv_heads, o.seq_k, o.dim);
  const Whole v = random_whole(random, kv_heads, o.seq_k, o.dim);
  const Whole d_o = random_whole(random, q_heads, o.seq_q, o.dim);

  const AttentionOptions& forward_options = o;
  Result<Operator> forward = Operator::create(world, forward_options);
  Result<Operator> backward = Operator::create(world, o);
  ASSERT_TRUE(succeeded(forward));
  ASSERT_TRUE(succeeded(backward));
  std::vector<Rank> ranks(static_cast<std::size_t>(world.size()));
  std::vector<AttentionArguments> first;
  std::vector<AttentionBackwardArguments> second;
  for (int r = 0; r < world.size(); ++r) {
    Rank& rank = ranks[static_cast<std::size_t>(r)];
    rank.q_positions = positions_of(o.seq_q, world.size(), r, o.zigzag);
    rank.k_positions = positions_of(o.seq_k, world.size(), r, o.zigzag);
    rank.q = part_of(q, o.batch, rank.q_positions);
    rank.k = part_of(k, o.batch, rank.k_positions);
    rank.v = part_of(v, o.batch, rank.k_positions);
    rank.d_o = part_of(d_o, o.batch, rank.q_positions);
    rank.o = part_of(d_o, o.batch, rank.q_positions);  // written by the forward
    rank.dq = part_of(q, o.batch, rank.q_positions);
    rank.dk = part_of(k, o.batch, rank.k_positions);
    rank.dv = part_of(v, o.batch, rank.k_positions);
    rank.lse.resize(static_cast<std::size_t>(q_heads) * rank.q_positions.size());
    const std::int32_t* ends_q = o.packed ? c.ends_q.data() : nullptr;
    const std::int32_t* ends_k = o.packed ? c.ends_k.data() : nullptr;
    const auto sequences = o.packed ? static_cast<std::int32_t>(c.ends_q.size()) - 1 : 0;
    first.push_back(
        {rank.q.tensor, rank.k.tensor, rank.v.tensor, rank.o.tensor, rank.lse.data(), ends_q, ends_k, sequences});
    second.push_back({rank.q.tensor, rank.k.tensor, rank.v.tensor, rank.o.tensor, rank.lse.data(), rank.d_o.tensor,
                      rank.dq.tensor, rank.dk.tensor, rank.dv.tensor, ends_q, ends_k, sequences});
  }
  ASSERT_TRUE(succeeded(forward->run(first)));
  ASSERT_TRUE(succeeded(backward->run(second)));

  Loss loss(c, q, k, v, d_o);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Rank& rank = ranks[r];
    expect_derivatives(loss, 0, rank.dq, rank.q_positions, q_heads, fmt::format("dQ of rank {}", r));
    expect_derivatives(loss, 1, rank.dk, rank.k_positions, kv_heads, fmt::format("dK of rank {}", r));
    expect_derivatives(loss, 2, rank.dv, rank.k_positions, kv_heads, fmt::format("dV of rank {}", r));
  }
}

Case plain(std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim = 8) {
  Case c;
  c.options.dtype = Dtype::kFp32;
  c.options.dim = dim;
  c.options.seq_q = seq_q;
  c.options.seq_k = seq_k;
  c.options.bm = 4;
  c.options.bn = 2;
  c.options.chunk_rows = 3;
  return c;
}

std::vector<Case> cases() {
  std::vector<Case> list;
  const auto add = [&](Case c, auto change) {
    change(c);
    list.push_back(c);
  };
  add(plain(11, 11), [](Case&) {});
  add(plain(13, 13), [](Case& c) { c.options.causal = true; });
  add(plain(13, 13), [](Case& c) { c.options.causal = c.options.zigzag = true; });
  add(plain(12, 12), [](Case& c) { c.options.window_left = 3, c.options.window_right = 1; });
  add(plain(12, 12), [](Case& c) { c.options.window_left = 2, c.options.causal = c.options.zigzag = true; });
  // The first queries see nothing; and nobody sees the first keys.
  add(plain(14, 6), [](Case& c) { c.options.causal = true; });
  add(plain(5, 15), [](Case& c) { c.options.window_left = 1; });
  // Shared key heads, several batches.
  add(plain(9, 9), [](Case& c) { c.options.heads = 4, c.options.kv_heads = 2, c.options.batch = 2; });
  add(plain(9, 9), [](Case& c) { c.options.heads = 3, c.options.kv_heads = 1, c.options.causal = true; });
  add(plain(10, 10), [](Case& c) { c.options.scale = -0.7; });
  // Packed: one sequence without keys, one without queries.
  add(plain(14, 12), [](Case& c) {
    c.options.packed = true;
    c.ends_q = {0, 5, 7, 7, 14};
    c.ends_k = {0, 4, 4, 6, 12};
  });
  add(plain(15, 15), [](Case& c) {
    c.options.packed = c.options.causal = c.options.zigzag = true;
    c.ends_q = c.ends_k = {0, 1, 8, 8, 15};
  });
  // Fewer tokens than ranks, one token, none.
  add(plain(2, 3), [](Case&) {});
  add(plain(1, 1), [](Case&) {});
  add(plain(0, 0), [](Case&) {});
  add(plain(4, 0), [](Case&) {});
  add(plain(0, 4), [](Case&) {});
  return list;
}

TEST(AttentionDerivative, EveryRankHasTheDerivativesOfEveryMask) {
  for (const Shape& shape :
       {Shape{1, 1}, Shape{1, 2}, Shape{1, 3}, Shape{2, 1}, Shape{3, 1}, Shape{2, 2}, Shape{4, 2}}) {
    std::uint64_t seed = 1;
    for (Case c : cases()) {
      for (const int rounds : {1, -1}) {
        c.options.slot_rounds = rounds;
        SCOPED_TRACE(fmt::format("{}x{}, case {}, {} rounds", shape.nodes, shape.gpus, seed, rounds));
        expect_right(shape, c, seed);
      }
      ++seed;
    }
  }
}

TEST(AttentionDerivative, EveryHeadSize) {
  for (const std::int64_t dim : {64, 96, 128, 256}) {
    Case c = plain(7, 7, dim);
    c.options.causal = dim % 128 == 0;
    c.options.heads = 2;
    c.options.kv_heads = 1;
    SCOPED_TRACE(dim);
    expect_right({2, 2}, c, static_cast<std::uint64_t>(dim));
  }
}

}  // namespace
}  // namespace mkernel
