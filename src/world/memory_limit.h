// How much memory this process may still take.
#pragma once
#include <cstdint>
#include <string>

namespace mkernel {

// Bytes that can be taken without swapping or being killed: what the system has available, and what is left of the
// limits of our control groups, less a margin for everything else. A huge number when the system does not say.
std::int64_t available_memory();

// The same for a system whose files are under `root` instead of "/".
std::int64_t available_memory_of(const std::string& root);

}  // namespace mkernel
