// scripts/cluster_bench.sh: what it would run under each launcher, and a small run of it by mpirun.
#include <sys/wait.h>

#include <nlohmann/json.hpp>

#include "tests/cli/rank_processes.h"
#include "world/network.h"

namespace mkernel::cli {
namespace {

class ClusterBenchTest : public RankProcesses {
 protected:
  int bench(const std::string& options, const std::string& variables = "") {
    const fs::path out = folder_ / "out";
    const std::string command = "cd " + folder_.string() + " && " + variables + " timeout 300 " + MKERNEL_SOURCE_DIR +
                                "/scripts/cluster_bench.sh " + options + " >" + out.string() + " 2>&1";
    const int status = std::system(command.c_str());
    out_ = content(out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }
  bool says(const std::string& text) const { return out_.find(text) != std::string::npos; }

  std::string out_;
};

TEST_F(ClusterBenchTest, SaysWhatItWouldRunUnderEachLauncherAndRunsNothing) {
  ASSERT_EQ(bench("-n -l mpirun -N 3 -g 2 -t verbs -d cuda -A n0 -s 512,256,128 -a '--hostfile hosts'"), 0) << out_;
  EXPECT_TRUE(
      says("'mpirun' '-np' '6' '--map-by' 'ppr:2:node' '-x' 'MKERNEL_ADDRESS' '-x' 'MKERNEL_NETWORK' "
           "'--hostfile' 'hosts'"))
      << out_;
  EXPECT_TRUE(
      says("'run' 'gemm_all_reduce' '--nodes' '3' '--gpus' '2' '--m' '512' '--n' '256' '--k' '128' '--device' "
           "'cuda'"))
      << out_;
  EXPECT_TRUE(says("--gtest_filter=*Speed*/verbs")) << out_;
  ASSERT_EQ(bench("-n -l torchrun -N 2 -g 8 -d host -a '--rdzv-backend c10d'"), 0) << out_;
  EXPECT_TRUE(says("'torchrun' '--nnodes' '2' '--nproc-per-node' '8' '--rdzv-backend' 'c10d' '--no-python'")) << out_;
  ASSERT_EQ(bench("-n -l torchrun -N 1 -g 4 -d host"), 0) << out_;
  EXPECT_TRUE(says("'torchrun' '--standalone' '--nproc-per-node' '4' '--no-python'")) << out_;
  // Of a SLURM job, which says how many nodes it has.
  ASSERT_EQ(bench("-n -l srun -g 4 -d host", "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=5"), 0) << out_;
  EXPECT_TRUE(says("'srun' '-N' '5' '-n' '20' '--ntasks-per-node=4'")) << out_;
  EXPECT_FALSE(fs::exists(folder_ / "cluster_bench.json"));
}

TEST_F(ClusterBenchTest, RefusesWhatItCannotRun) {
  for (const char* options : {"-n -N x", "-n -t tcp", "-n -s 1,2", "-n -l ssh", "-n -d tpu", "-n more", "-q"}) {
    EXPECT_EQ(bench(options), 2) << options << ": " << out_;
  }
  EXPECT_EQ(bench("-l mpirun -b /nowhere"), 2) << out_;
}

TEST_F(ClusterBenchTest, WritesOneJsonOfAllStepsAlsoWhenSomeFail) {
  if (std::system("mpirun --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "there is no mpirun (openmpi-bin)";
  if (const std::string obstacle = network_obstacle("libfabric"); !obstacle.empty()) GTEST_SKIP() << obstacle;
  // Only the program, so that the long tests of the network are left out.
  const fs::path programs = folder_ / "programs";
  fs::create_directory(programs);
  fs::create_symlink(program(), programs / "mkernel");
  const std::string root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1";
  const std::string options = "-l mpirun -a --oversubscribe -P -d host -r 1 -b " + programs.string();
  ASSERT_EQ(bench(options + " -N 2 -s 64,64,64", root), 0) << out_;
  auto report = nlohmann::json::parse(content(folder_ / "cluster_bench.json"));
  EXPECT_EQ(report["ok"], true);
  ASSERT_EQ(report["steps"].size(), 4u);
  for (std::size_t i = 1; i < 4; ++i) EXPECT_EQ(report["steps"][i]["result"]["check"]["ok"], true);
  // A network that is not there.
  if (!network_obstacle("verbs").empty()) {
    ASSERT_EQ(bench(options + " -t verbs -o bad.json -s 64,64,64", root), 1) << out_;
    report = nlohmann::json::parse(content(folder_ / "bad.json"));
    EXPECT_EQ(report["ok"], false);
    EXPECT_NE(report["steps"].back()["errors"].get<std::string>().find("rank"), std::string::npos) << report;
  }
}

}  // namespace
}  // namespace mkernel::cli
