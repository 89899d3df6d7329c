#include "bench/nvml.h"

#include <dlfcn.h>

#include <array>

namespace mkernel::bench {
namespace {

// As nvml.h declares them, which is no part of every toolkit.
constexpr int kSuccess = 0;
constexpr int kClockSm = 1;
using Device = struct NvmlDevice*;

struct Nvml {
  int (*get_driver_version)(char*, unsigned) = nullptr;
  int (*get_clock)(Device, int, unsigned*) = nullptr;
  Device device = nullptr;

  Nvml() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto by_index = reinterpret_cast<int (*)(unsigned, Device*)>(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
    if (init == nullptr || init() != kSuccess) return;
    get_driver_version = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(library, "nvmlSystemGetDriverVersion"));
    if (by_index == nullptr || by_index(0, &device) != kSuccess) return;
    get_clock = reinterpret_cast<int (*)(Device, int, unsigned*)>(dlsym(library, "nvmlDeviceGetClockInfo"));
  }
};

const Nvml& nvml() {
  static const Nvml loaded;
  return loaded;
}

}  // namespace

std::string driver_version() {
  std::array<char, 96> text{};
  if (nvml().get_driver_version == nullptr ||
      nvml().get_driver_version(text.data(), static_cast<unsigned>(text.size()) - 1) != kSuccess) {
    return "unknown";
  }
  return text.data();
}

int sm_clock_mhz() {
  unsigned mhz = 0;
  if (nvml().get_clock == nullptr || nvml().get_clock(nvml().device, kClockSm, &mhz) != kSuccess) return 0;
  return static_cast<int>(mhz);
}

}  // namespace mkernel::bench
