#include "exec/backward_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "exec/attend_backward_math.h"
#include "exec/attend_math.h"
#include "exec/tile_math.h"

namespace mkernel {
namespace {

constexpr std::int64_t kForwardRows = 128;

std::size_t size_of(std::int64_t elements, Dtype dtype) {
  return static_cast<std::size_t>(elements * dtype_bytes(dtype));
}

}  // namespace

BackwardProblem::BackwardProblem(const Plan& plan, std::uint64_t seed, const Inputs& inputs)
    : plan_(plan), inputs_(inputs) {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  q_ = random_rows(spec, a.batch * a.heads * a.seq_q, 4 * seed, inputs.score_size);
  k_ = random_rows(spec, a.batch * a.kv_heads * a.seq_k, 4 * seed + 1);
  v_ = random_rows(spec, a.batch * a.kv_heads * a.seq_k, 4 * seed + 2);
  d_o_ = random_rows(spec, a.batch * a.heads * a.seq_q, 4 * seed + 3);
  ends_ = random_ends(spec, seed);
  ranks_.resize(static_cast<std::size_t>(spec.topo.world()));
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    Rank& own = ranks_[static_cast<std::size_t>(rank)];
    for (RankTensor* tensor : {&own.q, &own.o, &own.d_o, &own.dq}) {
      *tensor = make_rank_tensor(spec, a.heads, a.q_split(spec.topo).tokens(rank), inputs.layout());
    }
    for (RankTensor* tensor : {&own.k, &own.v, &own.dk, &own.dv}) {
      *tensor = make_rank_tensor(spec, a.kv_heads, a.k_split(spec.topo).tokens(rank), inputs.layout());
    }
  }
  run_forward();
  hand_out();
}

void BackwardProblem::set_ends(std::vector<std::int32_t> q, std::vector<std::int32_t> k) {
  ends_ = {std::move(q), std::move(k)};
  run_forward();
  hand_out();
}

void BackwardProblem::run_forward() {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  const std::int64_t bytes = a.dim * dtype_bytes(spec.dtype);
  o_.resize(q_.size());
  lse_.resize(static_cast<std::size_t>(a.batch * a.heads * a.seq_q));
  AttendScratch scratch(kForwardRows, a.dim);
  for (std::int64_t head = 0; head < a.batch * a.heads; ++head) {
    const std::int64_t kv_head = head / (a.heads / a.kv_heads);
    for (std::int64_t query = 0; query < a.seq_q; query += kForwardRows) {
      const std::int64_t rows = std::min(kForwardRows, a.seq_q - query);
      const std::int64_t first = head * a.seq_q + query;
      fill_key_ranges(a, ends_.view(), {query, rows}, {0, a.seq_k}, scratch.ranges());
      AttendTile tile;
      tile.q = {q_.data() + first * bytes, spec.dtype, rows, a.dim, a.dim, 1};
      tile.k = {k_.data() + kv_head * a.seq_k * bytes, spec.dtype, a.seq_k, a.dim, a.dim, 1};
      tile.v = {v_.data() + kv_head * a.seq_k * bytes, spec.dtype, a.seq_k, a.dim, a.dim, 1};
      tile.ranges = scratch.ranges();
      tile.scale = a.scale;
      tile.o = {o_.data() + first * bytes, spec.dtype, rows, a.dim, a.dim, 1};
      tile.lse = {lse_.data() + first, Dtype::kFp32, rows, 1, 1, 1};
      attend_tile(tile, scratch);
    }
  }
}

void BackwardProblem::hand_out() {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  const SequenceSplit split = a.q_split(spec.topo);
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    Rank& own = ranks_[static_cast<std::size_t>(rank)];
    take_tokens(spec, q_.data(), a.seq_q, rank, own.q.tensor);
    take_tokens(spec, k_.data(), a.seq_k, rank, own.k.tensor);
    take_tokens(spec, v_.data(), a.seq_k, rank, own.v.tensor);
    take_tokens(spec, o_.data(), a.seq_q, rank, own.o.tensor);
    take_tokens(spec, d_o_.data(), a.seq_q, rank, own.d_o.tensor);
    own.lse.clear();
    for (std::int64_t head = 0; head < a.batch * a.heads; ++head) {
      for (std::int64_t t = 0; t < split.tokens(rank); ++t) {
        own.lse.push_back(lse_[static_cast<std::size_t>(head * a.seq_q + split.position(rank, t))]);
      }
    }
  }
}

AttentionBackwardArguments BackwardProblem::arguments(std::int32_t rank) {
  Rank& own = ranks_[static_cast<std::size_t>(rank)];
  const PackedEnds ends = ends_.view();
  return {own.q.tensor,  own.k.tensor,  own.v.tensor,  own.o.tensor, own.lse.data(), own.d_o.tensor,
          own.dq.tensor, own.dk.tensor, own.dv.tensor, ends.q,       ends.k,         ends.sequences};
}

