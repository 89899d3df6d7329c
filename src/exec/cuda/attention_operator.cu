#include "exec/cuda/attention_operator.h"

#include <algorithm>
#include <cmath>

#include "exec/cuda/attention_config.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/cuda/tensor_map.h"
#include "plan/ring_attention.h"

namespace mkernel {
namespace {

constexpr std::int64_t kMostSequences = std::int64_t{1} << 20;
constexpr std::int64_t kUnit = 8;        // elements of 16 bytes
constexpr std::int32_t kWide = 1 << 29;  // as a window: sees all keys

int keys_per_stage(int dim) {
  switch (dim) {
    case 64: return AttentionConfig<64>::kKeys;
    case 96: return AttentionConfig<96>::kKeys;
    case 128: return AttentionConfig<128>::kKeys;
    default: return AttentionConfig<256>::kKeys;
  }
}

AttentionBand band_of(const AttentionSpec& a) {
  const auto side = [](std::int64_t keys) {
    return keys < 0 ? kWide : static_cast<std::int32_t>(min_of(keys, std::int64_t{kWide}));
  };
  AttentionBand band;
  band.left = side(a.mask.left);
  band.right = a.mask.causal ? 0 : side(a.mask.right);
  band.shift = static_cast<std::int32_t>(a.seq_k - a.seq_q);
  band.keys = static_cast<std::int32_t>(a.seq_k);
  return band;
}

// TMA and 16-byte stores need every row at a multiple of 16 bytes.
Status check_layout(const char* name, std::int32_t rank, const AttentionTensor& t) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  const auto whole = [](std::int64_t count, std::int64_t stride) { return count <= 1 || stride % kUnit == 0; };
  if (aligned && whole(t.tokens, t.token_stride) && whole(t.heads, t.head_stride) && whole(t.batch, t.batch_stride)) {
    return Ok{};
  }
  return bad_argument(fmt::format(
      "{} of rank {} at address {} with strides {}, {}, {} cannot be read by TMA: on a GPU addresses must be multiples "
      "of 16 bytes and strides of 8 elements",
      name, rank, t.data, t.batch_stride, t.head_stride, t.token_stride));
}

AttentionView view_of(const AttentionTensor& t) { return {t.data, t.batch_stride, t.head_stride, t.token_stride}; }

Status map_tensor(Dtype dtype, const AttentionTensor& t, int box_tokens, CUtensorMap& out) {
  if (t.tokens == 0) return Ok{};
  Result<CUtensorMap> map = make_tensor_map(
      dtype, t.data, TensorShape{t.batch, t.heads, t.tokens, t.dim, t.batch_stride, t.head_stride, t.token_stride},
      box_tokens);
  if (!map.ok()) return map.error();
  out = *map;
  return Ok{};
}

}  // namespace

std::int64_t most_sequences(const AttentionSpec& spec) {
  return spec.packed ? min_of(max_of(max_of(spec.seq_q, spec.seq_k), 1024), kMostSequences) : 0;
}

AttentionMemory place_attention(const PlanSpec& spec, const AttentionTable& table) {
  AttentionMemory at;
  const auto add = [&](std::int64_t bytes) {
    const std::int64_t begin = ceil_div(at.bytes, 256) * 256;
    at.bytes = begin + bytes;
    return begin;
  };
  const auto size = [](const auto& v) { return static_cast<std::int64_t>(v.size() * sizeof(v[0])); };
  const RingAttentionPlan plan = RingAttentionPlan::make(spec);
  const bool parks = plan.steps() > plan.segments;
  at.tiles = add(size(table.tiles));
  at.tile_begin = add(size(table.tile_begin));
  at.steps = add(size(table.steps));
  at.rows_state = add(parks ? plan.tiles * 256 * static_cast<std::int64_t>(sizeof(float4)) : 0);
  at.ends = add(spec.attention.packed ? 2 * (most_sequences(spec.attention) + 1) * 4 : 0);
  return at;
}

