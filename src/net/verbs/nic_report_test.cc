#include "net/verbs/nic_report.h"

#include <gtest/gtest.h>

#include "net/verbs/invented_machine.h"

namespace mkernel {
namespace {

using NicReportTest = InventedMachine;

std::vector<std::string> texts(const NicReport& report) {
  std::vector<std::string> all;
  for (const PortReport& port : report.ports) all.push_back(port_text(port));
  for (const GpuPort& gpu : report.gpus) all.push_back(gpu_text(gpu));
  return all;
}

TEST_F(NicReportTest, EveryPortSaysWhetherItIsUsedAndEveryGpuWhy) {
  add_pci("pci0000:10/0000:10:01.0/0000:11:00.0", 0, "0x10de");
  add_pci("pci0000:90/0000:90:01.0/0000:91:00.0", 1, "0x10de");
  add_nic("mlx5_0", "pci0000:10/0000:10:01.0/0000:12:00.0", 0, "4: ACTIVE", "InfiniBand");
  add_nic("mlx5_1", "pci0000:90/0000:90:02.0/0000:92:00.0", 1);
  add_gid("mlx5_1", 3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2");
  add_nic("mlx5_2", "pci0000:20/0000:20:02.0/0000:22:00.0", 0, "1: DOWN");
  add_nic("mlx5_3", "pci0000:30/0000:30:02.0/0000:32:00.0", 0);
  add_gid("mlx5_3", 1, "2001:0db8:0000:0000:0000:0000:0000:0001", "IB/RoCE v1");
  VerbsSettings settings;
  settings.nics = NicFilter::parse("^mlx5_3").value();
  EXPECT_EQ(texts(report_nics(settings, root())),
            (std::vector<std::string>{
                "mlx5_0:1 InfiniBand or EFA, NUMA node 0: used",
                "mlx5_1:1 Ethernet, NUMA node 1, GID 3, 10.0.0.1 of eth0, RoCE v2: used",
                "mlx5_2:1 Ethernet, NUMA node 0: not used, its link is down",
                "mlx5_3:1 Ethernet, NUMA node 0, GID 1, 2001:db8::1 of eth0, RoCE v1: not used, MKERNEL_IB_HCA or "
                "NCCL_IB_HCA leaves it out",
                "GPU 0000:11:00.0 takes mlx5_0:1, below one PCIe switch or root port",
                "GPU 0000:91:00.0 takes mlx5_1:1, below one PCIe host bridge"}));
  settings.nics = NicFilter::parse("=mlx5_1").value();
  settings.gid_index = 5;
  EXPECT_EQ(texts(report_nics(settings, root()))[1],
            "mlx5_1:1 Ethernet, NUMA node 1: not used, it has no GID with index 5");
}

TEST_F(NicReportTest, AGpuWithSeveralCardsSaysHowManyRailsItHas) {
  add_hgx(8, 4);
  EXPECT_EQ(gpu_text(report_nics({}, root()).gpus[0]),
            "GPU 0000:12:00.0 takes 4 rails, mlx5_28:1 and mlx5_29:1 and mlx5_30:1 and mlx5_31:1, below one PCIe "
            "switch or root port");
  VerbsSettings two;
  two.rails = 2;
  EXPECT_EQ(report_nics(two, root()).gpus[7].rails.size(), 2u);
}

TEST_F(NicReportTest, GpusAreFoundInTheOrderOfTheirAddresses) {
  add_hgx(8, 1);
  const std::vector<std::string> gpus = find_gpu_addresses(root());
  ASSERT_EQ(gpus.size(), 8u);
  EXPECT_EQ(gpus[0], "0000:12:00.0");
  EXPECT_EQ(gpus[7], "0000:82:00.0");
  EXPECT_EQ(report_nics({}, root()).gpus[2].rails[0].device, "mlx5_05");
  EXPECT_TRUE(report_nics({}, "/no such folder").ports.empty());
}

}  // namespace
}  // namespace mkernel
