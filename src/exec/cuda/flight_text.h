// The flight record of a rank on a GPU. Kernels keep the times of their last runs (DeviceControl); this makes lines of
// them, when somebody asks.
#pragma once
#include <string>
#include <vector>

#include "exec/cuda/device_task.h"

namespace mkernel {

struct GpuCall {
  std::string op;
  std::uint64_t epoch = 0;
  DeviceTimes times;  // all zero: launched, but no kernel has begun
};

// The calls of one operator: what its `control` remembers, and those up to epoch `launched` that have not begun.
void append_calls(const DeviceControl& control, const std::string& op, std::uint64_t start_epoch,
                  std::uint64_t launched, std::vector<GpuCall>& calls);

// One line per call, the last kTimesKept of them, in the order in which they began; times in seconds since the first
// began, and those of roles in microseconds since their call began. `failure`, unless empty, is the last line.
std::string flight_text(std::vector<GpuCall> calls, const std::string& failure);

}  // namespace mkernel
