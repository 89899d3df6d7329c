// Processes with a rank each on GPUs of one node, which reach each other's memory by file descriptor. Where there are
// fewer GPUs than processes the driver lets their kernels run in turn, so this is about results and not about speed.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "mkernel/mkernel.h"
#include "tests/cli/rank_processes.h"

namespace mkernel::cli {
namespace {

class GpuProcessesTest : public RankProcesses {
 protected:
  void SetUp() override {
    WorldOptions options;
    options.device = Device::kCuda;
    const Result<World> world = World::create(options);
    if (!world.ok()) GTEST_SKIP() << world.error().message;
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

TEST_F(GpuProcessesTest, SeveralNodesAreRefused) {
  start(2, "run gemm_ar --device cuda --nodes 2 --gpus 1 --m 64 --n 64 --k 64");
  ASSERT_TRUE(finish(20));
  for (const Rank& rank : ranks_) {
    EXPECT_EQ(rank.code, 2) << rank.err;
    EXPECT_NE(rank.err.find("nodes 1"), std::string::npos) << rank.err;
  }
}

}  // namespace
}  // namespace mkernel::cli
