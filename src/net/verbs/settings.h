// How a process of a world uses verbs: what its environment says, and which card is nearest.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "mkernel/result.h"
#include "net/verbs/nic_choice.h"

namespace mkernel {

struct VerbsSettings {
  NicFilter nics;
  int gid_index = -1;  // -1: chosen
  int traffic_class = 0;
  int service_level = 0;
};

// MKERNEL_IB_HCA, _GID_INDEX, _TC and _SL, and where one is not set NCCL_IB_ and the same. Errors: kBadArgument.
Result<VerbsSettings> verbs_settings_from(const std::function<const char*(const char*)>& environment);

// The port for GPU number `gpu` of a node's. Errors: kUnsupported, with what there is instead.
Result<Nic> choose_nic(const VerbsSettings& settings, const std::string& sysfs, const std::vector<GpuPlace>& gpus,
                       int gpu);

// The IP address (version 4, else 6) of the first interface that NCCL_SOCKET_IFNAME accepts: names by how they begin,
// with = before the list exact ones, with ^ all others. Empty: there is none.
struct InterfaceAddress {
  std::string interface;
  std::string address;
};
std::string find_interface(const std::string& names, const std::vector<InterfaceAddress>& interfaces);
// Of this host, but for its loopback, in the kernel's order.
std::vector<InterfaceAddress> own_interfaces();

}  // namespace mkernel
