// Machines as scripts/record_machine.sh writes them down, and which card each of their GPUs should get: all of
// tests/machines. Lines of the files:
//
//   gpu PCI_PATH numa N class C           rdma NAME PCI_PATH numa N           port NAME PORT STATE LINK_LAYER
//   gid NAME PORT INDEX GID INTERFACE TYPE
//   expect GPU CARD...                    expect_gid NAME INDEX               (added by hand)
#include <algorithm>
#include <map>
#include <sstream>

#include "net/verbs/invented_machine.h"
#include "net/verbs/settings.h"

namespace mkernel {
namespace {

class RecordedMachineTest : public InventedMachine {
 protected:
  void build(const fs::path& file) {
    std::ifstream stream(file);
    ASSERT_TRUE(stream.good()) << file;
    for (std::string line; std::getline(stream, line);) {
      std::istringstream words(line);
      std::string kind;
      if (!(words >> kind) || kind == "#") continue;
      ASSERT_TRUE(add(kind, words)) << file << ": " << line;
    }
  }

  std::map<std::string, std::vector<std::string>> cards_;  // that each GPU should get, by its address
  std::map<std::string, int> gids_;

 private:
  bool add(const std::string& kind, std::istringstream& words) {
    std::string name, path, word, state, layer, gid, type;
    int number = 0;
    int index = 0;
    if (kind == "gpu" && words >> path >> word >> number) return add_pci(path, number, "0x10de"), true;
    if (kind == "rdma" && words >> name >> path >> word >> number) {
      add_nic(name, path == "-" ? "" : path, number, "", "", 0);
      return true;
    }
    if (kind == "port" && words >> name >> number >> state >> layer) {
      add_port(name, number, state, layer);
      return true;
    }
    if (kind == "gid" && words >> name >> number >> index >> gid >> word) {
      std::getline(words >> std::ws, type);
      add_gid(name, index, gid, type);
      return true;
    }
    if (kind == "expect_gid" && words >> name >> index) return gids_[name] = index, true;
    if (kind != "expect" || !(words >> name)) return false;
    while (words >> word) cards_[name].push_back(word);
    return true;
  }
};

TEST_F(RecordedMachineTest, EveryGpuGetsItsCards) {
  int files = 0;
  for (const auto& file : fs::directory_iterator(fs::path(MKERNEL_SOURCE_DIR) / "tests/machines")) {
    SCOPED_TRACE(file.path().filename().string());
    ++files;
    cards_.clear();
    gids_.clear();
    fs::remove_all(sys_);
    fs::create_directories(sys_);
    build(file.path());
    std::vector<Nic> usable;
    for (const Nic& nic : find_nics(root())) {
      if (why_not_used({}, nic).empty()) usable.push_back(nic);
    }
    const std::vector<std::string> addresses = find_gpu_addresses(root());
    std::vector<GpuPlace> gpus;
    for (const std::string& address : addresses) gpus.push_back(find_gpu(root(), address));
    const auto assigned = assign_nics(gpus, usable);
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      std::vector<std::string> names;
      for (const int nic : assigned[i]) names.push_back(usable[static_cast<std::size_t>(nic)].device);
      std::sort(names.begin(), names.end());
      std::vector<std::string> want = cards_[addresses[i]];
      std::sort(want.begin(), want.end());
      EXPECT_EQ(names, want) << addresses[i];
    }
    for (const auto& [device, index] : gids_) {
      const auto nic = std::find_if(usable.begin(), usable.end(), [&](const Nic& n) { return n.device == device; });
      ASSERT_NE(nic, usable.end());
      EXPECT_EQ(choose_gid(read_gids(root(), *nic)), index);
    }
  }
  EXPECT_GE(files, 5);
}

// What is recorded of a machine is the machine that was recorded.
TEST_F(RecordedMachineTest, TheScriptWritesDownWhatWeRead) {
  build(fs::path(MKERNEL_SOURCE_DIR) / "tests/machines/hgx_8x4.txt");
  const std::string out = (sys_.parent_path() / (sys_.filename().string() + ".txt")).string();
  const std::string script = std::string(MKERNEL_SOURCE_DIR) + "/scripts/record_machine.sh";
  ASSERT_EQ(std::system((script + " --gids " + root() + " > " + out).c_str()), 0);
  const auto before = find_nics(root());
  const auto gids_before = read_gids(root(), before.front());
  const auto gpus_before = find_gpu_addresses(root());
  fs::remove_all(sys_);
  fs::create_directories(sys_);
  build(out);
  fs::remove(out);
  const auto after = find_nics(root());
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].name(), before[i].name());
    EXPECT_EQ(after[i].pci_path, before[i].pci_path);
    EXPECT_EQ(after[i].numa_node, before[i].numa_node);
    EXPECT_EQ(after[i].active, before[i].active);
    EXPECT_EQ(after[i].ethernet, before[i].ethernet);
  }
  EXPECT_EQ(read_gids(root(), after.front()), gids_before);
  EXPECT_EQ(find_gpu_addresses(root()), gpus_before);
}

}  // namespace
}  // namespace mkernel
