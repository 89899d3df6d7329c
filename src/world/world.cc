#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "exec/schedule.h"
#include "world/memory_limit.h"
#include "world/network.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

constexpr int kHostSms = 2;   // when none are asked for: enough to overlap
constexpr int kGpuSms = 132;  // of an H100 or H200
constexpr int kMaxSms = 1024;
constexpr int kMaxThreads = 4096;
constexpr int kMaxRanks = 1 << 16;
constexpr int kMaxRingDepthOption = 1 << 16;
// Pieces of a write that may overtake each other; a network that sends packets makes as many of some KiB each.
constexpr int kPieces = 4;
constexpr std::align_val_t kMemoryAlignment{256};

Status check_numbers(const WorldOptions& options) {
  const struct {
    const char* name;
    double value;
  } links[] = {{"link.gigabytes_per_s", options.link.gigabytes_per_s}, {"link.latency_us", options.link.latency_us}};
  for (const auto& link : links) {
    if (!std::isfinite(link.value) || link.value < 0 || link.value > 1e9) {
      return bad_argument(fmt::format("{} is {}: it must be a number from 0 to 10^9", link.name, link.value));
    }
  }
  if (std::isnan(options.deadline_s) || options.deadline_s <= 0) {
    return bad_argument(fmt::format("deadline_s is {}: it must be more than 0", options.deadline_s));
  }
  if (std::isnan(options.warn_s) || options.warn_s <= 0) {
    return bad_argument(fmt::format("warn_s is {}: it must be more than 0", options.warn_s));
  }
  if (options.ring_depth < 1 || options.ring_depth > kMaxRingDepthOption ||
      !std::has_single_bit(static_cast<unsigned>(options.ring_depth))) {
    return bad_argument(fmt::format("ring_depth is {}: it must be a power of two from 1 to {}", options.ring_depth,
                                    kMaxRingDepthOption));
  }
  return Ok{};
}

Status check_processes(const WorldOptions& options) {
  const Processes& processes = options.processes;
  if (processes.rank < 0) return Ok{};
  if (options.device == Device::kSim) {
    return bad_argument("several processes are given: Device::kSim simulates all ranks in one");
  }
  if (processes.size < 2 || processes.rank >= processes.size) {
    return bad_argument(
        fmt::format("processes.rank is {} of {}: there must be at least 2, and it less than their number",
                    processes.rank, processes.size));
  }
  if (std::int64_t{options.nodes} * options.gpus != processes.size) {
    return bad_argument(
        fmt::format("nodes {} x gpus {} makes {} ranks, but {} processes were started: there must be as "
                    "many",
                    options.nodes, options.gpus, std::int64_t{options.nodes} * options.gpus, processes.size));
  }
  const auto& networks = network_names();
  if (std::find(networks.begin(), networks.end(), processes.network) == networks.end()) {
    return bad_argument(
        fmt::format("processes.network is '{}': it must be one of {}", processes.network, fmt::join(networks, ", ")));
  }
  if (std::isnan(processes.start_s) || processes.start_s <= 0) {
    return bad_argument(fmt::format("processes.start_s is {}: it must be more than 0", processes.start_s));
  }
  return Ok{};
}

Status check_options(const WorldOptions& options) {
  if (options.nodes < 1) return bad_argument(fmt::format("nodes is {}: it must be at least 1", options.nodes));
  if (options.gpus < 1) return bad_argument(fmt::format("gpus is {}: it must be at least 1", options.gpus));
  const std::int64_t world = std::int64_t{options.nodes} * options.gpus;
  if (world > kMaxRanks) {
    return bad_argument(fmt::format("nodes {} x gpus {} makes {} ranks: at most {} are accepted", options.nodes,
                                    options.gpus, world, kMaxRanks));
  }
  if (options.device != Device::kHost && options.device != Device::kSim && options.device != Device::kCuda) {
    return bad_argument(
        fmt::format("device is {}: kHost (0), kSim (1) or kCuda (2) is accepted", static_cast<int>(options.device)));
  }
  if (options.sms < 1 || options.sms > kMaxSms) {
    return bad_argument(fmt::format("sms is {}: it must be 1 to {}", options.sms, kMaxSms));
  }
  if (Status processes = check_processes(options); !processes.ok()) return processes;
  if (options.device == Device::kHost && options.processes.rank < 0 && world * options.sms > kMaxThreads) {
    return bad_argument(fmt::format("{} ranks x {} SMs need {} threads: on the host at most {} are accepted", world,
                                    options.sms, world * options.sms, kMaxThreads));
  }
  if (Status numbers = check_numbers(options); !numbers.ok()) return numbers;
  return validate_partition(options.partition, options.sms);
}

