#include "exec/cuda/pinned_memory.h"

#include <cstring>
#include <utility>

#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel {

Result<PinnedMemory> PinnedMemory::create(std::size_t bytes) {
  PinnedMemory memory;
  void* host = nullptr;
  void* gpu = nullptr;
  cudaError_t status = cudaHostAlloc(&host, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (status == cudaSuccess) {
    memory.host_ = static_cast<std::byte*>(host);
    status = cudaHostGetDevicePointer(&gpu, host, 0);
  }
  if (status != cudaSuccess) return cuda_error(status, fmt::format("allocating {} bytes of pinned memory", bytes));
  memory.gpu_ = static_cast<std::byte*>(gpu);
  std::memset(host, 0, bytes);
  return Result<PinnedMemory>(std::move(memory));
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : host_(std::exchange(other.host_, nullptr)), gpu_(std::exchange(other.gpu_, nullptr)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  // The old memory goes when `other` is destroyed.
  std::swap(host_, other.host_);
  std::swap(gpu_, other.gpu_);
  return *this;
}

PinnedMemory::~PinnedMemory() {
  if (host_ != nullptr) (void)cudaFreeHost(host_);
}

}  // namespace mkernel
