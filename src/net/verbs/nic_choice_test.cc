// Invented machines, as trees that look like /sys.
#include "net/verbs/nic_choice.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

namespace mkernel {
namespace {

namespace fs = std::filesystem;

class NicChoiceTest : public testing::Test {
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
  void add_pci(const std::string& path, int numa) {
    const fs::path device = sys_ / "devices" / path;
    write(device / "numa_node", std::to_string(numa));
    fs::create_directories(sys_ / "bus/pci/devices");
    fs::create_directory_symlink(device, sys_ / "bus/pci/devices" / device.filename());
  }
  void add_nic(const std::string& name, const std::string& path, int numa, const std::string& state = "4: ACTIVE",
               const std::string& layer = "Ethernet", int ports = 1) {
    if (!path.empty()) add_pci(path, numa);
    const fs::path folder = sys_ / "devices" / (path.empty() ? "virtual" : path) / "infiniband" / name;
    for (int port = 1; port <= ports; ++port) {
      write(folder / "ports" / std::to_string(port) / "state", state);
      write(folder / "ports" / std::to_string(port) / "link_layer", layer);
    }
    if (!path.empty()) fs::create_directory_symlink(sys_ / "devices" / path, folder / "device");
    fs::create_directories(sys_ / "class/infiniband");
    fs::create_directory_symlink(folder, sys_ / "class/infiniband" / name);
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
      add_pci(port + fmt::format("/0000:{:02x}:00.0/", bus + 1) + gpu, i / 4);
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
  std::vector<std::vector<std::string>> assign(const std::vector<GpuPlace>& gpus) {
    const std::vector<Nic> nics = find_nics(sys_.string());
    std::vector<std::vector<std::string>> names;
    for (const std::vector<int>& of_gpu : assign_nics(gpus, nics)) {
      names.emplace_back();
      for (const int nic : of_gpu) names.back().push_back(nics[static_cast<std::size_t>(nic)].device);
    }
    return names;
  }

  fs::path sys_;
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
