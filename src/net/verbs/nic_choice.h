// Which network cards a machine has, which of them are near which GPU, and which GID to use: pure functions of a sysfs
// tree, so that invented machines can be asked too.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/result.h"

namespace mkernel {

// One port of an RDMA device.
struct Nic {
  std::string device;  // mlx5_0
  int port = 1;
  bool active = false;
  bool ethernet = false;              // RoCE; else InfiniBand, or a link of its own as EFA's
  std::vector<std::string> pci_path;  // from the host bridge to the card; empty: no PCI device
  int numa_node = -1;

  std::string name() const { return device + ":" + std::to_string(port); }
};

// All ports of all devices, by name. `sysfs` is "/sys" on the machine itself.
std::vector<Nic> find_nics(const std::string& sysfs);

// What NCCL_IB_HCA may say: "mlx5_0,mlx5_1:1" names devices by how they begin, "=mlx5_1" exactly, and "^..." and
// "^=..." all others.
class NicFilter {
 public:
  NicFilter() = default;
  // Errors: kBadArgument, for a port that is no number and for a list without names.
  static Result<NicFilter> parse(std::string_view text);
  bool accepts(const Nic& nic) const;

 private:
  struct Entry {
    std::string device;
    int port = 0;  // 0: any
  };
  bool exclude_ = false;
  bool exact_ = false;
  std::vector<Entry> entries_;  // empty: accepts all
};

// How near a card is to a GPU, nearest first.
enum class Nearness : std::uint8_t {
  kSwitch,  // below one PCIe root port
  kBridge,  // below one host bridge
  kNuma,    // on one NUMA node
  kFar,
};

struct GpuPlace {
  std::vector<std::string> pci_path;  // empty: unknown
  int numa_node = -1;
};
// `address` as CUDA and NVML give it: "0000:1B:00.0" or "00000000:1B:00.0"; sysfs has "0000:1b:00.0".
std::string sysfs_address(const std::string& address);
GpuPlace find_gpu(const std::string& sysfs, const std::string& address);
Nearness nearness(const GpuPlace& gpu, const Nic& nic);
// "below one PCIe switch", ...
const char* nearness_text(Nearness nearness);

// NVIDIA's GPUs, by PCI address, which is CUDA's order where CUDA_DEVICE_ORDER is PCI_BUS_ID.
std::vector<std::string> find_gpu_addresses(const std::string& sysfs);

// Divides cards over the GPUs of a node, the same on every process that asks: every GPU gets the nearest ones, no card
// serves more GPUs than it must, and no GPU has more cards than another. By GPU; indices into `nics`; nothing when
// there are no cards.
std::vector<std::vector<int>> assign_nics(const std::vector<GpuPlace>& gpus, const std::vector<Nic>& nics);

// An entry of a port's GID table. Holes are left out.
struct GidEntry {
  int index = 0;
  std::array<std::uint8_t, 16> gid = {};
  bool roce_v2 = false;
  std::string interface;  // network interface that it belongs to

  bool operator==(const GidEntry&) const = default;
};
std::vector<GidEntry> read_gids(const std::string& sysfs, const Nic& nic);

// The GID for RoCE: version 2 before 1, and of those an IPv4 address before a routable IPv6 before a link-local one,
// the first of its kind. -1: there is none.
int choose_gid(const std::vector<GidEntry>& entries);

}  // namespace mkernel
