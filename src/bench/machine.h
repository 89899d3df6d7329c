// What a measurement was made on.
#pragma once
#include <string>

namespace mkernel::bench {

struct Machine {
  std::string gpu;     // "NVIDIA H200"
  std::string driver;  // "580.159.04"
  std::string cuda;    // "13.0"
  int sms = 0;
};

}  // namespace mkernel::bench
