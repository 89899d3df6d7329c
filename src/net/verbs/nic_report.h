// What `mkernel info` says about RDMA: every port, why it is not used, and which one each GPU would get and why. A pure
// function of a sysfs tree.
#pragma once
#include <string>
#include <vector>

#include "net/verbs/nic_choice.h"
#include "net/verbs/settings.h"

namespace mkernel {

struct PortReport {
  Nic nic;
  std::string gid;      // RoCE: "GID 3, 10.0.0.1 of eth0, RoCE v2"; empty: it has none, or needs none
  std::string why_not;  // it is not used; empty: it is
};

struct GpuPort {
  std::string gpu;                     // PCI address
  std::vector<Nic> rails;              // at least one
  Nearness nearness = Nearness::kFar;  // of the farthest
};

struct NicReport {
  std::vector<PortReport> ports;
  std::vector<GpuPort> gpus;  // empty where no port is used
};

NicReport report_nics(const VerbsSettings& settings, const std::string& sysfs);

// "mlx5_0:1 InfiniBand, NUMA node 0: used", "mlx5_1:1 Ethernet, ...: not used, its link is down".
std::string port_text(const PortReport& port);
// "GPU 0000:17:00.0 takes mlx5_0:1, below one PCIe switch or root port", or "takes 2 rails, mlx5_0:1 and mlx5_1:1,
// ...".
std::string gpu_text(const GpuPort& gpu);

}  // namespace mkernel
