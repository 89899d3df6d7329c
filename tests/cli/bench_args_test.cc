// What `mkernel bench` takes, and what it refuses before it looks for a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "cli/bench_args.h"
#include "tests/cli/cli_run.h"

namespace mkernel::cli {
namespace {

BenchArgs parsed(const std::string& line) {
  const std::vector<std::string> args = words(line);
  const Result<Command> command = parse_args(args);
  EXPECT_TRUE(command) << line;
  return command && std::holds_alternative<BenchArgs>(*command) ? std::get<BenchArgs>(*command) : BenchArgs{};
}

void refused(const std::string& line, const std::string& named) {
  const CliRun result = run(line);
  EXPECT_EQ(result.code, 2) << line;
  EXPECT_NE(result.err.find(named), std::string::npos) << line << ": " << result.err;
  EXPECT_EQ(result.out, "") << line;
}

TEST(BenchArgs, KnowsItsThreeForms) {
  EXPECT_EQ(parsed("bench gemm_core --m 8k").what, BenchArgs::What::kGemmCore);
  EXPECT_EQ(parsed("bench gemm_core --m 8k").problem.gemm.m, 8192);
  const BenchArgs op = parsed("bench gemm_rs --nodes 3 --gpus 2");
  EXPECT_EQ(op.what, BenchArgs::What::kOperator);
  EXPECT_EQ(op.problem.gemm.op, Op::kGemmReduceScatter);
  EXPECT_EQ(op.problem.topo.world(), 6);
  EXPECT_EQ(parsed("bench suite virtual_cluster").suite, "virtual_cluster");
}

TEST(BenchArgs, TakesLinks) {
  using Kind = bench::LinkRule::Kind;
  EXPECT_EQ(parsed("bench gemm_ar").link.kind, Kind::kScaled);
  EXPECT_EQ(parsed("bench gemm_ar --nodes 1").link.kind, Kind::kNone);
  EXPECT_EQ(parsed("bench gemm_ar --link balanced").link.kind, Kind::kBalanced);
  const bench::LinkRule fixed = parsed("bench gemm_ar --link 6.5:3").link;
  EXPECT_EQ(fixed.kind, Kind::kFixed);
  EXPECT_EQ(fixed.gigabytes_per_s, 6.5);
  EXPECT_EQ(fixed.latency_us, 3);
  for (const char* link : {"ib", "fast", "0", "6:5:unordered", "-1", ""}) {
    EXPECT_FALSE(parse_bench_link("--link", link)) << link;
  }
}

TEST(BenchArgs, KeepsTheCommandThatRepeatsIt) {
  EXPECT_EQ(parsed("bench suite small --filter M=1;x").command, "mkernel bench suite small --filter 'M=1;x'");
}

TEST(BenchArgs, CommitComesFromTheOptionThenTheEnvironment) {
  ::setenv("MKERNEL_COMMIT", "fromenv", 1);
  EXPECT_EQ(parsed("bench gemm_core").commit, "fromenv");
  EXPECT_EQ(parsed("bench gemm_core --commit given").commit, "given");
  ::unsetenv("MKERNEL_COMMIT");
  EXPECT_EQ(parsed("bench gemm_core").commit, "unknown");
}

TEST(BenchArgs, RefusesWhatTheFormDoesNotLookAt) {
  refused("bench gemm_core --link 5", "--link");
  refused("bench gemm_core --sms 16", "--sms");
  refused("bench gemm_ar --transposed", "--transposed");
  refused("bench gemm_ar --filter x", "--filter");
  refused("bench suite gemm_core --m 5", "--m");
  refused("bench suite small --partition 14,1,1", "--partition");
  refused("bench suite sim_hierarchical --sms 16", "--sms");
  refused("bench suite hierarchical --calibrate", "--calibrate");
}

TEST(BenchArgs, RefusesWhatCannotBeMeasured) {
  refused("bench", "gemm_core");
  refused("bench ring_attn", "attention_core.py");
  refused("bench suite", "virtual_cluster");
  refused("bench suite everything", "everything");
  refused("bench gemm_core twice", "twice");
  refused("bench gem", "gem");
  refused("bench gemm_core --m 0", "--m");
  refused("bench gemm_ar --dtype fp32", "fp32");
  refused("bench gemm_ar --nodes 1 --link balanced", "balanced");
  refused("bench gemm_ar --sms 16 --partition 10,1,1", "partition");
  refused("bench gemm_ar --sweep-partition --partition 14,1,1", "--sweep-partition");
  refused("bench gemm_core --rounds 0", "--rounds");
  refused("bench gemm_core --block-ms 0", "--block-ms");
}

TEST(BenchArgs, WithoutAGpuItSaysSoInOneSentence) {
  if (std::filesystem::exists("/proc/driver/nvidia/version")) GTEST_SKIP() << "this machine has a GPU";
  const CliRun result = run("bench gemm_core --m 16");
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

}  // namespace
}  // namespace mkernel::cli
