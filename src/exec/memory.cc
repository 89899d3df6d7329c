#include "exec/memory.h"

#include <utility>

#include "base/check.h"
#include "exec/key_ranges.h"

namespace mkernel {

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

// A block lies within one batch and head.
OutMatrix Memory::resolve_attention(const Access& access, const AttentionArguments& arguments) const {
  const Dtype dtype = plan_.buffer_dtype(access.buffer);
  const Block& block = access.block;
  if (access.buffer == Buffer::kLse) {
    const std::int64_t rows = arguments.lse == nullptr ? 0 : block.rows;
    return {rows == 0 ? nullptr : arguments.lse + block.row, dtype, rows, 1, 1, 1};
  }
  const AttentionTensor& tensor = access.buffer == Buffer::kQ   ? arguments.q
                                  : access.buffer == Buffer::kK ? arguments.k
                                  : access.buffer == Buffer::kV ? arguments.v
                                                                : arguments.o;
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
  if (task.action == Action::kNone || task.action == Action::kPut || task.block.empty()) return;
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
      reduce_tile({sources, static_cast<std::size_t>(source_count)}, outs, out_count, scratch.tile);
      break;
    case Action::kCopy: copy_tile(sources[0], outs, out_count); break;
    case Action::kAttend:
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
    fill_key_ranges(spec, arguments, {query, task.block.rows}, {task.kv_position, tile.k.rows}, scratch.ranges());
  }
  tile.ranges = scratch.ranges();
  tile.scale = spec.scale;
  attend_tile(tile, scratch);
}

Scratch make_scratch(const Plan& plan) {
  const Tiling& tiling = plan.spec().tiling;
  if (plan.spec().op == Op::kRingAttention) {
    return {TileScratch(0, 0, 0), AttendScratch(tiling.bm, plan.spec().attention.dim)};
  }
  return {TileScratch(tiling.bm, tiling.bn, plan.gemm_k(0)), AttendScratch(0, 0)};
}

}  // namespace mkernel
