#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <utility>

#include "exec/schedule.h"
#include "world/memory_limit.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

constexpr int kMaxSms = 1024;
constexpr int kMaxThreads = 4096;
constexpr int kMaxRanks = 1 << 16;
constexpr int kMaxRingDepthOption = 1 << 16;
// Pieces of a write that may overtake each other; a network that sends packets makes as many of some KiB each.
constexpr int kPieces = 4;

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

Status check_options(const WorldOptions& options) {
  if (options.nodes < 1) return bad_argument(fmt::format("nodes is {}: it must be at least 1", options.nodes));
  if (options.gpus < 1) return bad_argument(fmt::format("gpus is {}: it must be at least 1", options.gpus));
  const std::int64_t world = std::int64_t{options.nodes} * options.gpus;
  if (world > kMaxRanks) {
    return bad_argument(fmt::format("nodes {} x gpus {} makes {} ranks: at most {} are accepted", options.nodes,
                                    options.gpus, world, kMaxRanks));
  }
  if (options.device != Device::kHost && options.device != Device::kSim) {
    return bad_argument(
        fmt::format("device is {}: kHost (0) or kSim (1) is accepted", static_cast<int>(options.device)));
  }
  if (options.sms < 1 || options.sms > kMaxSms) {
    return bad_argument(fmt::format("sms is {}: it must be 1 to {}", options.sms, kMaxSms));
  }
  if (options.device == Device::kHost && world * options.sms > kMaxThreads) {
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

std::int64_t World::Impl::memory_limit() const { return hooks.memory_limit ? *hooks.memory_limit : available_memory(); }

Result<World> World::create(const WorldOptions& options) {
  if (Status status = check_options(options); !status.ok()) return status.error();
  if (options.device == Device::kSim) return World(std::make_shared<Impl>(options, nullptr));
  HostExecutorOptions host;
  host.topo = {options.nodes, options.gpus};
  host.sms = options.sms;
  host.link = link_model(options);
  host.ring_depth = options.ring_depth;
  host.deadline_s = options.deadline_s;
  host.warn_s = options.warn_s;
  host.on_warning = options.on_warning;
  Result<std::unique_ptr<HostExecutor>> executor = HostExecutor::create(host);
  if (!executor.ok()) return executor.error();
  return World(std::make_shared<Impl>(options, std::move(executor.value())));
}

World::World(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;
World::~World() = default;

int World::size() const { return impl_->topo.world(); }
const WorldOptions& World::options() const { return impl_->options; }
void World::abort(const std::string& reason) { impl_->fail({ErrorKind::kAborted, "the world was aborted: " + reason}); }

std::string World::flight_record(int rank) const {
  if (!impl_->executor || rank < 0 || rank >= size()) return "";
  return impl_->executor->flight_record(rank);
}

}  // namespace mkernel