LinkModel link_model(const WorldOptions& options) {
  LinkModel link;
  link.bytes_per_ns = options.link.gigabytes_per_s;  // 10^9 bytes per second is one byte per nanosecond
  link.latency_ns = static_cast<Nanos>(options.link.latency_us * 1e3);
  link.unordered = options.link.unordered;
  link.seed = options.seed;
  if (link.unordered) {
    link.pieces = kPieces;
    // Enough that pieces really overtake each other: half the latency more, and at least what a few KiB take to send.
    link.jitter_ns = link.latency_ns / 2 + 5'000;
  }
  return link;
}

}  // namespace

Status World::Impl::check_rank(int rank) const {
  if (rank < 0 || rank >= topo.world()) {
    return bad_argument(fmt::format("rank is {}: it must be 0 to {}", rank, topo.world() - 1));
  }
  if (!runs(rank)) {
    return bad_argument(
        fmt::format("rank is {}: it runs in another process, this one runs rank {}", rank, group->rank()));
  }
  return Ok{};
}

std::int64_t World::Impl::memory_limit() const { return hooks.memory_limit ? *hooks.memory_limit : available_memory(); }

namespace {

Result<std::unique_ptr<CudaExecutor>> create_cuda(const WorldOptions& options, ProcessGroup* group) {
  CudaExecutorOptions cuda;
  cuda.topo = {options.nodes, options.gpus};
  cuda.sms = options.sms;
  cuda.link = link_model(options);
  cuda.copy_engine = options.copy_engine_wire;
  cuda.ring_depth = options.ring_depth;
  cuda.deadline_s = options.deadline_s;
  cuda.warn_s = options.warn_s;
  cuda.on_warning = options.on_warning;
  if (group != nullptr) {
    cuda.own_rank = group->rank();
    cuda.local_index = group->local_index();
    cuda.endpoint = group->endpoint();
    cuda.on_failure = [&bootstrap = group->bootstrap()](const Error& error) { bootstrap.tell_failure(error); };
  }
  return CudaExecutor::create(cuda);
}

// `asked` may leave the number of SMs to the GPU. Tiles are chosen by it, and must be the same on all ranks.
Status start_cuda(World::Impl& impl, const WorldOptions& asked) {
  ProcessGroup* const group = impl.group.get();
  Result<std::unique_ptr<CudaExecutor>> executor = create_cuda(asked, group);
  Status started = executor.ok() ? Status(Ok{}) : Status(executor.error());
  if (started.ok()) started = validate_partition(asked.partition, (*executor)->sms());
  if (group != nullptr) {
    if (Status status = group->confirm("start its GPU", started); !status.ok()) return status;
  }
  if (!started.ok()) return started;
  impl.cuda = std::move(*executor);
  impl.options.sms = impl.plan_sms = impl.cuda->sms();
  impl.options.partition = asked.partition;
  if (group == nullptr) return Ok{};
  const auto sms = group->gather("count its SMs", {impl.plan_sms});
  if (!sms.ok()) return sms.error();
  for (const std::vector<std::int64_t>& of_rank : *sms) {
    impl.plan_sms = std::min(impl.plan_sms, static_cast<int>(of_rank[0]));
  }
  group->bootstrap().watch([raw = impl.cuda.get()](const Error& error) { raw->fail(error); });
  return Ok{};
}

Status start_host(World::Impl& impl) {
  const WorldOptions& options = impl.options;
  ProcessGroup* const group = impl.group.get();
  HostExecutorOptions host;
  if (group != nullptr) {
    host.own_rank = group->rank();
    host.endpoint = group->endpoint();
    host.node_bells = group->node_bells();
    host.on_failure = [&bootstrap = group->bootstrap()](const Error& error) { bootstrap.tell_failure(error); };
  }
  host.topo = impl.topo;
  host.sms = options.sms;
  host.link = link_model(options);
  host.ring_depth = options.ring_depth;
  host.deadline_s = options.deadline_s;
  host.warn_s = options.warn_s;
  host.on_warning = options.on_warning;
  Result<std::unique_ptr<HostExecutor>> executor = HostExecutor::create(host);
  if (group != nullptr) {
    const Status started = executor.ok() ? Status(Ok{}) : Status(executor.error());
    if (Status status = group->confirm("start its threads", started); !status.ok()) return status;
  }
  if (!executor.ok()) return executor.error();
  impl.executor = std::move(executor.value());
  if (group != nullptr) {
    group->bootstrap().watch([raw = impl.executor.get()](const Error& error) { raw->fail(error); });
  }
  return Ok{};
}

}  // namespace