std::vector<Arguments> BackwardProblem::arguments() {
  std::vector<Arguments> result;
  for (std::int32_t rank = 0; rank < plan_.topo().world(); ++rank) result.push_back(arguments(rank));
  return result;
}

BackwardProblem::Gradients BackwardProblem::join() const {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  Gradients whole{std::vector<std::byte>(q_.size()), std::vector<std::byte>(k_.size()),
                  std::vector<std::byte>(k_.size())};
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const Rank& own = ranks_[static_cast<std::size_t>(rank)];
    give_tokens(spec, own.dq.tensor, a.seq_q, rank, whole.dq.data());
    give_tokens(spec, own.dk.tensor, a.seq_k, rank, whole.dk.data());
    give_tokens(spec, own.dv.tensor, a.seq_k, rank, whole.dv.data());
  }
  return whole;
}

std::vector<std::byte> BackwardProblem::output() {
  Gradients whole = join();
  std::vector<std::byte> all = std::move(whole.dq);
  all.insert(all.end(), whole.dk.begin(), whole.dk.end());
  all.insert(all.end(), whole.dv.begin(), whole.dv.end());
  return all;
}

// Goes through the rank's compute tasks in order, each on the whole tensors. dQ goes into `to`.
BackwardProblem::Parts BackwardProblem::replay_rank(std::int32_t rank, Gradients& to) const {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  const RingAttentionBackwardPlan& plan = plan_.backward();
  const SequenceSplit split = a.q_split(spec.topo);
  const bool alone = spec.topo.world() == 1;
  const Dtype part_type = alone ? spec.dtype : spec.partial;
  const std::int64_t key_elements = plan.kv_heads * a.seq_k * a.dim;
  Parts parts{std::vector<std::byte>(size_of(key_elements, part_type)),
              std::vector<std::byte>(size_of(key_elements, part_type))};
  std::vector<float> states(
      static_cast<std::size_t>(plan.kv_heads * plan.group * plan.q_tiles * plan.state_elements(spec.tiling.bm)));
  std::vector<float> k_sums(static_cast<std::size_t>(key_elements)), v_sums(k_sums);
  BackwardScratch scratch(spec.tiling.bm, spec.tiling.bn, a.dim);
  const std::int64_t bytes = a.dim * dtype_bytes(spec.dtype);
  const std::int64_t tasks = plan_.count(rank, Role::kCompute, 0);
  for (std::int64_t i = 0; i < tasks; ++i) {
    const Task task = plan_.task(rank, Role::kCompute, 0, i);
    const std::int64_t key = i / plan.kv_tiles % plan.kv_heads * a.seq_k + task.kv_position;
    BackwardTile tile;
    tile.rows = task.block.rows;
    tile.keys = task.key_rows;
    tile.meets = task.length > 0;
    tile.scale = a.scale;
    if (tile.rows > 0) {
      const std::int64_t head = task.block.row / split.tokens(rank);
      const std::int64_t position = split.position(rank, task.block.row % split.tokens(rank));
      const std::int64_t query = head * a.seq_q + position;
      const auto rows_of = [&](const std::vector<std::byte>& whole) {
        return ConstMatrix{whole.data() + query * bytes, spec.dtype, tile.rows, a.dim, a.dim, 1};
      };
      tile.q = rows_of(q_);
      tile.o = rows_of(o_);
      tile.d_o = rows_of(d_o_);
      tile.lse = lse_.data() + query;
      tile.dq = {to.dq.data() + query * bytes, spec.dtype, tile.rows, a.dim, a.dim, 1};
      if (tile.meets) {
        fill_key_ranges(a, ends_.view(), {position, tile.rows}, {task.kv_position, tile.keys}, scratch.ranges());
      }
      tile.ranges = scratch.ranges();
      float* state = states.data() + task.dst_offset;
      tile.q_sums = {task.resume ? state : nullptr, task.park ? state : nullptr};
    }
    if (tile.keys > 0) {
      tile.k = {k_.data() + key * bytes, spec.dtype, tile.keys, a.dim, a.dim, 1};
      tile.v = {v_.data() + key * bytes, spec.dtype, tile.keys, a.dim, a.dim, 1};
      float* k_at = k_sums.data() + key * a.dim;
      float* v_at = v_sums.data() + key * a.dim;
      tile.k_sums = {task.resume_keys ? k_at : nullptr, task.park_keys ? k_at : nullptr};
      tile.v_sums = {task.resume_keys ? v_at : nullptr, task.park_keys ? v_at : nullptr};
      tile.dk = {parts.dk.data() + size_of(key * a.dim, part_type), part_type, tile.keys, a.dim, a.dim, 1};
      tile.dv = {parts.dv.data() + size_of(key * a.dim, part_type), part_type, tile.keys, a.dim, a.dim, 1};
    }
    backward_tile(tile, scratch);
  }
  return parts;
}

