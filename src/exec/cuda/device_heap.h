// A rank's symmetric heap on a GPU: CUDA virtual memory, mapped for every GPU that may touch it, and shareable with
// other processes of the host by file descriptor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/owned_file.h"
#include "mkernel/result.h"

namespace mkernel {

// Movable owner of one mapping; unmaps and releases on destruction.
class DeviceHeap {
 public:
  DeviceHeap() = default;
  // Zeroed memory on `device`, readable and writable by `device` and by every one of `peers`. `bytes` >= 0.
  // Errors: kOutOfMemory with the sizes, kUnsupported naming the pair of GPUs without peer access and the remedy.
  static Result<DeviceHeap> create(int device, std::int64_t bytes, std::span<const int> peers);
  // Maps memory that another process has exported, for `device`. Takes the descriptor over.
  static Result<DeviceHeap> import_from(int fd, std::int64_t bytes, int device);
  DeviceHeap(DeviceHeap&& other) noexcept;
  DeviceHeap& operator=(DeviceHeap&& other) noexcept;
  ~DeviceHeap();

  std::byte* data() const { return data_; }  // a device address; null when bytes() is 0
  std::int64_t bytes() const { return bytes_; }
  // A new file descriptor for import_from() in another process; the caller closes it.
  Result<int> export_fd() const;
  // A dma-buf of all of the heap, data() at its beginning, through which network cards reach it. Errors: kUnsupported,
  // where the driver makes none.
  Result<OwnedFile> dmabuf() const;

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;         // asked for
  std::int64_t mapped_ = 0;        // rounded up to the granularity
  unsigned long long handle_ = 0;  // CUmemGenericAllocationHandle
};

}  // namespace mkernel
