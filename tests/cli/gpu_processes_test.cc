// Processes with a rank each on GPUs: those of a node reach each other's memory by file descriptor. Where there are
// fewer GPUs than processes the driver lets their kernels run in turn, so this is about results and not about speed.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "mkernel/mkernel.h"
#include "tests/cli/rank_processes.h"
#include "world/network.h"

namespace mkernel::cli {
namespace {

class GpuProcessesTest : public RankProcesses {
 protected:
  void SetUp() override {
    WorldOptions options;
    options.device = Device::kCuda;
    const Result<World> world = World::create(options);
    if (!world.ok()) {
      if (world.error().kind == ErrorKind::kUnsupported) GTEST_SKIP() << world.error().message;
      FAIL() << world.error().message;  // there is a GPU, and it does not work
    }
    RankProcesses::SetUp();
  }
};

TEST_F(GpuProcessesTest, EveryOperatorIsRight) {
  for (const int size : {2, 3, 4}) {
    for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
      SCOPED_TRACE(std::string(op) + " with " + std::to_string(size) + " processes");
      start(size, std::string("run ") + op + " --device cuda --nodes 1 --gpus " + std::to_string(size) +
                      " --m 530 --n 301 --k 200 --repeat 5 --deadline 60 --json");
      expect_good();
      const auto report = nlohmann::json::parse(ranks_[0].out);
      EXPECT_EQ(report["check"]["ok"], true);
      EXPECT_EQ(report["check"]["rows"], 530);
      EXPECT_EQ(report["processes"], size);
    }
  }
}

TEST_F(GpuProcessesTest, TheResultIsThatOfOneProcessBitForBit) {
  const std::string line =
      "run gemm_ar --device cuda --m 400 --n 520 --k 384 --repeat 2 --nodes 1 --gpus 2 --sms 32 --output ";
  const fs::path one = folder_ / "one";
  const fs::path several = folder_ / "several";
  fs::create_directory(one);
  fs::create_directory(several);
  start(
      1, [](int) { return Variables{}; }, [&](int) { return line + one.string(); });
  expect_good();
  start(2, line + several.string());
  expect_good();
  EXPECT_TRUE(content(one / "C.npy") == content(several / "C.npy"));
}

TEST_F(GpuProcessesTest, AKilledProcessIsNamedByAllOthers) {
  for (const int victim : {0, 2}) {
    start(3, "run gemm_ar --device cuda --nodes 1 --gpus 3 --m 512 --n 512 --k 256 --repeat 1000000 --no-check");
    std::this_thread::sleep_for(std::chrono::seconds(4));
    kill(ranks_[static_cast<std::size_t>(victim)].process, SIGKILL);
    ASSERT_TRUE(finish(30)) << "somebody hangs";
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const Rank& survivor = ranks_[static_cast<std::size_t>(rank)];
      EXPECT_EQ(survivor.code, 3) << survivor.err;
      EXPECT_NE(survivor.err.find("rank " + std::to_string(victim) + " died"), std::string::npos) << survivor.err;
    }
  }
}

// Nodes are joined by libfabric, through host memory.
class GpuNodesTest : public GpuProcessesTest {
 protected:
  void SetUp() override {
    if (const std::string obstacle = network_obstacle("libfabric"); !obstacle.empty()) GTEST_SKIP() << obstacle;
    GpuProcessesTest::SetUp();
  }
};

TEST_F(GpuNodesTest, EveryOperatorIsRight) {
  for (const auto& [nodes, gpus] : {std::pair{2, 1}, std::pair{3, 1}, std::pair{2, 2}}) {
    for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
      SCOPED_TRACE(fmt::format("{} on {} x {}", op, nodes, gpus));
      start(nodes * gpus, fmt::format("run {} --device cuda --nodes {} --gpus {} --m 530 --n 301 --k 200 --repeat 5 "
                                      "--deadline 60 --json",
                                      op, nodes, gpus));
      expect_good();
      const auto report = nlohmann::json::parse(ranks_[0].out);
      EXPECT_EQ(report["check"]["ok"], true);
      EXPECT_EQ(report["processes"], nodes * gpus);
      EXPECT_EQ(report["network"]["bytes"], report["network"]["bytes_bound"]);
    }
  }
}

TEST_F(GpuNodesTest, AKilledProcessIsNamedByAllOthers) {
  start(3, "run gemm_ar --device cuda --nodes 3 --gpus 1 --m 512 --n 512 --k 256 --repeat 1000000 --no-check");
  std::this_thread::sleep_for(std::chrono::seconds(4));
  kill(ranks_[1].process, SIGKILL);
  ASSERT_TRUE(finish(30)) << "somebody hangs";
  for (const int rank : {0, 2}) {
    const Rank& survivor = ranks_[static_cast<std::size_t>(rank)];
    EXPECT_EQ(survivor.code, 3) << survivor.err;
    EXPECT_NE(survivor.err.find("rank 1 died"), std::string::npos) << survivor.err;
  }
}

}  // namespace
}  // namespace mkernel::cli
