#include "net/verbs/nic_choice.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <tuple>

namespace mkernel {
namespace {

namespace fs = std::filesystem;

// The first line of a file; empty when it cannot be read, as sysfs does for holes of a GID table.
std::string read_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<int> to_number(std::string_view text) {
  int value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

int read_number(const fs::path& path, int otherwise) { return to_number(read_line(path)).value_or(otherwise); }

// "pci0000:15", "0000:15:01.0", ...: what the real path of a PCI device has below "devices".
std::vector<std::string> pci_path_of(const fs::path& device) {
  std::error_code missing;
  const fs::path real = fs::canonical(device, missing);
  std::vector<std::string> path;
  if (missing) return path;
  for (const fs::path& part : real) {
    const std::string name = part.string();
    if (!path.empty() || name.starts_with("pci")) path.push_back(name);
  }
  return path;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::size_t common_length(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  const auto [end, unused] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<std::size_t>(end - a.begin());
}

// PCIe links between the two, where they are below one bridge.
int hops(const GpuPlace& gpu, const Nic& nic) {
  const std::size_t common = common_length(gpu.pci_path, nic.pci_path);
  return common == 0 ? 0 : static_cast<int>(gpu.pci_path.size() + nic.pci_path.size() - 2 * common);
}

}  // namespace

std::vector<Nic> find_nics(const std::string& sysfs) {
  std::vector<Nic> nics;
  const fs::path all = fs::path(sysfs) / "class/infiniband";
  for (const std::string& device : names_in(all)) {
    for (const std::string& port : names_in(all / device / "ports")) {
      const fs::path folder = all / device / "ports" / port;
      Nic nic;
      nic.device = device;
      nic.port = to_number(port).value_or(1);
      nic.active = read_line(folder / "state").find("ACTIVE") != std::string::npos;
      nic.ethernet = read_line(folder / "link_layer") == "Ethernet";
      nic.pci_path = pci_path_of(all / device / "device");
      nic.numa_node = read_number(all / device / "device/numa_node", -1);
      nics.push_back(std::move(nic));
    }
  }
  return nics;
}

Result<NicFilter> NicFilter::parse(std::string_view text) {
  NicFilter filter;
  const std::string whole(text);
  if (text.starts_with('^')) {
    filter.exclude_ = true;
    text.remove_prefix(1);
  }
  if (text.starts_with('=')) {
    filter.exact_ = true;
    text.remove_prefix(1);
  }
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    if (word.empty()) continue;
    Entry entry;
    const std::size_t colon = word.find(':');
    entry.device = word.substr(0, colon);
    if (colon != std::string_view::npos) {
      const std::optional<int> port = to_number(word.substr(colon + 1));
      if (!port || *port < 1 || *port > 255) {
        return bad_argument(
            fmt::format("'{}' names no network cards: after the colon of '{}' there must be the number "
                        "of a port, from 1",
                        whole, word));
      }
      entry.port = *port;
    }
    filter.entries_.push_back(std::move(entry));
  }
  if (filter.entries_.empty() && !whole.empty()) {
    return bad_argument(
        fmt::format("'{}' names no network cards: it must be a list such as mlx5_0,mlx5_1:1, with ^ "
                    "before it for all others and = before it for exact names",
                    whole));
  }
  return filter;
}

bool NicFilter::accepts(const Nic& nic) const {
  if (entries_.empty()) return true;
  const bool named = std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    if (entry.port != 0 && entry.port != nic.port) return false;
    return exact_ ? nic.device == entry.device : nic.device.starts_with(entry.device);
  });
  return named != exclude_;
}

std::string sysfs_address(const std::string& address) {
  std::string name = address;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  if (name.size() == std::strlen("00000000:17:00.0")) name.erase(0, 4);  // NVML writes 8 digits of the domain
  return name;
}

GpuPlace find_gpu(const std::string& sysfs, const std::string& address) {
  const fs::path device = fs::path(sysfs) / "bus/pci/devices" / sysfs_address(address);
  return {pci_path_of(device), read_number(device / "numa_node", -1)};
}

Nearness nearness(const GpuPlace& gpu, const Nic& nic) {
  const std::size_t common = common_length(gpu.pci_path, nic.pci_path);
  if (common >= 2) return Nearness::kSwitch;
  if (common == 1) return Nearness::kBridge;
  return gpu.numa_node >= 0 && gpu.numa_node == nic.numa_node ? Nearness::kNuma : Nearness::kFar;
}

