// For tests: invented machines, as trees that look like /sys.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "net/verbs/nic_choice.h"

namespace mkernel {

namespace fs = std::filesystem;

class InventedMachine : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "mkernel_sysfs_XXXXXX").string();
    sys_ = mkdtemp(name.data());
  }
  void TearDown() override { fs::remove_all(sys_); }

  static void write(const fs::path& file, const std::string& text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  // `path` is "pci0000:15/0000:15:01.0/0000:17:00.0".
  void add_pci(const std::string& path, int numa, const std::string& vendor = "0x15b3") {
    const fs::path device = sys_ / "devices" / path;
    write(device / "numa_node", std::to_string(numa));
    write(device / "vendor", vendor);
    write(device / "class", vendor == "0x10de" ? "0x030200" : "0x020700");
    fs::create_directories(sys_ / "bus/pci/devices");
    fs::create_directory_symlink(device, sys_ / "bus/pci/devices" / device.filename());
  }
  void add_nic(const std::string& name, const std::string& path, int numa, const std::string& state = "4: ACTIVE",
               const std::string& layer = "Ethernet", int ports = 1) {
    if (!path.empty()) add_pci(path, numa);
    const fs::path folder = sys_ / "devices" / (path.empty() ? "virtual" : path) / "infiniband" / name;
    fs::create_directories(folder);
    if (!path.empty()) fs::create_directory_symlink(sys_ / "devices" / path, folder / "device");
    fs::create_directories(sys_ / "class/infiniband");
    fs::create_directory_symlink(folder, sys_ / "class/infiniband" / name);
    for (int port = 1; port <= ports; ++port) add_port(name, port, state, layer);
  }
  void add_port(const std::string& device, int port, const std::string& state, const std::string& layer) {
    const fs::path folder = sys_ / "class/infiniband" / device / "ports" / std::to_string(port);
    write(folder / "state", state);
    write(folder / "link_layer", layer);
  }
  void add_gid(const std::string& device, int index, const std::string& gid, const std::string& type) {
    const fs::path folder = sys_ / "class/infiniband" / device / "ports/1";
    write(folder / "gids" / std::to_string(index), gid);
    if (type.empty()) return;
    write(folder / "gid_attrs/types" / std::to_string(index), type);
    write(folder / "gid_attrs/ndevs" / std::to_string(index), "eth0");
  }
  // GPU i and `per_gpu` cards below one switch each, four switches per socket.
  std::vector<GpuPlace> add_hgx(int gpus, int per_gpu) {
    std::vector<GpuPlace> places;
    for (int i = 0; i < gpus; ++i) {
      const int bus = 0x10 + 0x10 * i;
      const std::string port = fmt::format("pci0000:{:02x}/0000:{:02x}:01.0/0000:{:02x}:00.0", bus, bus, bus + 1);
      const std::string gpu = fmt::format("0000:{:02x}:00.0", bus + 2);
      add_pci(port + fmt::format("/0000:{:02x}:00.0/", bus + 1) + gpu, i / 4, "0x10de");
      for (int n = 0; n < per_gpu; ++n) {
        const std::string path =
            port + fmt::format("/0000:{:02x}:{:02x}.0/0000:{:02x}:00.0", bus + 1, n + 1, bus + 3 + n);
        // Names that say nothing about places: the last GPU has the first card.
        add_nic(fmt::format("mlx5_{:02}", (gpus - 1 - i) * per_gpu + n), path, i / 4);
      }
      places.push_back(find_gpu(sys_.string(), gpu));
      EXPECT_EQ(places.back().pci_path.size(), 5u);
    }
    return places;
  }
  std::string root() const { return sys_.string(); }

  fs::path sys_;
};

}  // namespace mkernel
