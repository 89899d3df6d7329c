#include "world/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string_view>

namespace mkernel {
namespace {

constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLeastMargin = 64 << 20;  // code, stacks, and the caller's own growth

// The number after `key` in a file of lines "key number"; kUnknown when it is not there.
std::int64_t find_number(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string word;
  std::int64_t number = 0;
  while (file >> word) {
    if (word == key && file >> number) return number;
    file.clear();
  }
  return kUnknown;
}

// The only number of a file; kUnknown for "max" or no file.
std::int64_t read_number(const std::string& path) {
  std::ifstream file(path);
  std::int64_t number = 0;
  return file >> number ? number : kUnknown;
}

// What is left of one control group of version 2. Cached files that nobody has used for long are given up on demand.
std::int64_t left_in_group(const std::string& folder) {
  const std::int64_t limit = read_number(folder + "/memory.max");
  const std::int64_t used = read_number(folder + "/memory.current");
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  const std::int64_t cached = find_number(folder + "/memory.stat", "inactive_file");
  return std::max<std::int64_t>(0, limit - used + (cached == kUnknown ? 0 : cached));
}

// The least of our own group and of all above it.
std::int64_t left_in_groups(const std::string& root) {
  std::string path;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  std::int64_t left = kUnknown;
  for (;;) {
    left = std::min(left, left_in_group(root + "/sys/fs/cgroup" + path));
    if (path.empty() || path == "/") return left;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

std::int64_t available_memory() { return available_memory_of(""); }

std::int64_t available_memory_of(const std::string& root) {
  const std::int64_t kilobytes = find_number(root + "/proc/meminfo", "MemAvailable:");
  std::int64_t available = kilobytes == kUnknown ? kUnknown : kilobytes * 1024;
  available = std::min(available, left_in_groups(root));
  if (available == kUnknown) return kUnknown;
  return std::max<std::int64_t>(0, available - std::max(kLeastMargin, available / 16));
}

}  // namespace mkernel
