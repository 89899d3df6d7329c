#include "exec/attention_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/half.h"
#include "base/random.h"
#include "exec/attend_math.h"
#include "exec/fill.h"
#include "exec/key_ranges.h"

namespace mkernel {
namespace {

constexpr std::byte kGuard{0x5a};
constexpr float kNotWritten = 12345.0f;

// Multiplies by a power of two or less than that, exactly enough for inputs.
void multiply(std::vector<std::byte>& bytes, Dtype dtype, float factor) {
  const std::size_t size = static_cast<std::size_t>(dtype_bytes(dtype));
  for (std::size_t at = 0; at < bytes.size(); at += size) {
    std::uint16_t half = 0;
    float value = 0;
    std::memcpy(dtype == Dtype::kFp32 ? static_cast<void*>(&value) : &half, bytes.data() + at, size);
    if (dtype == Dtype::kBf16) half = float_to_bf16(bf16_to_float(half) * factor);
    if (dtype == Dtype::kFp16) half = float_to_fp16(fp16_to_float(half) * factor);
    value *= factor;
    std::memcpy(bytes.data() + at, dtype == Dtype::kFp32 ? static_cast<const void*>(&value) : &half, size);
  }
}

}  // namespace

AttentionProblem::AttentionProblem(const Plan& plan, std::uint64_t seed, const Inputs& inputs)
    : plan_(plan), inputs_(inputs) {
  const PlanSpec& spec = plan_.spec();
  const AttentionSpec& a = spec.attention;
  const auto fill = [&](std::int64_t rows, std::uint64_t which, std::vector<std::byte>& bytes) {
    bytes.resize(static_cast<std::size_t>(rows * a.dim * dtype_bytes(spec.dtype)));
    fill_random({bytes.data(), spec.dtype, rows, a.dim, a.dim, 1}, 3 * seed + which, Fill::kUniform);
  };
  fill(a.batch * a.heads * a.seq_q, 0, q_);
  fill(a.batch * a.kv_heads * a.seq_k, 1, k_);
  fill(a.batch * a.kv_heads * a.seq_k, 2, v_);
  if (inputs.score_size != 1) multiply(q_, spec.dtype, inputs.score_size);
  if (a.packed) make_ends(seed);
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const std::int64_t q_tokens = a.q_split(spec.topo).tokens(rank);
    const std::int64_t k_tokens = a.k_split(spec.topo).tokens(rank);
    ranks_.push_back(
        {make(a.heads, q_tokens), make(a.kv_heads, k_tokens), make(a.kv_heads, k_tokens), make(a.heads, q_tokens), {}});
    Rank& own = ranks_.back();
    own.lse.assign(static_cast<std::size_t>(a.batch * a.heads * q_tokens), kNotWritten);
    take(q_, a.seq_q, rank, own.q.tensor);
    take(k_, a.seq_k, rank, own.k.tensor);
    take(v_, a.seq_k, rank, own.v.tensor);
  }
}

AttentionProblem::Bytes AttentionProblem::make(std::int64_t heads, std::int64_t tokens) const {
  const AttentionSpec& a = plan_.spec().attention;
  Bytes bytes;
  if (inputs_.by_token) {
    const std::int64_t pitch = heads * a.dim + inputs_.gap;
    bytes.tensor = {nullptr, a.batch, heads, tokens, a.dim, tokens * pitch, a.dim, pitch};
    bytes.data.assign(static_cast<std::size_t>(a.batch * tokens * pitch * dtype_bytes(plan_.spec().dtype)), kGuard);
  } else {
    bytes.tensor = AttentionTensor::by_head(nullptr, a.batch, heads, tokens, a.dim);
    bytes.data.assign(static_cast<std::size_t>(a.batch * heads * tokens * a.dim * dtype_bytes(plan_.spec().dtype)),
                      kGuard);
  }
  bytes.tensor.data = bytes.data.data();
  return bytes;
}

std::byte* AttentionProblem::element(const AttentionTensor& tensor, std::int64_t head, std::int64_t token) const {
  const std::int64_t at = head / tensor.heads * tensor.batch_stride + head % tensor.heads * tensor.head_stride +
                          token * tensor.token_stride;
  return static_cast<std::byte*>(tensor.data) + at * dtype_bytes(plan_.spec().dtype);
}