Result<World> World::create(const WorldOptions& asked) {
  WorldOptions options = asked;
  const bool choose_sms = options.sms == 0;
  if (choose_sms) options.sms = options.device == Device::kHost ? kHostSms : kGpuSms;
  if (options.device == Device::kCuda && choose_sms) options.partition = {};  // checked when the SMs are known
  if (Status status = check_options(options); !status.ok()) return status.error();
  auto impl = std::make_shared<Impl>(options);
  if (options.device == Device::kSim) return World(std::move(impl));
  if (options.processes.rank >= 0) {
    Result<std::unique_ptr<ProcessGroup>> group = ProcessGroup::create(options);
    if (!group.ok()) return group.error();
    impl->group = std::move(group).value();
  }
  const Status started = options.device == Device::kCuda ? start_cuda(*impl, asked) : start_host(*impl);
  if (!started.ok()) return started.error();
  return World(std::move(impl));
}

World::World(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;
World::~World() = default;

int World::size() const { return impl_->topo.world(); }
int World::rank() const { return impl_->group ? impl_->group->rank() : -1; }
const WorldOptions& World::options() const { return impl_->options; }
void World::abort(const std::string& reason) { impl_->fail({ErrorKind::kAborted, "the world was aborted: " + reason}); }

std::string World::flight_record(int rank) const {
  if (rank < 0 || rank >= size() || !impl_->runs(rank)) return "";
  if (impl_->executor) return impl_->executor->flight_record(rank);
  return impl_->cuda ? impl_->cuda->flight_record(rank) : "";
}

Result<void*> World::allocate(int rank, std::int64_t bytes) {
  if (Status status = impl_->check_rank(rank); !status.ok()) return status.error();
  if (bytes < 0) return bad_argument(fmt::format("bytes is {}: it must be 0 or more", bytes));
  if (impl_->cuda) return impl_->cuda->allocate(rank, bytes);
  const auto size = static_cast<std::size_t>(bytes);
  void* data = ::operator new(size == 0 ? 1 : size, kMemoryAlignment, std::nothrow);
  if (data == nullptr) return Error{ErrorKind::kOutOfMemory, fmt::format("the system gives no {} bytes", bytes)};
  return data;
}

void World::release(int rank, void* data) {
  if (data == nullptr) return;
  if (impl_->cuda) {
    impl_->cuda->release(rank, data);
  } else {
    ::operator delete(data, kMemoryAlignment);
  }
}

Status World::copy(int rank, void* dst, const void* src, std::int64_t bytes) {
  if (Status status = impl_->check_rank(rank); !status.ok()) return status;
  if (bytes < 0) return bad_argument(fmt::format("bytes is {}: it must be 0 or more", bytes));
  if (bytes == 0) return Ok{};
  if (impl_->cuda) return impl_->cuda->copy(rank, dst, src, bytes);
  std::memcpy(dst, src, static_cast<std::size_t>(bytes));
  return Ok{};
}

void* World::stream(int rank) const {
  return impl_->cuda && impl_->check_rank(rank).ok() ? impl_->cuda->stream(rank) : nullptr;
}

}  // namespace mkernel
