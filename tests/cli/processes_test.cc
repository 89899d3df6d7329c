// The program as launchers start it: real processes, which also die.
#include <gtest/gtest.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "base/npy.h"
#include "tests/cli/rank_processes.h"
#include "world/network.h"

namespace mkernel::cli {
namespace {

class ProcessesTest : public RankProcesses {
 protected:
  void SetUp() override {
    const char* network = std::getenv("MKERNEL_NETWORK");  // so that they also run in scripts/rdma_tests.sh
    const std::string obstacle = network_obstacle(network != nullptr ? network : "libfabric");
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
    RankProcesses::SetUp();
  }
};

TEST_F(ProcessesTest, EveryOperatorIsCheckedAndSaidOnceByRank0) {
  // src/ops/processes_test.cc has all of them in all topologies.
  for (const char* what : {"ag_gemm --nodes 2", "gemm_rs", "gemm_ar --gpus 4", "gemm_ar --nodes 2"}) {
    SCOPED_TRACE(what);
    start(4, std::string("run ") + what + " --m 130 --n 70 --k 96 --repeat 2 --json");
    expect_good();
    const auto report = nlohmann::json::parse(ranks_[0].out);
    EXPECT_EQ(report["check"]["ok"], true);
    EXPECT_EQ(report["check"]["rows"], 130);
    EXPECT_EQ(report["processes"], 4);
    EXPECT_EQ(report["network"]["bytes"], report["network"]["bytes_bound"]);
  }
}

TEST_F(ProcessesTest, TheResultIsThatOfOneProcessBitForBit) {
  const std::string line = "run gemm_ar --m 200 --n 120 --k 300 --repeat 1 --nodes 2 --gpus 2 --output ";
  const fs::path one = folder_ / "one";
  const fs::path several = folder_ / "several";
  fs::create_directory(one);
  fs::create_directory(several);
  ASSERT_EQ(run(line + one.string()).code, 0);
  start(4, line + several.string());
  expect_good();
  EXPECT_EQ(content(one / "C.npy"), content(several / "C.npy"));
}

TEST_F(ProcessesTest, LaunchersAreUnderstood) {
  const std::string unique = std::to_string(getpid());
  const auto line = [](int) { return std::string("run gemm_ar --m 64 --n 64 --k 64 --repeat 1"); };
  start(
      2,
      [&](int rank) {
        return Variables{{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                         {"PMIX_NAMESPACE", unique}};
      },
      line);
  expect_good();
  // As if on two hosts: over TCP, with rank 0 at MASTER_ADDR.
  start(
      2,
      [&](int rank) {
        return Variables{{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"},      {"LOCAL_WORLD_SIZE", "1"},
                         {"MASTER_ADDR", "127.0.0.1"},   {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", unique}};
      },
      line);
  expect_good();
  start(
      2,
      [&](int rank) {
        return Variables{
            {"SLURM_PROCID", std::to_string(rank)}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"},
            {"SLURM_STEP_NODELIST", "localhost"},   {"SLURM_JOB_ID", unique},      {"SLURM_STEP_ID", "0"}};
      },
      line);
  expect_good();
}

TEST_F(ProcessesTest, MpirunStartsAWorld) {
  if (std::system("mpirun --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "there is no mpirun (openmpi-bin)";
  const std::string out = (folder_ / "out").string();
  const std::string command =
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe -np 4 " + program() +
      " run gemm_all_reduce --m 100 --n 100 --k 100 --repeat 1 --json > " + out;
  ASSERT_EQ(std::system(command.c_str()), 0);
  const auto report = nlohmann::json::parse(content(out));
  EXPECT_EQ(report["processes"], 4);
  EXPECT_EQ(report["check"]["ok"], true);
}

TEST_F(ProcessesTest, FusedAndUnfusedAreCompared) {
  for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
    start(3, std::string("run ") + op + " --m 200 --n 190 --k 180 --repeat 3 --compare --json");
    ASSERT_TRUE(finish(60)) << op;
    for (const Rank& rank : ranks_) EXPECT_EQ(rank.code, 0) << op << ": " << rank.err;
    const auto report = nlohmann::json::parse(ranks_[0].out);
    EXPECT_EQ(report["check"]["ok"], true);
    const double ratio = report["unfused"]["median_us"].get<double>() / report["fused"]["median_us"].get<double>();
    EXPECT_NEAR(report["speedup"].get<double>(), ratio, 1e-2 * ratio);
  }
}

TEST_F(ProcessesTest, WhatCannotBeIsRefusedByAllWithExitCode2) {
  const char* lines[] = {"run gemm_ar --nodes 3", "run gemm_ar --nodes 2 --gpus 2", "run gemm_ar --link 1:5",
                         "run gemm_rs --output /tmp", "run gemm_ar --device sim"};
  for (const char* line : lines) {
    start(2, line);
    ASSERT_TRUE(finish(20)) << line;
    for (const Rank& rank : ranks_) {
      EXPECT_EQ(rank.code, 2) << line << ": " << rank.err;
      EXPECT_NE(rank.err.find("mkernel (rank "), std::string::npos) << rank.err;
    }
  }
}

TEST_F(ProcessesTest, ARankThatWasAskedForSomethingElseIsNamedByAll) {
  // Rank 1 reads files, which say other sizes.
  const std::string job = "differ " + std::to_string(getpid());
  const fs::path files = folder_ / "files";
  fs::create_directory(files);
  const std::vector<float> values(64 * 32);
  ASSERT_TRUE(write_npy(files / "A.npy", NpyType::kF32, 64, 32, values.data(), 32).ok());
  ASSERT_TRUE(write_npy(files / "B.npy", NpyType::kF32, 32, 64, values.data(), 64).ok());
  const auto variables = [&](int rank) {
    return Variables{{"MKERNEL_RANK", std::to_string(rank)}, {"MKERNEL_SIZE", "3"}, {"MKERNEL_JOB", job}};
  };
  start(3, variables, [&](int rank) {
    const std::string line = "run gemm_ar --m 64 --n 64 --dtype fp32";
    return rank == 1 ? line + " --input " + files.string() : line + " --k 33";
  });
  ASSERT_TRUE(finish(20));
  for (const Rank& rank : ranks_) {
    EXPECT_EQ(rank.code, 2) << rank.err;
    EXPECT_NE(rank.err.find("rank 1 asks for gemm_all_reduce of 64 x 64 x 32"), std::string::npos) << rank.err;
  }
}

// reliability.md, case 9 and the bar "a dead peer is named".
TEST_F(ProcessesTest, WhoeverIsKilledWheneverIsNamedByAllOthersAtOnce) {
  std::mt19937 random(20261201);
  double slowest = 0;
  int kills = 0;
  int early_kills = 0;
  start_s_ = std::to_string(6 * slowness());
  const struct {
    int size;
    const char* line;
  } cases[] = {{2, "run gemm_ar --m 256 --n 256 --k 256"},
               {4, "run gemm_ar --m 256 --n 256 --k 256 --nodes 2"},
               {3, "run gemm_rs --m 256 --n 256 --k 256"},
               {3, "run ag_gemm --m 256 --n 256 --k 256 --gpus 3"},
               {7, "run gemm_ar --m 200 --n 200 --k 200 --sms 1"},
               // Most of the time they meet, or wait to meet, between the phases.
               {3, "run gemm_ar --m 64 --n 64 --k 64 --unfused"}};
  for (const auto& c : cases) {
    for (int round = 0; round < 3; ++round) {
      SCOPED_TRACE(std::string(c.line) + ", round " + std::to_string(round));
      const std::size_t victim = random() % static_cast<std::size_t>(c.size);
      // From the first moments of the start to the middle of the runs.
      const auto delay = std::chrono::milliseconds(300 + random() % 600) * slowness();
      start(c.size, std::string(c.line) + " --repeat 1000000 --no-check");
      std::this_thread::sleep_for(delay);
      kill(ranks_[victim].process, SIGKILL);
      ASSERT_TRUE(finish(30)) << "somebody hangs";
      ++kills;
      // Before it had come to the others nobody could know that it lived.
      bool early = false;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (rank == victim) continue;
        EXPECT_EQ(ranks_[rank].code, 3) << ranks_[rank].err;
        const auto says = [&](const std::string& text) { return ranks_[rank].err.find(text) != std::string::npos; };
        early = early || says("did not come") || says("did not find rank 0");
        EXPECT_TRUE(early || says("rank " + std::to_string(victim) + " died"))
            << "rank " << rank << " after " << delay.count() << " ms: " << ranks_[rank].err;
        // One sentence, after what rank 0 says of its progress when runs take long.
        std::istringstream lines(ranks_[rank].err);
        int sentences = 0;
        for (std::string line; std::getline(lines, line);) {
          sentences += !line.starts_with("fused run ") && !line.starts_with("unfused run ");
        }
        EXPECT_EQ(sentences, 1) << ranks_[rank].err;
        if (!early) slowest = std::max(slowest, ranks_[rank].ended_s);
      }
      early_kills += early;
      for (const auto& file : fs::directory_iterator("/dev/shm")) {
        EXPECT_EQ(file.path().filename().string().find("mkernel"), std::string::npos) << file.path();
      }
    }
  }
  EXPECT_LT(slowest, 5) << "seconds from the kill to the end of the last survivor";
  EXPECT_LT(early_kills, kills);
  std::printf(
      "%d kills, %d of them before the world was whole; the slowest survivor ended %.0f ms after the others' kill\n",
      kills, early_kills, slowest * 1000);
}

}  // namespace
}  // namespace mkernel::cli
