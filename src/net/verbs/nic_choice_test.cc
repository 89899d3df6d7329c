// Invented machines, as trees that look like /sys.
#include "net/verbs/nic_choice.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "net/verbs/invented_machine.h"

namespace mkernel {
namespace {

class NicChoiceTest : public InventedMachine {
 protected:
  std::vector<std::vector<std::string>> assign(const std::vector<GpuPlace>& gpus) {
    const std::vector<Nic> nics = find_nics(sys_.string());
    std::vector<std::vector<std::string>> names;
    for (const std::vector<int>& of_gpu : assign_nics(gpus, nics)) {
      names.emplace_back();
      for (const int nic : of_gpu) names.back().push_back(nics[static_cast<std::size_t>(nic)].device);
    }
    return names;
  }
};

TEST_F(NicChoiceTest, EightGpusAndEightCardsAreThePairsOfTheirSwitches) {
  const auto names = assign(add_hgx(8, 1));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(names[i], std::vector<std::string>{fmt::format("mlx5_{:02}", 7 - i)});
}

TEST_F(NicChoiceTest, ThirtyTwoCardsAreFourForEachOfEightGpus) {
  const auto names = assign(add_hgx(8, 4));
  for (int i = 0; i < 8; ++i) {
    std::set<std::string> want;
    for (int n = 0; n < 4; ++n) want.insert(fmt::format("mlx5_{:02}", (7 - i) * 4 + n));
    EXPECT_EQ(std::set<std::string>(names[i].begin(), names[i].end()), want);
    EXPECT_EQ(names[i].size(), 4u);
  }
}

TEST_F(NicChoiceTest, FourCardsServeTwoGpusEachOfTheirSwitch) {
  std::vector<GpuPlace> gpus;
  for (int i = 0; i < 8; ++i) {
    const int bus = 0x20 * (i / 2 + 1);
    const std::string port = fmt::format("pci0000:{:02x}/0000:{:02x}:01.0", bus, bus);
    const std::string gpu = fmt::format("0000:{:02x}:00.0", bus + 1 + i % 2);
    add_pci(port + "/" + gpu, i / 4);
    gpus.push_back(find_gpu(sys_.string(), gpu));
    if (i % 2 == 0) add_nic(fmt::format("mlx5_{}", i / 2), port + fmt::format("/0000:{:02x}:00.0", bus + 4), i / 4);
  }
  const auto names = assign(gpus);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(names[i], std::vector<std::string>{fmt::format("mlx5_{}", i / 2)});
}

TEST_F(NicChoiceTest, AllGpusShareTheOnlyCard) {
  add_nic("mlx5_0", "pci0000:00/0000:00:01.0", 0);
  EXPECT_EQ(assign(std::vector<GpuPlace>(4)), std::vector<std::vector<std::string>>(4, {"mlx5_0"}));
}

TEST_F(NicChoiceTest, AMachineWithoutCardsGivesNone) {
  EXPECT_TRUE(find_nics(sys_.string()).empty());
  EXPECT_EQ(assign(std::vector<GpuPlace>(2)), std::vector<std::vector<std::string>>(2));
  EXPECT_TRUE(find_nics("/no such folder").empty());
  EXPECT_TRUE(assign_nics({}, {Nic{}}).empty());
}

TEST_F(NicChoiceTest, CardsOnTheOtherSocketAreTakenLast) {
  add_nic("mlx5_0", "pci0000:80/0000:80:01.0", 1);
  add_nic("mlx5_1", "pci0000:00/0000:00:03.0", 0);
  add_pci("pci0000:10/0000:10:01.0", 0);
  add_pci("pci0000:90/0000:90:01.0", 1);
  const std::vector<GpuPlace> gpus = {find_gpu(sys_.string(), "0000:10:01.0"),
                                      find_gpu(sys_.string(), "00000000:90:01.0")};
  EXPECT_EQ(assign(gpus), (std::vector<std::vector<std::string>>{{"mlx5_1"}, {"mlx5_0"}}));
  const std::vector<Nic> nics = find_nics(sys_.string());
  EXPECT_EQ(nearness(gpus[0], nics[0]), Nearness::kFar);
  EXPECT_EQ(nearness(gpus[0], nics[1]), Nearness::kNuma);
}

// The first GPU must not take the card that the second needs: both could use a, only the first is near b too.
TEST_F(NicChoiceTest, AGpuWithChoiceLeavesTheCardToTheOneWithout) {
  add_nic("a", "pci0000:00/0000:00:02.0/0000:02:00.0", 0);
  add_nic("b", "pci0000:00/0000:00:01.0/0000:04:00.0", 0);
  add_pci("pci0000:00/0000:00:01.0/0000:01:00.0", 0);
  add_pci("pci0000:00/0000:00:02.0/0000:03:00.0", 0);
  EXPECT_EQ(assign({find_gpu(sys_.string(), "0000:01:00.0"), find_gpu(sys_.string(), "0000:03:00.0")}),
            (std::vector<std::vector<std::string>>{{"b"}, {"a"}}));
}

// Any machine: nobody goes without, loads differ by one at most, all GPUs have as many.
TEST_F(NicChoiceTest, LoadsAreBalancedOnAnyMachine) {
  for (int cards = 1; cards <= 17; ++cards) {
    std::vector<Nic> nics(static_cast<std::size_t>(cards));
    for (int n = 0; n < cards; ++n) nics[n].numa_node = n % 3 == 0 ? 0 : 1;
    for (int gpus = 1; gpus <= 9; ++gpus) {
      std::vector<GpuPlace> places(static_cast<std::size_t>(gpus));
      for (int g = 0; g < gpus; ++g) places[g].numa_node = g % 2;
      std::map<int, int> load;
      const auto assigned = assign_nics(places, nics);
      for (const auto& of_gpu : assigned) {
        EXPECT_EQ(of_gpu.size(), static_cast<std::size_t>(std::max(1, cards / gpus)));
        for (const int nic : of_gpu) ++load[nic];
      }
      for (const auto& [nic, count] : load) EXPECT_LE(count, (gpus + cards - 1) / cards) << cards << " " << gpus;
    }
  }
}

TEST_F(NicChoiceTest, PortsStatesAndLinksAreRead) {
  add_nic("mlx5_0", "pci0000:00/0000:00:01.0", 0, "4: ACTIVE", "InfiniBand", 2);
  add_nic("mlx5_1", "pci0000:00/0000:00:02.0", 0, "1: DOWN");
  add_nic("rxe0", "", -1);
  const std::vector<Nic> nics = find_nics(sys_.string());
  ASSERT_EQ(nics.size(), 4u);
  EXPECT_EQ(nics[1].name(), "mlx5_0:2");
  EXPECT_FALSE(nics[1].ethernet);
  EXPECT_TRUE(nics[1].active);
  EXPECT_FALSE(nics[2].active);
  EXPECT_TRUE(nics[3].pci_path.empty());
  EXPECT_TRUE(nics[3].ethernet);
}

TEST(NicFilterTest, NamesLikeNcclDoes) {
  const auto accepted = [](const char* text) {
    std::string names;
    for (const char* device : {"mlx5_0", "mlx5_1", "mlx5_10", "bnxt0"}) {
      for (const int port : {1, 2}) {
        Nic nic;
        nic.device = device;
        nic.port = port;
        if (NicFilter::parse(text).value().accepts(nic)) names += nic.name() + " ";
      }
    }
    return names;
  };
  EXPECT_EQ(accepted(""), "mlx5_0:1 mlx5_0:2 mlx5_1:1 mlx5_1:2 mlx5_10:1 mlx5_10:2 bnxt0:1 bnxt0:2 ");
  EXPECT_EQ(accepted("mlx5_1"), "mlx5_1:1 mlx5_1:2 mlx5_10:1 mlx5_10:2 ");
  EXPECT_EQ(accepted("=mlx5_1"), "mlx5_1:1 mlx5_1:2 ");
  EXPECT_EQ(accepted("=mlx5_1:2,bnxt0:1"), "mlx5_1:2 bnxt0:1 ");
  EXPECT_EQ(accepted("^mlx5"), "bnxt0:1 bnxt0:2 ");
  EXPECT_EQ(accepted("^=mlx5_1,bnxt0"), "mlx5_0:1 mlx5_0:2 mlx5_10:1 mlx5_10:2 ");
  for (const char* bad : {"mlx5_0:", "mlx5_0:x", "mlx5_0:0", "^", "=", "^=,"}) {
    const auto filter = NicFilter::parse(bad);
    ASSERT_FALSE(filter.ok()) << bad;
    EXPECT_NE(filter.error().message.find(bad), std::string::npos);
  }
}

// reliability.md, case 14.
TEST_F(NicChoiceTest, GidTablesOfEveryKindGiveTheBestOne) {
  const char* kLinkLocal = "fe80:0000:0000:0000:0000:00ff:fe99:0001";
  const char* kIp4 = "0000:0000:0000:0000:0000:ffff:0a63:0001";
  const char* kIp6 = "2001:0db8:0000:0000:0000:0000:0000:0001";
  const char* kHole = "0000:0000:0000:0000:0000:0000:0000:0000";
  struct Entry {
    int index;
    const char* gid;
    const char* type;
  };
  const struct {
    std::vector<Entry> table;
    int want;
  } cases[] = {
      {{}, -1},
      {{{0, kHole, ""}, {1, kHole, ""}}, -1},
      {{{0, kLinkLocal, "IB/RoCE v1"}, {1, kLinkLocal, "RoCE v2"}, {2, kIp4, "IB/RoCE v1"}, {3, kIp4, "RoCE v2"}}, 3},
      {{{0, kIp4, "RoCE v2"}, {1, kLinkLocal, "RoCE v2"}, {4, kIp4, "RoCE v2"}}, 0},
      {{{0, kHole, ""}, {3, kIp4, "IB/RoCE v1"}, {10, kLinkLocal, "RoCE v2"}}, 10},
      {{{0, kLinkLocal, "RoCE v2"}, {5, kIp6, "RoCE v2"}}, 5},
      {{{0, kLinkLocal, "IB/RoCE v1"}}, 0},
  };
  int number = 0;
  for (const auto& [table, want] : cases) {
    const std::string device = "mlx5_" + std::to_string(number++);
    add_nic(device, "", -1);
    for (const Entry& entry : table) add_gid(device, entry.index, entry.gid, entry.type);
    Nic nic;
    nic.device = device;
    EXPECT_EQ(choose_gid(read_gids(sys_.string(), nic)), want) << device;
  }
}

}  // namespace
}  // namespace mkernel