// Node by node, chunk by chunk.
void BackwardProblem::add_parts(const std::vector<Parts>& parts, Gradients& to) const {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  const Topology& topo = spec.topo;
  const RingAttentionBackwardPlan& plan = plan_.backward();
  TileScratch scratch(1, 1, 1);
  if (topo.world() == 1) {
    to.dk = parts[0].dk;
    to.dv = parts[0].dv;
    return;
  }
  std::vector<std::vector<std::byte>> node_sums(static_cast<std::size_t>(topo.nodes));
  for (const bool value : {false, true}) {
    std::vector<std::byte>& out = value ? to.dv : to.dk;
    for (std::int32_t owner = 0; owner < topo.world(); ++owner) {
      for (std::int64_t i = 0; i < plan.chunks * plan.kv_heads; ++i) {
        const KvRing::Run run = plan.chunk_run(owner, i % plan.chunks);
        if (run.size == 0) continue;
        const std::int64_t first = (i / plan.chunks * a.seq_k + run.position) * a.dim;
        const OutMatrix result{out.data() + size_of(first, spec.dtype), spec.dtype, run.size, a.dim, a.dim, 1};
        std::vector<ConstMatrix> sums;
        for (std::int32_t node = 0; node < topo.nodes; ++node) {
          if (plan.chunk_for(owner, i % plan.chunks, node).size == 0) continue;
          std::vector<ConstMatrix> own;
          for (std::int32_t gpu = 0; gpu < topo.gpus; ++gpu) {
            const Parts& part = parts[static_cast<std::size_t>(topo.rank_of(node, gpu))];
            const std::byte* data = (value ? part.dv : part.dk).data() + size_of(first, spec.partial);
            own.push_back({data, spec.partial, run.size, a.dim, a.dim, 1});
          }
          if (topo.nodes == 1) {
            sums = own;
            break;
          }
          std::vector<std::byte>& sum = node_sums[static_cast<std::size_t>(node)];
          sum.resize(size_of(run.size * a.dim, spec.partial));
          const OutMatrix node_sum{sum.data(), spec.partial, run.size, a.dim, a.dim, 1};
          reduce_tile(own, &node_sum, 1, scratch);
          sums.push_back({sum.data(), spec.partial, run.size, a.dim, a.dim, 1});
        }
        if (!sums.empty()) reduce_tile(sums, &result, 1, scratch);  // else zeros, as made
      }
    }
  }
}

std::optional<std::string> BackwardProblem::mismatch() {
  const PlanSpec& spec = plan_.spec();
  Gradients want{std::vector<std::byte>(q_.size()), std::vector<std::byte>(k_.size()),
                 std::vector<std::byte>(k_.size())};
  std::vector<Parts> parts;
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) parts.push_back(replay_rank(rank, want));
  add_parts(parts, want);
  const Gradients have = join();
  const auto bytes = static_cast<std::size_t>(spec.attention.dim * dtype_bytes(spec.dtype));
  const struct {
    const char* name;
    const std::vector<std::byte>&have, &want;
  } pairs[] = {{"dQ", have.dq, want.dq}, {"dK", have.dk, want.dk}, {"dV", have.dv, want.dv}};
  for (const auto& pair : pairs) {
    const auto at = std::mismatch(pair.have.begin(), pair.have.end(), pair.want.begin()).first;
    if (at == pair.have.end()) continue;
    return fmt::format("row {} of {} has other bits than it must",
                       static_cast<std::size_t>(at - pair.have.begin()) / bytes, pair.name);
  }
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (const RankTensor* tensor : {&ranks_[rank].dq, &ranks_[rank].dk, &ranks_[rank].dv}) {
      if (!guards_intact(*tensor, spec.dtype, inputs_.layout())) {
        return fmt::format("rank {} wrote beside the tokens of its gradients", rank);
      }
    }
  }
  return std::nullopt;
}

GradientData BackwardProblem::data(const Gradients& gradients) const {
  return {q_.data(),   k_.data(),           v_.data(),           o_.data(),           d_o_.data(),
          lse_.data(), gradients.dq.data(), gradients.dk.data(), gradients.dv.data(), ends_.view()};
}

GradientReport BackwardProblem::check(std::int64_t rows) {
  const Gradients gradients = join();
  return check_gradients(plan_.spec(), data(gradients), rows);
}

}  // namespace mkernel
