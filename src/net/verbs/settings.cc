#include "net/verbs/settings.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>

namespace mkernel {
namespace {

using Environment = std::function<const char*(const char*)>;

struct Variable {
  std::string name;
  std::string text;  // empty: not set
};

Variable find_variable(const Environment& environment, const std::string& name) {
  for (const char* prefix : {"MKERNEL_IB_", "NCCL_IB_"}) {
    const char* text = environment((prefix + name).c_str());
    if (text != nullptr && *text != '\0') return {prefix + name, text};
  }
  return {};
}

Status read_number(const Environment& environment, const std::string& name, int low, int high, int& number) {
  const Variable variable = find_variable(environment, name);
  if (variable.text.empty()) return Ok{};
  const char* end = variable.text.data() + variable.text.size();
  int value = 0;
  const auto parsed = std::from_chars(variable.text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value < low || value > high) {
    return bad_argument(fmt::format("the environment variable {} is '{}': it must be a number from {} to {}",
                                    variable.name, variable.text, low, high));
  }
  number = value;
  return Ok{};
}

std::string list_of(const std::vector<Nic>& nics) {
  std::string text;
  for (const Nic& nic : nics) text += (text.empty() ? "" : ", ") + nic.name() + (nic.active ? "" : " (not active)");
  return text.empty() ? "none" : text;
}

}  // namespace

Result<VerbsSettings> verbs_settings_from(const Environment& environment) {
  VerbsSettings settings;
  const Variable cards = find_variable(environment, "HCA");
  Result<NicFilter> filter = NicFilter::parse(cards.text);
  if (!filter.ok()) {
    return bad_argument(fmt::format("the environment variable {}: {}", cards.name, filter.error().message));
  }
  settings.nics = std::move(filter).value();
  // -1 is NCCL's own word for "choose".
  if (Status status = read_number(environment, "GID_INDEX", -1, 255, settings.gid_index); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "TC", 0, 255, settings.traffic_class); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "SL", 0, 15, settings.service_level); !status.ok()) {
    return status.error();
  }
  return settings;
}

Result<Nic> choose_nic(const VerbsSettings& settings, const std::string& sysfs, const std::vector<GpuPlace>& gpus,
                       int gpu) {
  const std::vector<Nic> all = find_nics(sysfs);
  std::vector<Nic> usable;
  std::copy_if(all.begin(), all.end(), std::back_inserter(usable),
               [&](const Nic& nic) { return nic.active && settings.nics.accepts(nic); });
  if (usable.empty()) {
    return Error{ErrorKind::kUnsupported,
                 all.empty() ? "this machine has no RDMA device (/sys/class/infiniband is empty)"
                             : fmt::format("no RDMA port is active and named by MKERNEL_IB_HCA or NCCL_IB_HCA; there "
                                           "are {}",
                                           list_of(all))};
  }
  const std::vector<std::vector<int>> assigned = assign_nics(gpus, usable);
  return usable[static_cast<std::size_t>(assigned.at(static_cast<std::size_t>(gpu)).front())];
}

std::string find_interface(const std::string& names, const std::vector<InterfaceAddress>& interfaces) {
  std::string_view list = names;
  const bool exclude = list.starts_with('^');
  if (exclude) list.remove_prefix(1);
  const bool exact = list.starts_with('=');
  if (exact) list.remove_prefix(1);
  const auto named = [&](const std::string& interface) {
    for (std::string_view rest = list; !rest.empty();) {
      const std::string_view word = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), word.size() + 1));
      if (!word.empty() && (exact ? interface == word : interface.starts_with(word))) return true;
    }
    return false;
  };
  for (const bool ip6 : {false, true}) {
    for (const InterfaceAddress& each : interfaces) {
      const bool is_ip6 = each.address.find(':') != std::string::npos;
      if (is_ip6 == ip6 && named(each.interface) != exclude) return each.address;
    }
  }
  return "";
}

std::vector<InterfaceAddress> own_interfaces() {
  std::vector<InterfaceAddress> found;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return found;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_LOOPBACK) != 0 || (each->ifa_flags & IFF_UP) == 0) continue;
    char text[INET6_ADDRSTRLEN] = {};
    if (each->ifa_addr->sa_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, text, sizeof text);
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;  // means nothing without its interface
      inet_ntop(AF_INET6, &address, text, sizeof text);
    } else {
      continue;
    }
    found.push_back({each->ifa_name, text});
  }
  freeifaddrs(all);
  return found;
}

}  // namespace mkernel