Status fill_attention(const Plan& plan, std::int32_t rank, const AttentionTable& table, const AttentionMemory& at,
                      std::byte* base, const std::byte* heap, cudaStream_t stream, AttentionCall& call) {
  const PlanSpec& spec = plan.spec();
  const AttentionSpec& a = spec.attention;
  const RingAttentionPlan& ring = plan.ring_attention();
  cudaError_t status = cudaSuccess;
  const auto upload = [&](std::int64_t to, const auto& v) {
    if (status == cudaSuccess && !v.empty()) {
      status = cudaMemcpyAsync(base + to, v.data(), v.size() * sizeof(v[0]), cudaMemcpyHostToDevice, stream);
    }
  };
  upload(at.tiles, table.tiles);
  upload(at.tile_begin, table.tile_begin);
  upload(at.steps, table.steps);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (status != cudaSuccess) return cuda_error(status, fmt::format("preparing the memory of rank {}", rank));
  call.tiles = reinterpret_cast<const AttentionTile*>(base + at.tiles);
  call.tile_begin = reinterpret_cast<const std::int32_t*>(base + at.tile_begin);
  call.steps = reinterpret_cast<const AttentionStep*>(base + at.steps);
  call.rows_state = reinterpret_cast<float4*>(base + at.rows_state);
  if (a.packed) {
    call.ends_q = reinterpret_cast<const std::int32_t*>(base + at.ends);
    call.ends_k = call.ends_q + most_sequences(a) + 1;
  }
  call.band = band_of(a);
  call.step_count = static_cast<std::int32_t>(table.steps.size());
  call.compute_ctas = static_cast<std::int32_t>(table.tile_begin.size()) - 1;
  call.move_lanes = table.move_lanes;
  call.send_lanes = table.send_lanes;
  call.dim = static_cast<std::int32_t>(a.dim);
  call.heads = static_cast<std::int32_t>(a.heads);
  call.kv_heads = static_cast<std::int32_t>(a.kv_heads);
  call.q_tokens = static_cast<std::int32_t>(a.q_split(spec.topo).tokens(rank));
  call.k_tokens = static_cast<std::int32_t>(a.k_split(spec.topo).tokens(rank));
  call.tiles_in_plan = static_cast<std::int32_t>(ring.tiles);
  call.state_elements = ring.state_elements(spec.tiling.bm);
  call.scale_log2 = static_cast<float>(static_cast<double>(a.scale) * 1.44269504088896340736);
  const HeapLayout layout(plan);
  const std::int64_t kv_rows = plan.buffer_elements(Buffer::kKv) / a.dim;
  for (std::uint64_t parity = 0; parity < 2 && kv_rows > 0; ++parity) {
    Result<CUtensorMap> map = make_tensor_map(spec.dtype, heap + layout.offset(Buffer::kKv, 0, parity), kv_rows, a.dim,
                                              a.dim, keys_per_stage(padded_dim(a.dim)));
    if (!map.ok()) return map.error();
    call.kv[parity] = *map;
  }
  return Ok{};
}

Status take_tensors(const Plan& plan, std::int32_t rank, const AttentionArguments& arguments, AttentionCall& call) {
  const PlanSpec& spec = plan.spec();
  const AttentionSpec& a = spec.attention;
  const struct {
    const char* name;
    const AttentionTensor& tensor;
  } tensors[] = {{"Q", arguments.q}, {"K", arguments.k}, {"V", arguments.v}, {"O", arguments.o}};
  for (const auto& [name, tensor] : tensors) {
    if (tensor.tokens == 0) continue;
    if (Status status = check_layout(name, rank, tensor); !status.ok()) return status;
  }
  if (a.packed && arguments.sequences > most_sequences(a)) {
    return bad_argument(fmt::format("rank {}: sequences is {}: on a GPU this operator takes at most {}", rank,
                                    arguments.sequences, most_sequences(a)));
  }
  const int keys = keys_per_stage(padded_dim(a.dim));
  if (Status status = map_tensor(spec.dtype, arguments.q, kAttentionRows, call.q); !status.ok()) return status;
  if (Status status = map_tensor(spec.dtype, arguments.k, keys, call.k); !status.ok()) return status;
  if (Status status = map_tensor(spec.dtype, arguments.v, keys, call.v); !status.ok()) return status;
  call.k_view = view_of(arguments.k);
  call.v_view = view_of(arguments.v);
  call.o_view = view_of(arguments.o);
  call.lse = arguments.lse;
  call.sequences = arguments.sequences;
  return Ok{};
}

cudaError_t upload_ends(const Plan& plan, const AttentionArguments& arguments, const AttentionCall& call,
                        cudaStream_t stream) {
  if (!plan.spec().attention.packed) return cudaSuccess;
  const std::size_t bytes = (static_cast<std::size_t>(arguments.sequences) + 1) * sizeof(std::int32_t);
  const auto copy = [&](const std::int32_t* to, const std::int32_t* from) {
    return cudaMemcpyAsync(const_cast<std::int32_t*>(to), from, bytes, cudaMemcpyHostToDevice, stream);
  };
  const cudaError_t status = copy(call.ends_q, arguments.cu_seqlens_q);
  return status != cudaSuccess ? status : copy(call.ends_k, arguments.cu_seqlens_k);
}

}  // namespace mkernel
