// For tests: how often this thread has asked for memory. Defined in allocation_count_test.cc.
#pragma once
#include <cstdint>

namespace mkernel {

// False where a sanitizer has replaced operator new itself.
bool counts_allocations();
std::int64_t allocation_count();

}  // namespace mkernel
