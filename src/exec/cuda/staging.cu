#include "exec/cuda/staging.h"

#include <utility>

#include "base/check.h"
#include "exec/cuda/format.h"

namespace mkernel {

Result<std::unique_ptr<StagedHeap>> StagedHeap::create(const PlanSource& source, const HeapLayout& layout,
                                                       std::int32_t rank, std::byte* device) {
  auto heap = std::make_unique<StagedHeap>();
  heap->device = device;
  heap->bytes = layout.bytes();
  if (heap->bytes == 0) return Result<std::unique_ptr<StagedHeap>>(std::move(heap));
  Result<PinnedMemory> mirror = PinnedMemory::create(static_cast<std::size_t>(heap->bytes));
  if (!mirror.ok()) return mirror.error();
  heap->mirror = std::move(*mirror);
  const Plan& plan = source.plan();
  const Topology& topo = plan.topo();
  heap->incoming.resize(2 * std::size_t{plan.flag_count()});
  for (std::int32_t node = 0; node < topo.nodes; ++node) {
    const std::int32_t peer = topo.rank_of(node, topo.gpu_of(rank));
    for (std::int32_t lane = 0; peer != rank && lane < plan.lanes(Role::kSend); ++lane) {
      const std::int64_t count = source.count(peer, Role::kSend, lane);
      for (std::int64_t index = 0; index < count; ++index) {
        const Task task = source.task(peer, Role::kSend, lane, index);
        if (task.action != Action::kPut || task.peer != rank) continue;
        for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
          const auto flag = static_cast<std::size_t>(layout.flag_index(task.signals[0].flag, epoch));
          heap->incoming[flag] = {layout.offset(task.dst, task.dst_offset, epoch),
                                  task.length * dtype_bytes(plan.buffer_dtype(task.dst))};
        }
      }
    }
  }
  return Result<std::unique_ptr<StagedHeap>>(std::move(heap));
}

Status Staging::open() {
  const DeviceGuard guard(device_);
  cudaError_t status = guard.status();
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&out_, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&in_, cudaStreamNonBlocking);
  for (cudaEvent_t& event : events_) {
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  }
  if (status != cudaSuccess)
    return cuda_error(status, fmt::format("creating the network's streams on GPU {}", device_));
  return Ok{};
}

Staging::~Staging() {
  const DeviceGuard guard(device_);
  for (const cudaEvent_t event : events_) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  if (out_ != nullptr) (void)cudaStreamDestroy(out_);
  if (in_ != nullptr) (void)cudaStreamDestroy(in_);
}

void Staging::check(cudaError_t status) {
  if (error_ == cudaSuccess) error_ = status;
}

void Staging::copy_out(const Put& put, int event) {
  const StagedHeap& heap = *heaps_[put.op];
  if (put.bytes > 0) {
    check(cudaMemcpyAsync(heap.mirror.host() + put.src_offset, heap.device + put.src_offset,
                          static_cast<std::size_t>(put.bytes), cudaMemcpyDeviceToHost, out_));
  }
  check(cudaEventRecord(events_[static_cast<std::size_t>(event)], out_));
}

bool Staging::done(int event) {
  const cudaError_t status = cudaEventQuery(events_[static_cast<std::size_t>(event)]);
  if (status != cudaErrorNotReady) check(status);
  return status == cudaSuccess;
}

void Staging::copy_in(std::uint32_t op, std::int64_t flag, std::uint32_t value) {
  const StagedHeap& heap = *heaps_[op];
  const StagedHeap::Incoming& what = heap.incoming[static_cast<std::size_t>(flag)];
  if (what.bytes > 0) {
    check(cudaMemcpyAsync(heap.device + what.offset, heap.mirror.host() + what.offset,
                          static_cast<std::size_t>(what.bytes), cudaMemcpyHostToDevice, in_));
  }
  // order: follows the copy in its stream, and has a fence at system scope before it (its default); pairs with whoever
  // acquires the stamp.
  const CUresult got = api_->stream_write_value32(in_, reinterpret_cast<CUdeviceptr>(heap.device) + 4 * flag, value,
                                                  CU_STREAM_WRITE_VALUE_DEFAULT);
  if (got != CUDA_SUCCESS) check(cudaErrorUnknown);
}

void Staging::settle() {
  check(cudaStreamSynchronize(out_));
  check(cudaStreamSynchronize(in_));
}

std::optional<Error> Staging::failure() const {
  if (error_ == cudaSuccess) return std::nullopt;
  return cuda_error(error_, "copying the network's bytes between GPU and host memory");
}

}  // namespace mkernel
