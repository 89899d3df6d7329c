#include "world/launch.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "world/interfaces.h"

namespace mkernel {
namespace {

constexpr int kMaxProcesses = 1 << 16;

std::string text_of(const Environment& environment, const char* name) {
  const char* value = environment(name);
  return value != nullptr ? value : "";
}

// The number in a variable that must be there.
Result<int> number_of(const Environment& environment, const char* name, int low, int high) {
  const std::string text = text_of(environment, name);
  int value = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value < low || value > high) {
    return bad_argument(
        fmt::format("the environment variable {} is '{}': it must be a number from {} to {}", name, text, low, high));
  }
  return value;
}

// The variables of one launcher.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_size;  // processes on this host; null: the launcher does not say
};

constexpr Launcher kLaunchers[] = {
    {"mkernel", "MKERNEL_RANK", "MKERNEL_SIZE", nullptr},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"},
    // Only a step that srun has started has a number of tasks; a batch script alone has not.
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", nullptr},
};

// What all processes of one start share and no other start has, as far as the launcher tells.
std::string job_of(const Environment& environment, const std::string& launcher) {
  const auto joined = [&](std::initializer_list<const char*> names) {
    std::string text = launcher;
    for (const char* name : names) text += "/" + text_of(environment, name);
    return text;
  };
  if (launcher == "mpirun") return joined({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  if (launcher == "torchrun") {
    return joined({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"});
  }
  if (launcher == "srun") return joined({"SLURM_JOB_ID", "SLURM_STEP_ID"});
  return launcher;
}

bool on_one_host(const Environment& environment, const Launcher& launcher, int size) {
  if (launcher.local_size != nullptr) return text_of(environment, launcher.local_size) == std::to_string(size);
  if (std::strcmp(launcher.name, "srun") == 0) return text_of(environment, "SLURM_STEP_NUM_NODES") == "1";
  return true;
}

// Where rank 0 is, when not all are on one host.
Result<std::string> address_of(const Environment& environment, const std::string& launcher) {
  if (launcher == "torchrun") {
    // Its port belongs to torchrun itself.
    const std::string host = text_of(environment, "MASTER_ADDR");
    if (!host.empty()) return host;
  }
  if (launcher == "srun") {
    const std::string host = first_slurm_host(text_of(environment, "SLURM_STEP_NODELIST"));
    if (!host.empty()) return host;
  }
  return bad_argument(
      fmt::format("{} started processes on several hosts and does not say where rank 0 is: set "
                  "MKERNEL_ADDRESS to its host (mpirun -x MKERNEL_ADDRESS=HOST)",
                  launcher));
}

// The own address to use; empty: none is asked for.
Result<std::string> interface_of(const Environment& environment) {
  std::string address = text_of(environment, "MKERNEL_INTERFACE");
  const std::string names = text_of(environment, "NCCL_SOCKET_IFNAME");
  if (!address.empty() || names.empty()) return address;
  address = find_interface(names, own_interfaces());
  if (!address.empty()) return address;
  return bad_argument(
      fmt::format("the environment variable NCCL_SOCKET_IFNAME is '{}': no network interface of this host that has an "
                  "address is meant by it",
                  names));
}

}  // namespace

std::string first_slurm_host(const std::string& list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    while (++i < list.size() && list[i] != '-' && list[i] != ',' && list[i] != ']') host += list[i];
    const std::size_t end = list.find(']', i);
    if (end == std::string::npos) return "";
    i = end;
  }
  return host;
}

Result<Processes> processes_from(const Environment& environment) {
  Processes processes;
  for (const Launcher& launcher : kLaunchers) {
    if (environment(launcher.rank) == nullptr || environment(launcher.size) == nullptr) continue;
    const Result<int> size = number_of(environment, launcher.size, 1, kMaxProcesses);
    if (!size.ok()) return size.error();
    const Result<int> rank = number_of(environment, launcher.rank, 0, *size - 1);
    if (!rank.ok()) return rank.error();
    if (*size == 1) return processes;
    processes.rank = *rank;
    processes.size = *size;
    processes.job = text_of(environment, "MKERNEL_JOB");
    if (processes.job.empty()) processes.job = job_of(environment, launcher.name);
    processes.address = text_of(environment, "MKERNEL_ADDRESS");
    if (processes.address.empty() && !on_one_host(environment, launcher, *size)) {
      Result<std::string> address = address_of(environment, launcher.name);
      if (!address.ok()) return address.error();
      processes.address = std::move(address).value();
    }
    Result<std::string> interface = interface_of(environment);
    if (!interface.ok()) return interface.error();
    processes.interface = std::move(interface).value();
    if (environment("MKERNEL_START_S") != nullptr) {
      const Result<int> seconds = number_of(environment, "MKERNEL_START_S", 1, 1'000'000);
      if (!seconds.ok()) return seconds.error();
      processes.start_s = *seconds;
    }
    if (environment("MKERNEL_NETWORK") != nullptr) processes.network = text_of(environment, "MKERNEL_NETWORK");
    if (environment("MKERNEL_PROVIDER") != nullptr) processes.provider = text_of(environment, "MKERNEL_PROVIDER");
    return processes;
  }
  return processes;
}

Result<Processes> processes_from_environment() {
  return processes_from([](const char* name) { return std::getenv(name); });
}

}  // namespace mkernel
