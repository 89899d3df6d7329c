#include "exec/cuda/gpu_landing.h"

#include <utility>

#include "base/check.h"

namespace mkernel {
namespace {

std::uint64_t pack(CopyMark mark) { return (static_cast<std::uint64_t>(mark.rank) << 32) | mark.count; }
CopyMark unpack(std::uint64_t word) {
  return {static_cast<std::int32_t>(word >> 32), static_cast<std::uint32_t>(word)};
}

}  // namespace

void GpuLanding::add_operator(std::uint32_t number, std::uint32_t flag_count, std::vector<std::byte*> heaps) {
  MK_CHECK_OP(number, <, kMaxOperators);
  auto op = std::make_unique<Operator>();
  op->flags = 2 * std::size_t{flag_count};
  op->marks = std::make_unique<std::atomic<std::uint64_t>[]>(heaps.size() * op->flags);
  op->heaps = std::move(heaps);
  // order: the operator is complete when a put finds it; pairs with find().
  operators_[number].store(op.get(), std::memory_order_release);
  owned_[number] = std::move(op);
}

void GpuLanding::remove_operator(std::uint32_t number) {
  // The object stays: a proxy thread may have found it a moment ago.
  operators_[number].store(nullptr, std::memory_order_relaxed);
}

std::int64_t GpuLanding::operator_bytes(std::uint32_t number) const {
  const Operator* op = find(number);
  return op == nullptr ? 0 : op->bytes.load(std::memory_order_relaxed);
}

GpuLanding::Operator* GpuLanding::find(std::uint32_t number) const {
  return operators_[number].load(std::memory_order_acquire);  // order: pairs with add_operator()
}

void GpuLanding::copy(Operator& op, const Put& put, std::int64_t begin, std::int64_t bytes) {
  std::byte* const dst = op.heaps[static_cast<std::size_t>(put.dst_rank)] + put.dst_offset + begin;
  const std::byte* const src = op.heaps[static_cast<std::size_t>(put.src_rank)] + put.src_offset + begin;
  const CopyMark mark = wire_->copy(put.src_rank, dst, src, bytes);
  // order: none needed, see Operator::marks: the arrival queue of the network orders it.
  op.mark(put.dst_rank, put.flag).store(pack(mark), std::memory_order_relaxed);
}

void GpuLanding::posted(const Put& put) {
  if (dropped_.load(std::memory_order_relaxed)) return;
  Operator* op = find(put.op);
  if (op == nullptr) return;
  op->bytes.fetch_add(put.bytes, std::memory_order_relaxed);
  if (put.bytes == 0) {
    op->mark(put.dst_rank, put.flag).store(pack(wire_->reached(put.src_rank)), std::memory_order_relaxed);
  } else if (!unordered_) {
    copy(*op, put, 0, put.bytes);
  }
}

void GpuLanding::land(const Put& put, std::int64_t begin, std::int64_t bytes) {
  if (!unordered_ || bytes == 0 || dropped_.load(std::memory_order_relaxed)) return;
  if (Operator* op = find(put.op)) copy(*op, put, begin, bytes);
}

void GpuLanding::stamp(std::int32_t rank, std::uint32_t number, std::int64_t flag, std::uint32_t value) {
  if (dropped_.load(std::memory_order_relaxed)) return;
  const Operator* op = find(number);
  if (op == nullptr) return;
  const CopyMark after = unpack(op->mark(rank, flag).load(std::memory_order_relaxed));
  auto* const flags = reinterpret_cast<std::uint32_t*>(op->heaps[static_cast<std::size_t>(rank)]);
  // A queue of the wire belongs to one thread: in a network with order the source's stamps, else the receiver's.
  wire_->stamp(unordered_ ? rank : after.rank, flags + flag, value, after);
}

}  // namespace mkernel
