#include "exec/attention_problem.h"

#include <fmt/format.h>

#include <cstring>

#include "exec/attend_math.h"

namespace mkernel {
namespace {

constexpr float kNotWritten = 12345.0f;

}  // namespace

AttentionProblem::AttentionProblem(const Plan& plan, std::uint64_t seed, const Inputs& inputs)
    : plan_(plan), inputs_(inputs) {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  q_ = random_rows(spec, a.batch * a.heads * a.seq_q, 3 * seed, inputs.score_size);
  k_ = random_rows(spec, a.batch * a.kv_heads * a.seq_k, 3 * seed + 1);
  v_ = random_rows(spec, a.batch * a.kv_heads * a.seq_k, 3 * seed + 2);
  ends_ = random_ends(spec, seed);
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const std::int64_t q_tokens = a.q_split(spec.topo).tokens(rank);
    const std::int64_t k_tokens = a.k_split(spec.topo).tokens(rank);
    Rank own;
    own.q = make_rank_tensor(spec, a.heads, q_tokens, inputs.layout());
    own.k = make_rank_tensor(spec, a.kv_heads, k_tokens, inputs.layout());
    own.v = make_rank_tensor(spec, a.kv_heads, k_tokens, inputs.layout());
    own.o = make_rank_tensor(spec, a.heads, q_tokens, inputs.layout());
    own.lse.assign(static_cast<std::size_t>(a.batch * a.heads * q_tokens), kNotWritten);
    take_tokens(spec, q_.data(), a.seq_q, rank, own.q.tensor);
    take_tokens(spec, k_.data(), a.seq_k, rank, own.k.tensor);
    take_tokens(spec, v_.data(), a.seq_k, rank, own.v.tensor);
    ranks_.push_back(std::move(own));
  }
}

AttentionArguments AttentionProblem::sequences() const {
  const PackedEnds ends = ends_.view();
  AttentionArguments result;
  result.cu_seqlens_q = ends.q;
  result.cu_seqlens_k = ends.k;
  result.sequences = ends.sequences;
  return result;
}

AttentionArguments AttentionProblem::arguments(std::int32_t rank) {
  Rank& own = ranks_[static_cast<std::size_t>(rank)];
  AttentionArguments result = sequences();
  result.q = own.q.tensor;
  result.k = own.k.tensor;
  result.v = own.v.tensor;
  result.o = own.o.tensor;
  result.lse = own.lse.data();
  return result;
}

std::vector<Arguments> AttentionProblem::arguments() {
  std::vector<Arguments> result;
  for (std::int32_t rank = 0; rank < plan_.topo().world(); ++rank) result.push_back(arguments(rank));
  return result;
}

void AttentionProblem::join() {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  const SequenceSplit split = a.q_split(spec.topo);
  o_.resize(q_.size());
  lse_.resize(static_cast<std::size_t>(a.batch * a.heads * a.seq_q));
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const Rank& own = ranks_[static_cast<std::size_t>(rank)];
    give_tokens(spec, own.o.tensor, a.seq_q, rank, o_.data());
    for (std::int64_t head = 0; head < a.batch * a.heads; ++head) {
      for (std::int64_t t = 0; t < split.tokens(rank); ++t) {
        lse_[static_cast<std::size_t>(head * a.seq_q + split.position(rank, t))] =
            own.lse[static_cast<std::size_t>(head * split.tokens(rank) + t)];
      }
    }
  }
}

const std::vector<std::byte>& AttentionProblem::output() {
  join();
  return o_;
}

const std::vector<float>& AttentionProblem::lse() {
  join();
  return lse_;
}

// Goes through the plan's compute tasks in order, each on the whole K and V.
std::optional<std::string> AttentionProblem::mismatch() {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  const std::int64_t bytes = a.dim * dtype_bytes(spec.dtype);
  const SequenceSplit split = a.q_split(spec.topo);
  const RingAttentionPlan& ring = plan_.ring_attention();
  const auto state_size = static_cast<std::size_t>(ring.state_elements(spec.tiling.bm));
  AttendScratch scratch(spec.tiling.bm, a.dim);
  std::vector<std::byte> o(static_cast<std::size_t>(spec.tiling.bm * bytes));
  std::vector<float> lse(static_cast<std::size_t>(spec.tiling.bm));
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const Rank& own = ranks_[static_cast<std::size_t>(rank)];
    std::vector<float> states(state_size * static_cast<std::size_t>(ring.tiles));
    const std::int64_t tasks = plan_.count(rank, Role::kCompute, 0);
    for (std::int64_t i = 0; i < tasks; ++i) {
      const Task task = plan_.task(rank, Role::kCompute, 0, i);
      const std::int64_t rows = task.block.rows;
      if (rows == 0) continue;
      const std::int64_t head = task.block.row / split.tokens(rank);
      const std::int64_t first = task.block.row % split.tokens(rank);
      const std::int64_t query = head * a.seq_q + split.position(rank, first);
      const std::int64_t keys = task.length / a.dim;
      const std::int64_t kv_head = head / a.heads * a.kv_heads + head % a.heads / (a.heads / a.kv_heads);
      const std::int64_t key = (kv_head * a.seq_k + task.kv_position) * bytes;
      float* state = states.data() + state_size * static_cast<std::size_t>(i % ring.tiles);
      AttendTile tile;
      tile.q = {q_.data() + query * bytes, spec.dtype, rows, a.dim, a.dim, 1};
      if (keys > 0) {
        tile.k = {k_.data() + key, spec.dtype, keys, a.dim, a.dim, 1};
        tile.v = {v_.data() + key, spec.dtype, keys, a.dim, a.dim, 1};
        fill_key_ranges(a, ends_.view(), {split.position(rank, first), rows}, {task.kv_position, keys},
                        scratch.ranges());
      }
      tile.ranges = scratch.ranges();
      tile.scale = a.scale;
      tile.resume = task.resume ? state : nullptr;
      tile.park = task.park ? state : nullptr;
      tile.o = {o.data(), spec.dtype, rows, a.dim, a.dim, 1};
      tile.lse = {lse.data(), Dtype::kFp32, rows, 1, 1, 1};
      attend_tile(tile, scratch);
      if (task.park) continue;
      for (std::int64_t r = 0; r < rows; ++r) {
        const bool same =
            std::memcmp(o.data() + r * bytes, tensor_element(own.o.tensor, spec.dtype, head, first + r),
                        static_cast<std::size_t>(bytes)) == 0 &&
            std::memcmp(&lse[static_cast<std::size_t>(r)],
                        &own.lse[static_cast<std::size_t>(head * split.tokens(rank) + first + r)], sizeof(float)) == 0;
        if (!same)
          return fmt::format("rank {}: O of head {}, token {} has other bits than it must", rank, head, first + r);
      }
    }
    if (!guards_intact(own.o, spec.dtype, inputs_.layout()))
      return fmt::format("rank {} wrote beside the tokens of O", rank);
  }
  return std::nullopt;
}

CheckReport AttentionProblem::check(std::int64_t rows, const AttentionArithmetic& arithmetic) {
  const PlanSpec& spec = plan_.spec();
  join();
  const std::int64_t all = static_cast<std::int64_t>(lse_.size());
  const std::int64_t count = rows == 0 ? all : min_of(rows, all);
  std::vector<std::int64_t> chosen;
  for (std::int64_t i = 0; i < count; ++i) chosen.push_back(count > 1 ? i * (all - 1) / (count - 1) : 0);
  return check_attention_rows(spec, {q_.data(), k_.data(), v_.data(), o_.data(), lse_.data(), sequences()}, chosen,
                              arithmetic);
}

}  // namespace mkernel
