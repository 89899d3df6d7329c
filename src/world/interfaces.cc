#include "world/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <string_view>

namespace mkernel {

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
  // Version 4 before 6, and what leads to other hosts first.
  for (const bool loopback : {false, true}) {
    for (const bool ip6 : {false, true}) {
      for (const InterfaceAddress& each : interfaces) {
        const bool is_ip6 = each.address.find(':') != std::string::npos;
        if (each.loopback != loopback || is_ip6 != ip6 || named(each.interface) == exclude) continue;
        return each.address;
      }
    }
  }
  return "";
}

std::vector<InterfaceAddress> own_interfaces() {
  std::vector<InterfaceAddress> found;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return found;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
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
    found.push_back({each->ifa_name, text, (each->ifa_flags & IFF_LOOPBACK) != 0});
  }
  freeifaddrs(all);
  return found;
}

}  // namespace mkernel
