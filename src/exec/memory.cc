#include "exec/memory.h"

#include <utility>

#include "base/check.h"

namespace mkernel {

Memory::Memory(const Plan& plan, std::vector<std::byte*> heaps)
    : plan_(plan), layout_(plan), heaps_(std::move(heaps)), arguments_(heaps_.size()) {
  MK_CHECK_OP(heaps_.size(), ==, static_cast<std::size_t>(plan.topo().world()));
}

void Memory::bind(std::int32_t rank, std::uint64_t epoch, const GemmArguments& arguments) {
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
  const GemmArguments& arguments = arguments_[access.rank][epoch & 1];
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

OutMatrix Memory::write(const Access& access, std::uint64_t epoch) const { return resolve(access, epoch); }

ConstMatrix Memory::read(const Access& access, std::uint64_t epoch) const {
  const OutMatrix m = resolve(access, epoch);
  return {m.data, m.dtype, m.rows, m.cols, m.row_stride, m.col_stride};
}

void Memory::act(std::int32_t rank, const Task& task, std::uint64_t epoch, TileScratch& scratch) const {
  if (task.action == Action::kNone || task.action == Action::kPut || task.block.empty()) return;
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
    case Action::kGemm: gemm_tile(sources[0], sources[1], outs, out_count, scratch); break;
    case Action::kReduce:
      reduce_tile({sources, static_cast<std::size_t>(source_count)}, outs, out_count, scratch);
      break;
    case Action::kCopy: copy_tile(sources[0], outs, out_count); break;
    case Action::kNone:
    case Action::kPut: break;
  }
}

TileScratch make_scratch(const Plan& plan) {
  return TileScratch(plan.spec().tiling.bm, plan.spec().tiling.bn, plan.gemm_k(0));
}

}  // namespace mkernel
