#include "world/launch.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace mkernel {
namespace {

using Variables = std::map<std::string, std::string>;

Result<Processes> from(const Variables& variables) {
  return processes_from([&](const char* name) {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

TEST(Launch, WithoutALauncherAllRanksAreHere) {
  EXPECT_EQ(from({}).value().rank, -1);
  // A shell on a cluster knows some of the names, too.
  EXPECT_EQ(from({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).value().rank, -1);
  EXPECT_EQ(from({{"RANK", "0"}}).value().rank, -1);
  EXPECT_EQ(from({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}).value().rank, -1);
}

TEST(Launch, OpenMpi) {
  const Variables one_host = {{"OMPI_COMM_WORLD_RANK", "2"},
                              {"OMPI_COMM_WORLD_SIZE", "4"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                              {"PMIX_NAMESPACE", "123456"}};
  const Processes processes = from(one_host).value();
  EXPECT_EQ(processes.rank, 2);
  EXPECT_EQ(processes.size, 4);
  EXPECT_EQ(processes.address, "");
  EXPECT_NE(processes.job.find("123456"), std::string::npos);

  Variables two_hosts = one_host;
  two_hosts["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  const auto refused = from(two_hosts);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("MKERNEL_ADDRESS"), std::string::npos) << refused.error().message;
  two_hosts["MKERNEL_ADDRESS"] = "node7:5000";
  EXPECT_EQ(from(two_hosts).value().address, "node7:5000");
}

TEST(Launch, Torchrun) {
  Variables variables = {{"RANK", "3"},
                         {"WORLD_SIZE", "4"},
                         {"LOCAL_RANK", "1"},
                         {"LOCAL_WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "10.0.0.1"},
                         {"MASTER_PORT", "29500"}};
  const Processes processes = from(variables).value();
  EXPECT_EQ(processes.rank, 3);
  EXPECT_EQ(processes.address, "10.0.0.1");  // not its port, which is torchrun's
  variables["LOCAL_WORLD_SIZE"] = "4";
  EXPECT_EQ(from(variables).value().address, "");
  const std::string first_job = from(variables).value().job;
  variables["TORCHELASTIC_RESTART_COUNT"] = "1";
  EXPECT_NE(from(variables).value().job, first_job);
}

TEST(Launch, Slurm) {
  Variables variables = {{"SLURM_PROCID", "5"},
                         {"SLURM_STEP_NUM_TASKS", "8"},
                         {"SLURM_STEP_NUM_NODES", "2"},
                         {"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "1"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_STEP_NODELIST", "gpu[07-08]"}};
  const Processes processes = from(variables).value();
  EXPECT_EQ(processes.rank, 5);
  EXPECT_EQ(processes.size, 8);
  EXPECT_EQ(processes.address, "gpu07");
  variables["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_EQ(from(variables).value().address, "");
}

TEST(Launch, OurOwnVariablesComeFirst) {
  const Processes processes = from({{"MKERNEL_RANK", "1"},
                                    {"MKERNEL_SIZE", "2"},
                                    {"MKERNEL_JOB", "x"},
                                    {"MKERNEL_INTERFACE", "10.1.1.1"},
                                    {"MKERNEL_NETWORK", "verbs"},
                                    {"MKERNEL_PROVIDER", "shm"},
                                    {"NCCL_SOCKET_IFNAME", "no_such_interface"},
                                    {"MKERNEL_START_S", "5"},
                                    {"RANK", "7"},
                                    {"WORLD_SIZE", "8"}})
                                  .value();
  EXPECT_EQ(processes.rank, 1);
  EXPECT_EQ(processes.size, 2);
  EXPECT_EQ(processes.job, "x");
  EXPECT_EQ(processes.interface, "10.1.1.1");
  EXPECT_EQ(processes.network, "verbs");
  EXPECT_EQ(processes.provider, "shm");
  EXPECT_EQ(processes.start_s, 5);
  // A way out of a shell that has a launcher's variables.
  EXPECT_EQ(from({{"MKERNEL_RANK", "0"}, {"MKERNEL_SIZE", "1"}, {"RANK", "0"}, {"WORLD_SIZE", "8"}}).value().rank, -1);
}

TEST(Launch, InterfacesMayBeNamedAsForNccl) {
  const Variables ranks = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_EQ(from(ranks).value().network, "libfabric");
  auto variables = ranks;
  variables["NCCL_SOCKET_IFNAME"] = "=lo";
  EXPECT_EQ(from(variables).value().interface, "127.0.0.1");
  variables["NCCL_SOCKET_IFNAME"] = "no_such_interface";
  EXPECT_NE(from(variables).error().message.find("NCCL_SOCKET_IFNAME is 'no_such_interface'"), std::string::npos);
}

TEST(Launch, NonsenseIsRefusedByName) {
  for (const char* rank : {"", "-1", "4", "x", "1x", "99999999999999999999"}) {
    const auto refused = from({{"RANK", rank}, {"WORLD_SIZE", "4"}});
    ASSERT_FALSE(refused.ok()) << rank;
    EXPECT_NE(refused.error().message.find("RANK is '"), std::string::npos) << refused.error().message;
  }
  EXPECT_FALSE(from({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).ok());
  EXPECT_FALSE(from({{"RANK", "0"}, {"WORLD_SIZE", "65537"}}).ok());
}

TEST(Launch, TheFirstHostOfASlurmList) {
  EXPECT_EQ(first_slurm_host("a"), "a");
  EXPECT_EQ(first_slurm_host("a,b"), "a");
  EXPECT_EQ(first_slurm_host("gpu[07-09,12],login1"), "gpu07");
  EXPECT_EQ(first_slurm_host("gpu[3,5]"), "gpu3");
  EXPECT_EQ(first_slurm_host("r[1-2]n[01-04]-ib,x"), "r1n01-ib");
  EXPECT_EQ(first_slurm_host(""), "");
  EXPECT_EQ(first_slurm_host("gpu[07"), "");
}

}  // namespace
}  // namespace mkernel
