// Host memory that all GPUs can read and write.
#pragma once
#include <cstddef>
#include <cstdint>

#include "mkernel/result.h"

namespace mkernel {

// Movable owner of zeroed, page-locked memory; frees it on destruction, when no kernel may use it any more: freeing
// waits for whatever runs on the GPUs.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  // Errors: kOutOfMemory, kUnsupported. Aligned to a page.
  static Result<PinnedMemory> create(std::size_t bytes);
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  ~PinnedMemory();

  std::byte* host() const { return host_; }
  // Where a kernel finds what the host knows as `p`.
  template <class T>
  T* on_gpu(T* p) const {
    return reinterpret_cast<T*>(gpu_ + (reinterpret_cast<std::byte*>(p) - host_));
  }
  // Gives the memory up without freeing it, since a kernel that does not end may still use it.
  void leak() { host_ = gpu_ = nullptr; }

 private:
  std::byte* host_ = nullptr;
  std::byte* gpu_ = nullptr;
};

}  // namespace mkernel
