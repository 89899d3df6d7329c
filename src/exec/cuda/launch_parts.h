// Which parts of a call a launch of the persistent kernel does.
#pragma once
#include <cstdint>

namespace mkernel {

// A call can be launched in parts, for comparison with unfused work: all belong to the same epoch.
inline constexpr std::uint32_t kPartCompute = 1;  // serves the compute lane
inline constexpr std::uint32_t kPartMoves = 2;    // serves the other lanes
inline constexpr std::uint32_t kPartLast = 4;     // ends the epoch
inline constexpr std::uint32_t kAllParts = 7;

}  // namespace mkernel
