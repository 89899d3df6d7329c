// What only NVIDIA's management library knows, loaded when it is there.
#pragma once
#include <string>

namespace mkernel::bench {

// "580.159.04", or "unknown".
std::string driver_version();

// The SM clock of GPU 0 at this moment in MHz; 0 when it cannot be read.
int sm_clock_mhz();

}  // namespace mkernel::bench
