#include "exec/memory.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "exec/key_ranges.h"

namespace mkernel {
namespace {

void fill_zeros(const OutMatrix* outs, int count) {
  for (int i = 0; i < count; ++i) {
    for (std::int64_t row = 0; row < outs[i].rows; ++row) {
      const std::int64_t bytes = dtype_bytes(outs[i].dtype);
      std::byte* at = static_cast<std::byte*>(outs[i].data) + row * outs[i].row_stride * bytes;
      std::memset(at, 0, static_cast<std::size_t>(outs[i].cols * bytes));
    }
  }
}

}  // namespace

Memory::Memory(const Plan& plan, std::vector<std::byte*> heaps)
    : plan_(plan), layout_(plan), heaps_(std::move(heaps)), arguments_(heaps_.size()) {
  MK_CHECK_OP(heaps_.size(), ==, static_cast<std::size_t>(plan.topo().world()));
}

void Memory::bind(std::int32_t rank, std::uint64_t epoch, const Arguments& arguments) {
  arguments_[rank][epoch & 1] = arguments;
}

OutMatrix Memory::resolve(const Access& access, std::uint64_t epoch) const {
  const Dtype dtype = plan_.buffer_dtype(access.buffer);
  const Block& block = access.block;
  if (access.workspace()) {
    const std::int64_t pitch = access.buffer == Buffer::kGather ? plan_.gather_pitch() : block.cols;
    std::byte* data = heaps_[access.rank] + layout_.offset(access.buffer, access.begin, epoch);
    return {data, dtype, block.rows, block.cols, pitch, 1};
  }
  const Arguments& bound = arguments_[access.rank][epoch & 1];
  if (const auto* attention = std::get_if<AttentionArguments>(&bound)) return resolve_attention(access, *attention);
  if (const auto* back = std::get_if<AttentionBackwardArguments>(&bound)) return resolve_backward(access, *back);
  const GemmArguments& arguments = std::get<GemmArguments>(bound);
  const Matrix& matrix = access.buffer == Buffer::kA   ? arguments.a
                         : access.buffer == Buffer::kB ? arguments.b
                                                       : arguments.c;
  if (block.empty()) return {nullptr, dtype, block.rows, block.cols, matrix.row_stride, matrix.col_stride};
  MK_CHECK_OP(block.row + block.rows, <=, matrix.rows);
  MK_CHECK_OP(block.col + block.cols, <=, matrix.cols);
  const std::int64_t first = block.row * matrix.row_stride + block.col * matrix.col_stride;
  std::byte* data = static_cast<std::byte*>(matrix.data) + first * dtype_bytes(dtype);
  return {data, dtype, block.rows, block.cols, matrix.row_stride, matrix.col_stride};
}

OutMatrix Memory::resolve_attention(const Access& access, const AttentionArguments& arguments) const {
  if (access.buffer == Buffer::kLse) {
    const std::int64_t rows = arguments.lse == nullptr ? 0 : access.block.rows;
    return {rows == 0 ? nullptr : arguments.lse + access.block.row, Dtype::kFp32, rows, 1, 1, 1};
  }
  return resolve_tensor(access, access.buffer == Buffer::kQ   ? arguments.q
                                : access.buffer == Buffer::kK ? arguments.k
                                : access.buffer == Buffer::kV ? arguments.v
                                                              : arguments.o);
}

OutMatrix Memory::resolve_backward(const Access& access, const AttentionBackwardArguments& arguments) const {
  switch (access.buffer) {
    case Buffer::kLse: {
      // Nothing writes there: the plan only reads it.
      float* lse = access.block.rows == 0 ? nullptr : const_cast<float*>(arguments.lse) + access.block.row;
      return {lse, Dtype::kFp32, access.block.rows, 1, 1, 1};
    }
    case Buffer::kQ: return resolve_tensor(access, arguments.q);
    case Buffer::kK: return resolve_tensor(access, arguments.k);
    case Buffer::kV: return resolve_tensor(access, arguments.v);
    case Buffer::kO: return resolve_tensor(access, arguments.o);
    case Buffer::kDo: return resolve_tensor(access, arguments.d_o);
    case Buffer::kDq: return resolve_tensor(access, arguments.dq);
    case Buffer::kDk: return resolve_tensor(access, arguments.dk);
    default: return resolve_tensor(access, arguments.dv);
  }
}

// A block lies within one batch and head.
OutMatrix Memory::resolve_tensor(const Access& access, const AttentionTensor& tensor) const {
  const Dtype dtype = plan_.buffer_dtype(access.buffer);
  const Block& block = access.block;
  if (block.empty()) return {nullptr, dtype, block.rows, block.cols, tensor.token_stride, 1};
  const std::int64_t head = block.row / tensor.tokens;
  MK_CHECK_OP(block.row % tensor.tokens + block.rows, <=, tensor.tokens);
  const std::int64_t first = head / tensor.heads * tensor.batch_stride + head % tensor.heads * tensor.head_stride +
                             block.row % tensor.tokens * tensor.token_stride;
  std::byte* data = static_cast<std::byte*>(tensor.data) + first * dtype_bytes(dtype);
  return {data, dtype, block.rows, block.cols, tensor.token_stride, 1};
}

OutMatrix Memory::write(const Access& access, std::uint64_t epoch) const { return resolve(access, epoch); }

ConstMatrix Memory::read(const Access& access, std::uint64_t epoch) const {
  const OutMatrix m = resolve(access, epoch);
  return {m.data, m.dtype, m.rows, m.cols, m.row_stride, m.col_stride};
}

void Memory::act(std::int32_t rank, const Task& task, std::uint64_t epoch, Scratch& scratch) const {
  if (task.action == Action::kNone || task.action == Action::kPut) return;
  if (task.action == Action::kAttendBackward) return attend_backward(rank, task, epoch, scratch.backward);
  if (task.block.empty()) return;
  if (task.action == Action::kAttend) return attend(rank, task, epoch, scratch.attend);
  const int sources_max = task.source == Source::kRail ? plan_.topo().nodes : plan_.topo().gpus;
  // Small worlds stay on the stack; nothing is allocated on the data path.
  constexpr int kInline = 64;
  ConstMatrix inline_sources[kInline];
  OutMatrix inline_outs[kInline];
  std::vector<ConstMatrix> many_sources;
  std::vector<OutMatrix> many_outs;
  if (sources_max > kInline) many_sources.resize(sources_max);
  if (plan_.topo().gpus + 1 > kInline) many_outs.resize(plan_.topo().gpus + 1);
  ConstMatrix* sources = many_sources.empty() ? inline_sources : many_sources.data();
  OutMatrix* outs = many_outs.empty() ? inline_outs : many_outs.data();

  int source_count = 0;
  for_each_read(plan_, rank, task, [&](const Access& access) { sources[source_count++] = read(access, epoch); });
  int out_count = 0;
  for_each_write(plan_, rank, task, [&](const Access& access) { outs[out_count++] = write(access, epoch); });
  switch (task.action) {
    case Action::kGemm: gemm_tile(sources[0], sources[1], outs, out_count, scratch.tile); break;
    case Action::kReduce:
      if (source_count == 0) return fill_zeros(outs, out_count);  // of keys that nobody sees
      reduce_tile({sources, static_cast<std::size_t>(source_count)}, outs, out_count, scratch.tile);
      break;
    case Action::kCopy: copy_tile(sources[0], outs, out_count); break;
    case Action::kAttend:
    case Action::kAttendBackward:
    case Action::kNone:
    case Action::kPut: break;
  }
}

void Memory::attend(std::int32_t rank, const Task& task, std::uint64_t epoch, AttendScratch& scratch) const {
  if (task.length == 0 && task.resume && task.park) return;  // the state stays as it is
  const auto& arguments = std::get<AttentionArguments>(arguments_[rank][epoch & 1]);
  AttendTile tile;
  tile.q.rows = task.block.rows;
  int source = 0;
  for_each_read(plan_, rank, task, [&](const Access& access) {
    const ConstMatrix matrix = read(access, epoch);
    if (access.buffer == Buffer::kState) {
      tile.resume = static_cast<const float*>(matrix.data);
    } else {
      (source == 0 ? tile.q : source == 1 ? tile.k : tile.v) = matrix;
      ++source;
    }
  });
  tile.o.cols = task.block.cols;
  for_each_write(plan_, rank, task, [&](const Access& access) {
    const OutMatrix matrix = write(access, epoch);
    if (access.buffer == Buffer::kState) {
      tile.park = static_cast<float*>(matrix.data);
    } else {
      (access.buffer == Buffer::kLse ? tile.lse : tile.o) = matrix;
    }
  });
  const AttentionSpec& spec = plan_.spec().attention;
  if (tile.k.rows > 0) {
    const SequenceSplit split = spec.q_split(plan_.topo());
    const std::int64_t query = split.position(rank, task.block.row % split.tokens(rank));
    const PackedEnds ends{arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.sequences};
    fill_key_ranges(spec, ends, {query, task.block.rows}, {task.kv_position, tile.k.rows}, scratch.ranges());
  }
  tile.ranges = scratch.ranges();
  tile.scale = spec.scale;
  attend_tile(tile, scratch);
}

void Memory::attend_backward(std::int32_t rank, const Task& task, std::uint64_t epoch, BackwardScratch& scratch) const {
  const auto& arguments = std::get<AttentionBackwardArguments>(arguments_[rank][epoch & 1]);
  const AttentionSpec& spec = plan_.spec().attention;
  BackwardTile tile;
  tile.meets = task.length > 0;
  tile.rows = leaves_queries(task) ? 0 : task.block.rows;
  tile.keys = leaves_keys(task) ? 0 : task.key_rows;
  int keys_seen = 0;  // keys come before values
  int sums_seen = 0;
  for_each_read(plan_, rank, task, [&](const Access& access) {
    const ConstMatrix matrix = read(access, epoch);
    const auto* floats = static_cast<const float*>(matrix.data);
    switch (access.buffer) {
      case Buffer::kQ: tile.q = matrix; break;
      case Buffer::kDo: tile.d_o = matrix; break;
      case Buffer::kO: tile.o = matrix; break;
      case Buffer::kLse: tile.lse = floats; break;
      case Buffer::kState: tile.q_sums.resume = floats; break;
      case Buffer::kKeyState: (sums_seen++ == 0 ? tile.k_sums : tile.v_sums).resume = floats; break;
      default: (keys_seen++ == 0 ? tile.k : tile.v) = matrix; break;
    }
  });
  sums_seen = 0;
  for_each_write(plan_, rank, task, [&](const Access& access) {
    const OutMatrix matrix = write(access, epoch);
    auto* floats = static_cast<float*>(matrix.data);
    switch (access.buffer) {
      case Buffer::kState: tile.q_sums.park = floats; break;
      case Buffer::kDq: tile.dq = matrix; break;
      case Buffer::kKeyState: (sums_seen++ == 0 ? tile.k_sums : tile.v_sums).park = floats; break;
      default: (sums_seen++ == 0 ? tile.dk : tile.dv) = matrix; break;
    }
  });
  if (tile.meets) {
    const SequenceSplit split = spec.q_split(plan_.topo());
    const std::int64_t query = split.position(rank, task.block.row % split.tokens(rank));
    const PackedEnds ends{arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.sequences};
    fill_key_ranges(spec, ends, {query, task.block.rows}, {task.kv_position, task.key_rows}, scratch.ranges());
  }
  tile.ranges = scratch.ranges();
  tile.scale = spec.scale;
  backward_tile(tile, scratch);
}

Scratch make_scratch(const Plan& plan) {
  const Tiling& tiling = plan.spec().tiling;
  const std::int64_t dim = plan.spec().attention.dim;
  switch (plan.spec().op) {
    case Op::kRingAttention: return {TileScratch(0, 0, 0), AttendScratch(tiling.bm, dim), BackwardScratch(0, 0, 0)};
    case Op::kRingAttentionBackward:
      return {TileScratch(0, 0, 0), AttendScratch(0, 0), BackwardScratch(tiling.bm, tiling.bn, dim)};
    default: return {TileScratch(tiling.bm, tiling.bn, plan.gemm_k(0)), AttendScratch(0, 0), BackwardScratch(0, 0, 0)};
  }
}

}  // namespace mkernel
