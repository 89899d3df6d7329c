#include "exec/cuda/cpu_affinity.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>

namespace mkernel {

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus;
  const char* at = text.data();
  const char* end = at + text.size();
  while (end != at && std::isspace(static_cast<unsigned char>(end[-1]))) --end;
  while (at != end) {
    int first = 0;
    auto [next, error] = std::from_chars(at, end, first);
    if (error != std::errc() || first < 0) return {};
    int last = first;
    if (next != end && *next == '-') {
      const auto range = std::from_chars(next + 1, end, last);
      if (range.ec != std::errc() || last < first || last >= CPU_SETSIZE) return {};
      next = range.ptr;
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (next != end && (*next != ',' || next + 1 == end)) return {};
    at = next == end ? end : next + 1;
  }
  return cpus;
}

void stay_near_pci_device(std::string bus_id) {
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(), [](unsigned char c) { return std::tolower(c); });
  std::ifstream file("/sys/bus/pci/devices/" + bus_id + "/local_cpulist");
  std::string text;
  if (!std::getline(file, text)) return;
  cpu_set_t mine;
  cpu_set_t near;
  CPU_ZERO(&near);
  if (sched_getaffinity(0, sizeof(mine), &mine) != 0) return;
  for (const int cpu : parse_cpu_list(text)) {
    if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &mine)) CPU_SET(cpu, &near);
  }
  if (CPU_COUNT(&near) > 0) (void)sched_setaffinity(0, sizeof(near), &near);
}

int usable_cores() {
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof(mine), &mine) != 0) return 1;
  return std::max(1, CPU_COUNT(&mine));
}

}  // namespace mkernel
