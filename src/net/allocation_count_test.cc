// Replaces operator new for this test program; in a file of its own, so that no compiler sees through it.
#include "net/allocation_count.h"

#include <cstddef>
#include <cstdlib>
#include <new>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define MK_OPERATOR_NEW_IS_TAKEN
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MK_OPERATOR_NEW_IS_TAKEN
#endif

namespace {
thread_local std::int64_t count = 0;
}

namespace mkernel {
std::int64_t allocation_count() { return count; }

#ifdef MK_OPERATOR_NEW_IS_TAKEN
bool counts_allocations() { return false; }
#else
bool counts_allocations() { return true; }
#endif
}  // namespace mkernel

#ifndef MK_OPERATOR_NEW_IS_TAKEN
void* operator new(std::size_t size) {
  ++count;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  ++count;
  const auto step = static_cast<std::size_t>(alignment);
  void* memory = std::aligned_alloc(step, (size + step - 1) / step * step);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
#endif
