// The network interfaces of this host, as NCCL_SOCKET_IFNAME names them.
#pragma once
#include <string>
#include <vector>

namespace mkernel {

struct InterfaceAddress {
  std::string interface;
  std::string address;  // IP
  bool loopback = false;
};

// Of this host, in the kernel's order.
std::vector<InterfaceAddress> own_interfaces();

// The IP address of the first interface that `names` accepts, one that leads to other hosts before the loopback,
// version 4 before 6. `names` is a list of how names begin; with = before it, of exact names; with ^, of all others.
// Empty: there is none.
std::string find_interface(const std::string& names, const std::vector<InterfaceAddress>& interfaces);

}  // namespace mkernel
