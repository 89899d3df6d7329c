// What this machine has.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace mkernel::cli {

struct Machine {
  std::string cpu;  // model name; "unknown CPU" where the system does not tell
  int cores = 1;    // that this process may use
  std::int64_t memory_bytes = 0;
  std::int64_t available_bytes = 0;
  bool nvidia_driver = false;
  std::vector<std::string> rdma_devices;  // such as mlx5_0
};

Machine inspect_machine();

// The most memory that this process has had.
std::int64_t peak_resident_bytes();

}  // namespace mkernel::cli
