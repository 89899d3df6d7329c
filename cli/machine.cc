#include "cli/machine.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>

#include "world/memory_limit.h"

namespace mkernel::cli {
namespace {

namespace fs = std::filesystem;

// The line of `path` that begins with `key`, without key, colon and white space.
std::optional<std::string> field(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t begin = line.find_first_not_of(" \t:", key.size());
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return std::nullopt;
}

// Of a line such as "MemTotal: 24 kB"; 0 when there is none.
std::int64_t meminfo_bytes(std::string_view key) {
  const std::string text = field("/proc/meminfo", key).value_or("");
  std::int64_t kilobytes = 0;
  std::from_chars(text.data(), text.data() + text.size(), kilobytes);
  return kilobytes * 1024;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{usage.ru_maxrss} * 1024;
}

Machine inspect_machine() {
  Machine machine;
  machine.cpu = field("/proc/cpuinfo", "model name").value_or("unknown CPU");
  machine.cores = usable_cores();
  machine.memory_bytes = meminfo_bytes("MemTotal:");
  machine.available_bytes = available_memory();
  std::error_code ignored;
  machine.nvidia_driver = fs::exists("/proc/driver/nvidia/version", ignored);
  for (const auto& entry : fs::directory_iterator("/sys/class/infiniband", ignored)) {
    machine.rdma_devices.push_back(entry.path().filename().string());
  }
  std::sort(machine.rdma_devices.begin(), machine.rdma_devices.end());
  return machine;
}

}  // namespace mkernel::cli
