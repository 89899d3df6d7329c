// mkernel info: what this build and this machine have.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <vector>

#include "cli/commands.h"
#include "cli/format.h"
#include "cli/machine.h"
#include "exec/cuda/gpu_probe.h"
#include "exec/sim/cost_model.h"
#include "mkernel/types.h"
#include "net/libfabric/fabric_endpoint.h"
#include "net/verbs/nic_report.h"
#include "net/verbs/verbs_endpoint.h"
#include "world/network.h"

namespace mkernel::cli {
namespace {

#ifdef MKERNEL_HAS_CUDA
constexpr bool kCudaBuilt = true;
#else
constexpr bool kCudaBuilt = false;
#endif

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

std::vector<std::string> missing(const Machine& machine) {
  std::vector<std::string> sentences;
  if (!kCudaBuilt)
    sentences.push_back("The CUDA part is not in this build: operators run on the CPU and in the simulator.");
  if (!machine.nvidia_driver) sentences.push_back("No NVIDIA GPU driver was found on this machine.");
  if (const std::string obstacle = fabric_obstacle(); !obstacle.empty()) {
    sentences.push_back("No worlds of several processes: " + obstacle + ".");
  }
  if (const std::string obstacle = network_obstacle("verbs"); !obstacle.empty()) {
    sentences.push_back("No RDMA: " + obstacle + ".");
  } else if (const std::string efa = network_obstacle("efa"); !efa.empty()) {
    sentences.push_back("No EFA: " + efa + ".");
  }
  return sentences;
}

// One line per port and GPU, or why there are none.
std::vector<std::string> rdma_lines() {
  const auto settings = verbs_settings_from([](const char* name) { return std::getenv(name); });
  if (!settings) return {settings.error().message};
  std::vector<std::string> lines;
  const NicReport report = report_nics(*settings, "/sys");
  for (const PortReport& port : report.ports) lines.push_back(port_text(port));
  for (const GpuPort& gpu : report.gpus) lines.push_back(gpu_text(gpu));
  const std::vector<std::string> gpus = gpu_bus_ids();
  for (std::size_t device = 0; device < gpus.size(); ++device) {
    for (const GpuPort& gpu : report.gpus) {
      if (gpu.gpu != sysfs_address(gpus[device])) continue;
      const auto sample = create_gpu_sample(static_cast<int>(device));
      lines.push_back(fmt::format("GPU {} memory: {} (puts go through host memory so far)", gpu.gpu,
                                  sample.ok()
                                      ? gpu_memory_text(gpu.rails.front(), settings->gid_index, (*sample)->memory())
                                      : "it cannot be allocated: " + sample.error().message));
    }
  }
  return lines;
}

}  // namespace

ExitCode info_command(const InfoArgs& args, Console& console) {
  const Machine machine = inspect_machine();
  std::vector<std::string_view> operators;
  for (int i = 0; i < kOpCount; ++i) operators.push_back(op_name(static_cast<Op>(i)));
  std::vector<std::string_view> devices = {"host", "sim"};
  if (kCudaBuilt) devices.push_back("cuda");
  std::vector<std::string> transports = {"local"};
  for (const std::string& provider : fabric_providers()) transports.push_back("libfabric " + provider);
  for (const std::string_view name : network_names()) {
    if (name != "libfabric" && network_obstacle(name).empty()) transports.emplace_back(name);
  }
  const std::vector<std::string> rdma = rdma_lines();
  if (args.json) {
    console.json({{"ok", true},
                  {"command", "info"},
                  {"version", version_text()},
                  {"compiler", compiler()},
                  {"cpu", machine.cpu},
                  {"cores", machine.cores},
                  {"memory_bytes", machine.memory_bytes},
                  {"available_bytes", machine.available_bytes},
                  {"cuda_built", kCudaBuilt},
                  {"nvidia_driver", machine.nvidia_driver},
                  {"rdma_devices", machine.rdma_devices},
                  {"rdma", rdma},
                  {"operators", operators},
                  {"devices", devices},
                  {"transports", transports},
                  {"presets", preset_names()},
                  {"missing", missing(machine)}});
    return ExitCode::kGood;
  }
  std::ostream& out = console.out();
  out << fmt::format("{}, built with {}\n", version_text(), compiler());
  out << fmt::format("  machine     {}, {} core{}, {} of {} memory available\n", machine.cpu, machine.cores,
                     machine.cores == 1 ? "" : "s", format_bytes(static_cast<double>(machine.available_bytes)),
                     format_bytes(static_cast<double>(machine.memory_bytes)));
  out << fmt::format("  operators   {}\n", fmt::join(operators, ", "));
  out << fmt::format("  devices     host (CPU threads stand for SMs), sim (virtual time){}\n",
                     kCudaBuilt ? ", cuda (Hopper GPUs)" : "");
  out << fmt::format("  transports  {} (local: all ranks in one process, behind a link model)\n",
                     fmt::join(transports, ", "));
  out << fmt::format("  presets     {}\n", fmt::join(preset_names(), ", "));
  for (const std::string& line : rdma) out << fmt::format("  RDMA        {}\n", line);
  for (const std::string& sentence : missing(machine)) out << "  " << sentence << "\n";
  out << std::flush;
  return ExitCode::kGood;
}

}  // namespace mkernel::cli
