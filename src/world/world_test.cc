#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "world/memory_limit.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

struct BadOptions {
  std::function<void(WorldOptions&)> damage;
  std::vector<std::string> words;
};

TEST(World, RefusesBadOptionsByName) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const BadOptions table[] = {
      {[](auto& o) { o.nodes = 0; }, {"nodes is 0", "at least 1"}},
      {[](auto& o) { o.nodes = -3; }, {"nodes is -3"}},
      {[](auto& o) { o.gpus = 0; }, {"gpus is 0", "at least 1"}},
      {[](auto& o) { o.nodes = o.gpus = 1 << 20; }, {"1048576", "65536"}},
      {[](auto& o) { o.device = static_cast<Device>(5); }, {"device is 5", "kHost", "kSim"}},
      {[](auto& o) { o.sms = -1; }, {"sms is -1", "1 to 1024"}},
      {[](auto& o) { o.sms = 1025; }, {"sms is 1025", "1 to 1024"}},
      {[](auto& o) { o.sms = 100, o.nodes = 41; }, {"4100 threads", "at most 4096"}},
      {[](auto& o) {
         o.partition = {1, 1, 1};
       },
       {"partition 1,1,1", "2 SMs"}},
      {[](auto& o) {
         o.partition = {3, -1, 0};
       },
       {"partition 3,-1,0"}},
      {[](auto& o) { o.link.gigabytes_per_s = -1; }, {"link.gigabytes_per_s is -1", "from 0"}},
      {[](auto& o) { o.link.gigabytes_per_s = NAN; }, {"link.gigabytes_per_s is nan"}},
      {[](auto& o) { o.link.latency_us = kInf; }, {"link.latency_us is inf"}},
      {[](auto& o) { o.link.latency_us = -0.5; }, {"link.latency_us is -0.5"}},
      {[](auto& o) { o.link.latency_us = 1e300; }, {"link.latency_us is 1e+300"}},
      {[](auto& o) { o.deadline_s = 0; }, {"deadline_s is 0", "more than 0"}},
      {[](auto& o) { o.deadline_s = -1; }, {"deadline_s is -1"}},
      {[](auto& o) { o.deadline_s = NAN; }, {"deadline_s is nan"}},
      {[](auto& o) { o.warn_s = 0; }, {"warn_s is 0"}},
      {[](auto& o) { o.ring_depth = 0; }, {"ring_depth is 0", "power of two"}},
      {[](auto& o) { o.ring_depth = -4; }, {"ring_depth is -4"}},
      {[](auto& o) { o.ring_depth = 3; }, {"ring_depth is 3", "power of two"}},
      {[](auto& o) { o.ring_depth = 1 << 17; }, {"ring_depth is 131072", "65536"}},
  };
  for (const BadOptions& bad : table) {
    WorldOptions options;
    bad.damage(options);
    const Result<World> world = World::create(options);
    ASSERT_FALSE(world.ok()) << bad.words[0];
    EXPECT_EQ(world.error().kind, ErrorKind::kBadArgument);
    for (const std::string& word : bad.words) {
      EXPECT_NE(world.error().message.find(word), std::string::npos) << "'" << word << "' in " << world.error().message;
    }
  }
}

TEST(World, AcceptsTheEdgesOfItsOptions) {
  WorldOptions options;
  options.deadline_s = std::numeric_limits<double>::infinity();
  options.warn_s = 1e300;
  options.ring_depth = 1;
  options.sms = 1;
  options.partition = {0, 0, 1};
  EXPECT_TRUE(World::create(options).ok());
  options.device = Device::kSim;
  options.nodes = 128;
  options.gpus = 8;
  options.sms = 132;
  options.partition = {};
  const Result<World> world = World::create(options);
  ASSERT_TRUE(world.ok());
  EXPECT_EQ(world->size(), 1024);
  EXPECT_EQ(world->options().sms, 132);
}

// A directory that looks like the root of a system.
class FakeRoot {
 public:
  explicit FakeRoot(const char* name)
      : path_(std::filesystem::temp_directory_path() / (std::string("mkernel_") + name + std::to_string(::getpid()))) {}
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text;
  }
  std::int64_t available() const { return available_memory_of(path_.string()); }

 private:
  std::filesystem::path path_;
};

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

TEST(MemoryLimit, IsWhatTheSystemHasAvailableLessAMargin) {
  const FakeRoot root("meminfo");
  EXPECT_EQ(root.available(), std::numeric_limits<std::int64_t>::max()) << "a system that does not say";
  root.write("proc/meminfo", "MemTotal: 9999999999 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n");
  EXPECT_EQ(root.available(), 15 * kGiB);
  root.write("proc/meminfo", "MemAvailable: 1000 kB\n");
  EXPECT_EQ(root.available(), 0);
}

TEST(MemoryLimit, IsTheLeastThatAnyControlGroupAboveUsHasLeft) {
  const FakeRoot root("cgroup");
  root.write("proc/meminfo", "MemAvailable: 67108864 kB\n");
  root.write("proc/self/cgroup", "0::/outer/inner\n");
  root.write("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  root.write("sys/fs/cgroup/outer/inner/memory.current", "5\n");
  EXPECT_EQ(root.available(), 60 * kGiB);
  root.write("sys/fs/cgroup/outer/memory.max", std::to_string(20 * kGiB));
  root.write("sys/fs/cgroup/outer/memory.current", std::to_string(10 * kGiB));
  root.write("sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file " + std::to_string(6 * kGiB) + "\nfile 2\n");
  EXPECT_EQ(root.available(), 15 * kGiB);
  root.write("sys/fs/cgroup/outer/inner/memory.max", "4\n");
  EXPECT_EQ(root.available(), 0);
}

TEST(MemoryLimit, OfThisMachineIsPlausible) { EXPECT_GT(available_memory(), 0); }

}  // namespace
}  // namespace mkernel
