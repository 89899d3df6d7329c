#include "net/verbs/nic_report.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace mkernel {
namespace {

std::string address_text(const std::array<std::uint8_t, 16>& gid) {
  constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  char text[INET6_ADDRSTRLEN] = {};
  const bool ip4 = std::equal(std::begin(kMapped), std::end(kMapped), gid.begin());
  return ip4 ? inet_ntop(AF_INET, gid.data() + 12, text, sizeof text)
             : inet_ntop(AF_INET6, gid.data(), text, sizeof text);
}

std::string gid_text(const VerbsSettings& settings, const std::string& sysfs, const Nic& nic) {
  if (!nic.ethernet) return "";
  const std::vector<GidEntry> entries = read_gids(sysfs, nic);
  const int index = settings.gid_index >= 0 ? settings.gid_index : choose_gid(entries);
  for (const GidEntry& entry : entries) {
    if (entry.index != index) continue;
    return fmt::format("GID {}, {}{}{}, RoCE {}", index, address_text(entry.gid), entry.interface.empty() ? "" : " of ",
                       entry.interface, entry.roce_v2 ? "v2" : "v1");
  }
  return "";
}

}  // namespace

NicReport report_nics(const VerbsSettings& settings, const std::string& sysfs) {
  NicReport report;
  std::vector<Nic> used;
  for (Nic& nic : find_nics(sysfs)) {
    PortReport port;
    port.why_not = why_not_used(settings, nic);
    port.gid = gid_text(settings, sysfs, nic);
    if (port.why_not.empty() && nic.ethernet && port.gid.empty()) {
      port.why_not = settings.gid_index >= 0 ? fmt::format("it has no GID with index {}", settings.gid_index)
                                             : "its network interface has no address";
    }
    if (why_not_used(settings, nic).empty()) used.push_back(nic);  // as choose_nics() does
    port.nic = std::move(nic);
    report.ports.push_back(std::move(port));
  }
  const std::vector<std::string> addresses = find_gpu_addresses(sysfs);
  std::vector<GpuPlace> places;
  for (const std::string& address : addresses) places.push_back(find_gpu(sysfs, address));
  const std::vector<std::vector<int>> assigned = assign_nics(places, used);
  for (std::size_t gpu = 0; gpu < addresses.size() && !used.empty(); ++gpu) {
    GpuPort port{addresses[gpu], rails_of(settings, used, assigned[gpu]), Nearness::kSwitch};
    for (const Nic& nic : port.rails) port.nearness = std::max(port.nearness, nearness(places[gpu], nic));
    report.gpus.push_back(std::move(port));
  }
  return report;
}

std::string port_text(const PortReport& port) {
  std::string text = fmt::format("{} {}", port.nic.name(), port.nic.ethernet ? "Ethernet" : "InfiniBand or EFA");
  if (port.nic.numa_node >= 0) text += fmt::format(", NUMA node {}", port.nic.numa_node);
  if (!port.gid.empty()) text += ", " + port.gid;
  return text + (port.why_not.empty() ? ": used" : ": not used, " + port.why_not);
}

std::string gpu_text(const GpuPort& gpu) {
  std::vector<std::string> names;
  for (const Nic& nic : gpu.rails) names.push_back(nic.name());
  const std::string rails = names.size() > 1 ? fmt::format("{} rails, ", names.size()) : "";
  return fmt::format("GPU {} takes {}{}, {}", gpu.gpu, rails, fmt::join(names, " and "), nearness_text(gpu.nearness));
}

}  // namespace mkernel
