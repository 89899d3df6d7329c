#include "cli/device_tensors.h"

namespace mkernel::cli {
namespace {

constexpr std::int64_t kElementBytes = 2;  // a GPU takes bf16 and fp16

// From the first to the last element.
std::int64_t bytes_of(const AttentionTensor& t) {
  if (t.batch * t.heads * t.tokens == 0) return 0;
  const std::int64_t last =
      (t.batch - 1) * t.batch_stride + (t.heads - 1) * t.head_stride + (t.tokens - 1) * t.token_stride;
  return (last + t.dim) * kElementBytes;
}
std::int64_t lse_bytes(const AttentionArguments& arguments) {
  const AttentionTensor& o = arguments.o;
  return o.batch * o.heads * o.tokens * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace

Result<DeviceTensors> DeviceTensors::create(World& world, std::span<const AttentionArguments> host) {
  DeviceTensors made(world);
  for (std::size_t i = 0; i < host.size(); ++i) {
    const int rank = static_cast<int>(i);
    AttentionArguments device = host[i];
    for (AttentionTensor* tensor : {&device.q, &device.k, &device.v, &device.o}) {
      const void* from = tensor->data;
      if (const Status status = made.take(rank, bytes_of(*tensor), &tensor->data); !status) return status.error();
      if (tensor == &device.o || bytes_of(*tensor) == 0) continue;
      if (const Status status = world.copy(rank, tensor->data, from, bytes_of(*tensor)); !status) {
        return status.error();
      }
    }
    void* lse = nullptr;
    if (const Status status = made.take(rank, lse_bytes(device), &lse); !status) return status.error();
    device.lse = static_cast<float*>(lse);
    made.arguments_.push_back(device);
  }
  return made;
}

DeviceTensors::~DeviceTensors() {
  for (const auto& [rank, data] : blocks_) world_->release(rank, data);
}

Status DeviceTensors::take(int rank, std::int64_t bytes, void** data) {
  auto block = world_->allocate(rank, bytes);
  if (!block) return block.error();
  *data = *block;
  blocks_.push_back({rank, *block});
  return Ok{};
}

Status DeviceTensors::download(std::span<const AttentionArguments> host) {
  for (std::size_t i = 0; i < host.size(); ++i) {
    const int rank = static_cast<int>(i);
    const AttentionArguments& device = arguments_[i];
    if (const std::int64_t bytes = bytes_of(device.o); bytes > 0) {
      if (const Status status = world_->copy(rank, host[i].o.data, device.o.data, bytes); !status) return status;
    }
    if (const std::int64_t bytes = lse_bytes(device); bytes > 0) {
      if (const Status status = world_->copy(rank, host[i].lse, device.lse, bytes); !status) return status;
    }
  }
  return Ok{};
}

}  // namespace mkernel::cli