const char* nearness_text(Nearness nearness) {
  switch (nearness) {
    case Nearness::kSwitch: return "below one PCIe switch or root port";
    case Nearness::kBridge: return "below one PCIe host bridge";
    case Nearness::kNuma: return "on one NUMA node";
    case Nearness::kFar: break;
  }
  return "on another NUMA node, or nobody knows where";
}

std::vector<std::string> find_gpu_addresses(const std::string& sysfs) {
  const fs::path all = fs::path(sysfs) / "bus/pci/devices";
  std::vector<std::string> addresses;
  for (const std::string& address : names_in(all)) {
    // PCI class 03: display; 00 of it has a screen, 02 has none.
    const std::string kind = read_line(all / address / "class");
    if (read_line(all / address / "vendor") != "0x10de") continue;
    if (kind.starts_with("0x0300") || kind.starts_with("0x0302")) addresses.push_back(address);
  }
  return addresses;
}

std::vector<std::vector<int>> assign_nics(const std::vector<GpuPlace>& gpus, const std::vector<Nic>& nics) {
  std::vector<std::vector<int>> assigned(gpus.size());
  if (nics.empty() || gpus.empty()) return assigned;
  const int most = static_cast<int>((gpus.size() + nics.size() - 1) / nics.size());  // GPUs per card
  const std::size_t rounds = std::max<std::size_t>(1, nics.size() / gpus.size());    // cards per GPU
  std::vector<int> load(nics.size());
  for (std::size_t round = 0; round < rounds; ++round) {
    // The GPU that has the nearest card left goes first, so that none takes from another what it needs less.
    std::vector<bool> served(gpus.size());
    for (std::size_t turn = 0; turn < gpus.size(); ++turn) {
      // Nearness, load of the card, PCIe links, GPU, card.
      std::tuple<Nearness, int, int, std::size_t, std::size_t> best{Nearness::kFar, std::numeric_limits<int>::max(), 0,
                                                                    0, 0};
      for (std::size_t g = 0; g < gpus.size(); ++g) {
        if (served[g]) continue;
        for (std::size_t n = 0; n < nics.size(); ++n) {
          if (load[n] >= most) continue;
          best = std::min(best, {nearness(gpus[g], nics[n]), load[n], hops(gpus[g], nics[n]), g, n});
        }
      }
      const std::size_t gpu = std::get<3>(best);
      const std::size_t nic = std::get<4>(best);
      served[gpu] = true;
      ++load[nic];
      assigned[gpu].push_back(static_cast<int>(nic));
    }
  }
  return assigned;
}

std::vector<GidEntry> read_gids(const std::string& sysfs, const Nic& nic) {
  std::vector<GidEntry> entries;
  const fs::path folder = fs::path(sysfs) / "class/infiniband" / nic.device / "ports" / std::to_string(nic.port);
  for (const std::string& name : names_in(folder / "gids")) {
    const std::optional<int> index = to_number(name);
    GidEntry entry;
    if (!index || inet_pton(AF_INET6, read_line(folder / "gids" / name).c_str(), entry.gid.data()) != 1) continue;
    if (entry.gid == std::array<std::uint8_t, 16>{}) continue;
    entry.index = *index;
    entry.roce_v2 = read_line(folder / "gid_attrs/types" / name) == "RoCE v2";
    entry.interface = read_line(folder / "gid_attrs/ndevs" / name);
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const GidEntry& a, const GidEntry& b) { return a.index < b.index; });
  return entries;
}

int choose_gid(const std::vector<GidEntry>& entries) {
  const auto rank = [](const GidEntry& entry) {
    constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const bool ip4 = std::equal(std::begin(kMapped), std::end(kMapped), entry.gid.begin());
    const bool link_local = entry.gid[0] == 0xfe && (entry.gid[1] & 0xc0) == 0x80;
    return std::pair(!entry.roce_v2, ip4 ? 0 : link_local ? 2 : 1);
  };
  const auto best = std::min_element(entries.begin(), entries.end(),
                                     [&](const GidEntry& a, const GidEntry& b) { return rank(a) < rank(b); });
  return best == entries.end() ? -1 : best->index;
}

}  // namespace mkernel
