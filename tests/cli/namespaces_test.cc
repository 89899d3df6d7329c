// The program on several emulated hosts: network namespaces whose links are paced (scripts/namespaces.sh).
#include <sys/wait.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/rank_processes.h"
#include "world/network.h"

namespace mkernel::cli {
namespace {

class NamespacesTest : public RankProcesses {
 protected:
  void SetUp() override {
    if (const std::string obstacle = network_obstacle("libfabric"); !obstacle.empty()) GTEST_SKIP() << obstacle;
    RankProcesses::SetUp();
    if (const int code = run_on("-n 1", "info"); code == 77) GTEST_SKIP() << err_;
  }
  // Runs the program on all hosts; the exit code.
  int run_on(const std::string& options, const std::string& line, const std::string& variables = "") {
    const fs::path out = folder_ / "out";
    const fs::path err = folder_ / "err";
    const std::string script = std::string(MKERNEL_SOURCE_DIR) + "/scripts/namespaces.sh";
    const std::string command = variables + " timeout 120 " + script + " " + options + " " + program() + " " + line +
                                " >" + out.string() + " 2>" + err.string();
    const int status = std::system(command.c_str());
    out_ = content(out);
    err_ = content(err);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }
  // Bytes that were sent, by host and interface: lines "sent n0 data0 12345" after the program's own.
  std::map<std::string, std::int64_t> bytes_sent() const {
    std::map<std::string, std::int64_t> sent;
    std::istringstream lines(out_.substr(std::min(out_.size(), out_.find("sent n0 data0"))));
    std::string word, host, interface;
    for (std::int64_t bytes = 0; lines >> word >> host >> interface >> bytes;) sent[host + " " + interface] = bytes;
    return sent;
  }

  std::string out_;
  std::string err_;
};

TEST_F(NamespacesTest, EveryOperatorIsRightOnFourHosts) {
  for (const char* launcher : {"torchrun", "srun"}) {
    for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
      SCOPED_TRACE(std::string(op) + " by " + launcher);
      ASSERT_EQ(run_on(std::string("-n 4 -l ") + launcher,
                       std::string("run ") + op + " --nodes 4 --m 256 --n 192 --k 96 --repeat 2 --json"),
                0)
          << err_;
      const auto report = nlohmann::json::parse(out_);
      EXPECT_EQ(report["check"]["ok"], true);
      EXPECT_EQ(report["processes"], 4);
      EXPECT_EQ(report["network"]["bytes"], report["network"]["bytes_bound"]);
    }
  }
}

// 50 Mbit/s let a rank's 512 KiB through in 84 ms, less the burst; the loopback takes a millisecond or two.
TEST_F(NamespacesTest, TheLinkIsPaced) {
  ASSERT_EQ(run_on("-n 2 -r 50mbit", "run ag_gemm --nodes 2 --m 1024 --n 64 --k 512 --repeat 3 --json"), 0) << err_;
  const auto report = nlohmann::json::parse(out_);
  EXPECT_EQ(report["check"]["ok"], true);
  EXPECT_GT(report["fused"]["median_us"].get<double>(), 50'000) << out_;
}

TEST_F(NamespacesTest, TheLauncherMeetsOnOneNetworkAndBytesTakeTheOther) {
  const std::string line = "run ag_gemm --nodes 3 --m 2048 --n 64 --k 256 --repeat 2";
  for (const bool chosen : {true, false}) {
    SCOPED_TRACE(chosen ? "NCCL_SOCKET_IFNAME=data" : "as rank 0's address says");
    ASSERT_EQ(run_on("-n 3 -m mgmt -b", line, chosen ? "NCCL_SOCKET_IFNAME=data" : ""), 0) << err_;
    auto sent = bytes_sent();
    ASSERT_EQ(sent.size(), 6u) << out_;
    for (const char* host : {"n0", "n1", "n2"}) {
      const std::int64_t data = sent[std::string(host) + " data0"];
      const std::int64_t mgmt = sent[std::string(host) + " mgmt0"];
      EXPECT_GT(chosen ? data : mgmt, 500'000) << out_;
      EXPECT_LT(chosen ? mgmt : data, 50'000) << out_;
    }
  }
  EXPECT_EQ(run_on("-n 2 -m mgmt", "run ag_gemm --nodes 2 --m 64 --n 64 --k 64", "NCCL_SOCKET_IFNAME=ib"), 2);
  EXPECT_NE(err_.find("NCCL_SOCKET_IFNAME"), std::string::npos) << err_;
}

// Nobody dies and nothing is refused: bytes just go nowhere.
TEST_F(NamespacesTest, ALinkThatGoesDownIsSaidByAllAfterTheTimeOfSilence) {
  const Clock::time_point begin = Clock::now();
  EXPECT_EQ(run_on("-n 3 -d 1:3", "run gemm_ar --nodes 3 --m 256 --n 256 --k 64 --repeat 1000000 --no-check"), 3);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_LT(seconds, 3 + 15 + 10) << "3 s until the cut, 15 s of silence";
  std::map<std::string, bool> said;
  std::istringstream lines(err_);
  for (std::string text; std::getline(lines, text);) {
    if (text.starts_with("fused run ")) continue;
    // Rank 1 is cut off from rank 0; to all others it is rank 1 that is gone.
    const bool right =
        text.find(text.find("(rank 1)") != std::string::npos ? "rank 0 has given no sign of life"
                                                             : "rank 1 has given no sign of life") != std::string::npos;
    EXPECT_TRUE(right) << text;
    said[text.substr(0, text.find(')'))] = true;
  }
  EXPECT_EQ(said.size(), 3u) << err_;
}

}  // namespace
}  // namespace mkernel::cli
