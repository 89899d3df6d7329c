// Memory on huge pages. A world of 1024 GPUs is hundreds of megabytes that are touched all over: with pages of 4 KiB
// about a fifth of the time went into page walks.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <memory_resource>
#include <new>

namespace mkernel {

class HugePages final : public std::pmr::memory_resource {
 private:
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  // Small worlds stay on small pages.
  static std::size_t alignment_for(std::size_t bytes, std::size_t alignment) {
    return bytes >= kPage && alignment < kPage ? kPage : alignment;
  }

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    void* memory = ::operator new (bytes, std::align_val_t{alignment_for(bytes, alignment)});
    if (bytes >= kPage) ::madvise(memory, bytes, MADV_HUGEPAGE);  // a wish; nothing depends on it
    return memory;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    ::operator delete (memory, std::align_val_t{alignment_for(bytes, alignment)});
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }
};

}  // namespace mkernel
