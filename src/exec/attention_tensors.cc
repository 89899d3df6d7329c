#include "exec/attention_tensors.h"

#include <algorithm>
#include <cstring>

#include "base/half.h"
#include "base/random.h"
#include "exec/fill.h"

namespace mkernel {
namespace {

constexpr std::byte kGuard{0x5a};

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

// Calls f(element of the part, its number among the rows of the whole) for all tokens of a rank.
template <class F>
void for_each_token(const PlanSpec& spec, const AttentionTensor& part, std::int64_t tokens, std::int32_t rank, F&& f) {
  const SequenceSplit split{tokens, spec.topo.world(), spec.attention.zigzag};
  for (std::int64_t head = 0; head < part.batch * part.heads; ++head) {
    for (std::int64_t t = 0; t < part.tokens; ++t) {
      f(tensor_element(part, spec.dtype, head, t), head * tokens + split.position(rank, t));
    }
  }
}

}  // namespace

RankTensor make_rank_tensor(const PlanSpec& spec, std::int64_t heads, std::int64_t tokens, const TensorLayout& layout) {
  const AttentionSpec& a = spec.attention;
  RankTensor made;
  if (layout.by_token) {
    const std::int64_t pitch = heads * a.dim + layout.gap;
    made.tensor = {nullptr, a.batch, heads, tokens, a.dim, tokens * pitch, a.dim, pitch};
    made.data.assign(static_cast<std::size_t>(a.batch * tokens * pitch * dtype_bytes(spec.dtype)), kGuard);
  } else {
    made.tensor = AttentionTensor::by_head(nullptr, a.batch, heads, tokens, a.dim);
    made.data.assign(static_cast<std::size_t>(a.batch * heads * tokens * a.dim * dtype_bytes(spec.dtype)), kGuard);
  }
  made.tensor.data = made.data.data();
  return made;
}

std::byte* tensor_element(const AttentionTensor& tensor, Dtype dtype, std::int64_t head, std::int64_t token) {
  const std::int64_t at = head / tensor.heads * tensor.batch_stride + head % tensor.heads * tensor.head_stride +
                          token * tensor.token_stride;
  return static_cast<std::byte*>(tensor.data) + at * dtype_bytes(dtype);
}

bool guards_intact(const RankTensor& tensor, Dtype dtype, const TensorLayout& layout) {
  if (!layout.by_token) return true;
  const auto width = static_cast<std::size_t>(tensor.tensor.heads * tensor.tensor.dim * dtype_bytes(dtype));
  const auto gap = static_cast<std::size_t>(layout.gap * dtype_bytes(dtype));
  for (std::size_t at = width; at < tensor.data.size(); at += width + gap) {
    for (std::size_t i = 0; i < gap; ++i) {
      if (tensor.data[at + i] != kGuard) return false;
    }
  }
  return true;
}

void take_tokens(const PlanSpec& spec, const std::byte* whole, std::int64_t tokens, std::int32_t rank,
                 const AttentionTensor& part) {
  const auto bytes = static_cast<std::size_t>(spec.attention.dim * dtype_bytes(spec.dtype));
  for_each_token(spec, part, tokens, rank, [&](std::byte* element, std::int64_t row) {
    std::memcpy(element, whole + static_cast<std::size_t>(row) * bytes, bytes);
  });
}

void give_tokens(const PlanSpec& spec, const AttentionTensor& part, std::int64_t tokens, std::int32_t rank,
                 std::byte* whole) {
  const auto bytes = static_cast<std::size_t>(spec.attention.dim * dtype_bytes(spec.dtype));
  for_each_token(spec, part, tokens, rank, [&](const std::byte* element, std::int64_t row) {
    std::memcpy(whole + static_cast<std::size_t>(row) * bytes, element, bytes);
  });
}

std::vector<std::byte> random_rows(const PlanSpec& spec, std::int64_t rows, std::uint64_t seed, float size) {
  const std::int64_t dim = spec.attention.dim;
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows * dim * dtype_bytes(spec.dtype)));
  fill_random({bytes.data(), spec.dtype, rows, dim, dim, 1}, seed, Fill::kUniform);
  if (size != 1) multiply(bytes, spec.dtype, size);
  return bytes;
}

SequenceEnds random_ends(const PlanSpec& spec, std::uint64_t seed) {
  const AttentionSpec& a = spec.attention;
  if (!a.packed) return {};
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
  SequenceEnds ends;
  ends.q = cut(a.seq_q, sequences);
  ends.k = a.seq_k == a.seq_q ? ends.q : cut(a.seq_k, sequences);
  return ends;
}

}  // namespace mkernel