// A rank's tokens of a whole tensor.
void AttentionProblem::take(const std::vector<std::byte>& whole, std::int64_t tokens, std::int32_t rank,
                            const AttentionTensor& part) {
  const PlanSpec& spec = plan_.spec();
  const std::int64_t row = spec.attention.dim * dtype_bytes(spec.dtype);
  const SequenceSplit split{tokens, spec.topo.world(), spec.attention.zigzag};
  for (std::int64_t head = 0; head < part.batch * part.heads; ++head) {
    for (std::int64_t t = 0; t < part.tokens; ++t) {
      const std::byte* from = whole.data() + (head * tokens + split.position(rank, t)) * row;
      std::memcpy(element(part, head, t), from, static_cast<std::size_t>(row));
    }
  }
}

// Sequences of any length, also none; queries and keys are cut alike where there are as many.
void AttentionProblem::make_ends(std::uint64_t seed) {
  const AttentionSpec& a = plan_.spec().attention;
  Random random(seed);
  const auto cut = [&](std::int64_t tokens, std::size_t sequences) {
    std::vector<std::int32_t> ends{0};
    for (std::size_t i = 1; i < sequences; ++i) {
      ends.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(tokens) + 1)));
    }
    ends.push_back(static_cast<std::int32_t>(tokens));
    std::sort(ends.begin(), ends.end());
    return ends;
  };
  const std::size_t sequences = 1 + random.below(5);
  q_ends_ = cut(a.seq_q, sequences);
  k_ends_ = a.seq_k == a.seq_q ? q_ends_ : cut(a.seq_k, sequences);
}

AttentionArguments AttentionProblem::sequences() const {
  AttentionArguments result;
  if (!plan_.spec().attention.packed) return result;
  result.cu_seqlens_q = q_ends_.data();
  result.cu_seqlens_k = k_ends_.data();
  result.sequences = static_cast<std::int32_t>(q_ends_.size()) - 1;
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
  const std::int64_t row = a.dim * dtype_bytes(spec.dtype);
  const SequenceSplit split = a.q_split(spec.topo);
  o_.resize(q_.size());
  lse_.resize(static_cast<std::size_t>(a.batch * a.heads * a.seq_q));
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const Rank& own = ranks_[static_cast<std::size_t>(rank)];
    for (std::int64_t head = 0; head < a.batch * a.heads; ++head) {
      for (std::int64_t t = 0; t < split.tokens(rank); ++t) {
        const std::int64_t to = head * a.seq_q + split.position(rank, t);
        std::memcpy(o_.data() + to * row, element(own.o.tensor, head, t), static_cast<std::size_t>(row));
        lse_[static_cast<std::size_t>(to)] = own.lse[static_cast<std::size_t>(head * split.tokens(rank) + t)];
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

bool AttentionProblem::guards_intact(const Rank& rank) const {
  if (!inputs_.by_token) return true;
  const AttentionTensor& o = rank.o.tensor;
  const auto width = static_cast<std::size_t>(o.heads * o.dim * dtype_bytes(plan_.spec().dtype));
  const auto gap = static_cast<std::size_t>(inputs_.gap * dtype_bytes(plan_.spec().dtype));
  for (std::size_t at = width; at < rank.o.data.size(); at += width + gap) {
    for (std::size_t i = 0; i < gap; ++i) {
      if (rank.o.data[at + i] != kGuard) return false;
    }
  }
  return true;
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
        fill_key_ranges(a, sequences(), {split.position(rank, first), rows}, {task.kv_position, keys},
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
            std::memcmp(o.data() + r * bytes, element(own.o.tensor, head, first + r),
                        static_cast<std::size_t>(bytes)) == 0 &&
            std::memcmp(&lse[static_cast<std::size_t>(r)],
                        &own.lse[static_cast<std::size_t>(head * split.tokens(rank) + first + r)], sizeof(float)) == 0;
        if (!same)
          return fmt::format("rank {}: O of head {}, token {} has other bits than it must", rank, head, first + r);
      }
    }
    if (!guards_intact(own)) return fmt::format("rank {} wrote beside the tokens of O", rank);
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
