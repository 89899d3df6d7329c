#include "exec/cuda/cuda_network.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "exec/cuda/cpu_affinity.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/cuda/gpu_landing.h"
#include "exec/cuda/gpu_rings.h"
#include "exec/cuda/wire.h"
#include "exec/host/doorbell.h"
#include "net/proxy.h"

namespace mkernel {
namespace {

// A thread without work spins for this long, since the next record mostly follows soon; then it sleeps in short steps.
constexpr Nanos kSpinNs = 2'000'000;
constexpr Nanos kSleepNs = 45'000;    // with some 5 us to wake up, a record is seen within 50
constexpr Nanos kPollNs = 1'000'000;  // between calls of on_poll
constexpr Nanos kRestNs = 5'000'000;  // without work, until the wire may leave the GPU
constexpr Nanos kWirePatienceNs = 5'000'000'000;

inline void relax_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// An endpoint of the in-process network that starts a put's copy when it is posted, and lets nothing through that the
// wire has no room for.
class WireEndpoint final : public Endpoint {
 public:
  WireEndpoint(Endpoint* inner, Wire* wire, GpuLanding* landing, std::int32_t rank)
      : inner_(inner), wire_(wire), landing_(landing), rank_(rank) {}

  PostStatus post(const Put& put, Nanos now) override {
    if (wire_->copy_room(rank_) == 0) return PostStatus::kAgain;
    const PostStatus status = inner_->post(put, now);
    if (status == PostStatus::kPosted) landing_->posted(put);
    return status;
  }
  int poll(Nanos now, std::span<TransportEvent> events) override {
    // Every event may need a stamp. What is due stays due until there is room.
    if (wire_->stamp_room(rank_) < events.size()) return 0;
    return inner_->poll(now, events);
  }
  Nanos next_event() const override { return inner_->next_event(); }
  int arrivals_per_put() const override { return inner_->arrivals_per_put(); }

 private:
  Endpoint* inner_;
  Wire* wire_;
  GpuLanding* landing_;
  std::int32_t rank_;
};

class GpuNetwork final : public CudaNetwork {
 public:
  GpuNetwork(VirtualGpus& gpus, const CudaNetworkOptions& options, GpuRings rings, std::unique_ptr<Wire> wire);
  ~GpuNetwork() override;
  // Throws std::system_error when the system has no more threads.
  void start();

  Status add_operator(std::uint32_t number, std::shared_ptr<const PlanSource> source, const HeapLayout& layout,
                      std::uint64_t start_epoch, std::vector<std::byte*> heaps) override;
  void remove_operator(std::uint32_t number) override;
  void wake() override { wakes_.fetch_add(1, std::memory_order_relaxed); }  // order: none, it publishes nothing
  const DeviceRing* rings(std::int32_t rank) const override { return rings_.table(rank); }
  std::int64_t bytes_posted(std::int32_t rank) const override { return network_.bytes_sent(rank); }
  std::int64_t operator_bytes(std::uint32_t number) const override { return landing_.operator_bytes(number); }
  void drop() override;
  void set_link(double bytes_per_ns, Nanos latency_ns) override { network_.set_link(bytes_per_ns, latency_ns); }
  WireKind wire() const override { return wire_->kind(); }

 private:
  struct Rank {
    std::unique_ptr<WireEndpoint> endpoint;
    std::unique_ptr<Proxy> proxy;
    bool failure_told = false;
    bool dropped = false;
  };
  struct alignas(128) Worker {
    std::vector<std::int32_t> ranks;
    Nanos worked_at = 0;  // last
    Nanos polled_at = 0;
    std::uint32_t woken = 0;                // how many calls of wake() it has seen
    std::atomic<std::uint32_t> settled{0};  // the last of settle()'s requests that it has fulfilled
    std::thread thread;
  };

  Rank& rank(std::int32_t r) { return ranks_[static_cast<std::size_t>(r)]; }
  void run(Worker& worker);
  bool step_rank(std::int32_t r, Nanos now);
  void look_around(Worker& worker, Nanos now);
  void rest(Worker& worker, Nanos now);
  void fulfil(Worker& worker, std::uint32_t request);
  void settle();
  void fail(Error error);

  VirtualGpus& gpus_;
  CudaNetworkOptions options_;
  GpuRings rings_;
  std::unique_ptr<Wire> wire_;
  GpuLanding landing_;
  LocalNetwork network_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::mutex mutex_;                                        // guards the next two, and who may call settle()
  std::vector<std::shared_ptr<const PlanSource>> sources_;  // proxies know them as long as they live
  std::uint32_t last_request_ = 0;
  std::atomic<std::uint32_t> request_{0};
  std::atomic<std::uint32_t> wakes_{0};
  std::atomic<bool> dropped_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> wire_failure_told_{false};
};

GpuNetwork::GpuNetwork(VirtualGpus& gpus, const CudaNetworkOptions& options, GpuRings rings, std::unique_ptr<Wire> wire)
    : gpus_(gpus),
      options_(options),
      rings_(std::move(rings)),
      wire_(std::move(wire)),
      landing_(wire_.get(), options.link.unordered),
      network_(options.topo.world(), options.link, &landing_),
      ranks_(static_cast<std::size_t>(options.topo.world())) {
  const Topology& topo = options_.topo;
  for (std::int32_t r = 0; r < topo.world(); ++r) {
    rank(r).endpoint = std::make_unique<WireEndpoint>(network_.endpoint(r), wire_.get(), &landing_, r);
    ProxyConfig config;
    config.rank = r;
    config.topo = topo;
    for (std::int32_t node = 0; node < topo.nodes; ++node) config.rings.push_back(rings_.ring(r, node));
    config.endpoint = rank(r).endpoint.get();
    config.landing = &landing_;
    config.max_post_failures_ns = options_.max_post_failures_ns;
    config.queue_depth = 32;  // many small puts: with few the proxy's own work per step would count
    config.batch = 16;
    rank(r).proxy = std::make_unique<Proxy>(config);
  }
  // A core each where there are enough, and two left for the caller and the driver.
  const int threads = std::clamp(usable_cores() - 2, 1, topo.world());
  for (int i = 0; i < threads; ++i) {
    workers_.push_back(std::make_unique<Worker>());
    for (std::int32_t r = i; r < topo.world(); r += threads) workers_.back()->ranks.push_back(r);
  }
}

GpuNetwork::~GpuNetwork() {
  stop_ = true;
  for (auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
}

void GpuNetwork::start() {
  for (auto& worker : workers_) worker->thread = std::thread([this, w = worker.get()] { run(*w); });
}

Status GpuNetwork::add_operator(std::uint32_t number, std::shared_ptr<const PlanSource> source,
                                const HeapLayout& layout, std::uint64_t start_epoch, std::vector<std::byte*> heaps) {
  const std::lock_guard<std::mutex> lock(mutex_);
  landing_.add_operator(number, source->plan().flag_count(), std::move(heaps));
  for (Rank& r : ranks_) r.proxy->add_operator(number, source.get(), layout, start_epoch);
  sources_.push_back(std::move(source));
  return Ok{};
}

void GpuNetwork::remove_operator(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  landing_.remove_operator(number);
  settle();
}

void GpuNetwork::drop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  landing_.drop();
  dropped_.store(true, std::memory_order_relaxed);
  settle();
}

// Waits until every worker has seen all that this thread has written, and the wire has done all that was queued before.
void GpuNetwork::settle() {
  const std::uint32_t request = ++last_request_;
  // order: what drop() and remove_operator() have written; pairs with look_around().
  request_.store(request, std::memory_order_release);
  for (auto& worker : workers_) {
    MK_CHECK(worker->thread.get_id() != std::this_thread::get_id());
    // order: the worker's last use of a heap, and the wire's, come before the heap is freed; pairs with fulfil().
    while (worker->settled.load(std::memory_order_acquire) != request) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

void GpuNetwork::fulfil(Worker& worker, std::uint32_t request) {
  const Nanos end = steady_now() + kWirePatienceNs;
  for (const std::int32_t r : worker.ranks) {
    if (dropped_.load(std::memory_order_relaxed) && !std::exchange(rank(r).dropped, true)) rank(r).proxy->drop();
    // Stamps may wait for other ranks' copies, but these are in the wire's queues already.
    while (!wire_->idle(r)) {
      const Nanos now = steady_now();
      if (now > end) wire_->abort();
      if (now > end + kWirePatienceNs) break;  // the GPU is lost: its kernels do not even leave
      relax_core();
    }
  }
  worker.settled.store(request, std::memory_order_release);  // order: see settle()
}

void GpuNetwork::fail(Error error) {
  if (options_.on_failure) options_.on_failure(std::move(error));
}

bool GpuNetwork::step_rank(std::int32_t r, Nanos now) {
  Rank& self = rank(r);
  const bool worked = self.proxy->step(now);
  if (self.proxy->failure() && !std::exchange(self.failure_told, true)) {
    const ProxyFailure& failure = *self.proxy->failure();
    fail({failure.own_bug ? ErrorKind::kAborted : ErrorKind::kPeerLost, failure.message()});
  }
  return worked;
}

// What need not be looked at in every step.
void GpuNetwork::look_around(Worker& worker, Nanos now) {
  // order: see settle().
  const std::uint32_t request = request_.load(std::memory_order_acquire);
  if (request != worker.settled.load(std::memory_order_relaxed)) fulfil(worker, request);
  const std::uint32_t wakes = wakes_.load(std::memory_order_relaxed);
  if (wakes != std::exchange(worker.woken, wakes)) {
    worker.worked_at = now;
    for (const std::int32_t r : worker.ranks) wire_->wake(r);
  }
  if (now - worker.polled_at < kPollNs) return;
  worker.polled_at = now;
  if (options_.on_poll) options_.on_poll();
  if (wire_failure_told_.load(std::memory_order_relaxed)) return;
  std::optional<Error> failure = wire_->failure();
  if (failure && !wire_failure_told_.exchange(true)) fail(std::move(*failure));
}

void GpuNetwork::rest(Worker& worker, Nanos now) {
  if (now - worker.worked_at > kSpinNs) {
    Nanos next = kNever;
    for (const std::int32_t r : worker.ranks) next = std::min(next, rank(r).proxy->next_event());
    if (next > now + 2 * kSleepNs) {
      if (next == kNever && now - worker.worked_at > kRestNs) {
        for (const std::int32_t r : worker.ranks) wire_->rest(r);
      }
      std::this_thread::sleep_for(std::chrono::nanoseconds(kSleepNs));
      return;
    }
  }
  relax_core();
}

void GpuNetwork::run(Worker& worker) {
  const int device = gpus_.rank(worker.ranks.front()).device;
  char bus_id[32] = "";
  if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device) == cudaSuccess) stay_near_pci_device(bus_id);
  (void)cudaSetDevice(device);  // the one that the copy engine's calls find already chosen
  // Else the kernel makes sleeps 50 us longer, to save wake-ups.
  (void)prctl(PR_SET_TIMERSLACK, 1'000, 0, 0, 0);
  worker.worked_at = steady_now();
  while (!stop_.load(std::memory_order_relaxed)) {
    bool worked = false;
    Nanos now = 0;
    for (const std::int32_t r : worker.ranks) {
      now = steady_now();
      worked |= step_rank(r, now);
    }
    look_around(worker, now);
    if (worked) {
      worker.worked_at = now;
    } else {
      rest(worker, now);
    }
  }
}

Result<std::unique_ptr<Wire>> create_wire(VirtualGpus& gpus, const CudaNetworkOptions& options) {
  const bool spare = std::all_of(gpus.devices().begin(), gpus.devices().end(),
                                 [&](int device) { return gpus.spare_stream(device) != nullptr; });
  const bool kernel = options.wire == WireKind::kCopyKernel || (options.wire == WireKind::kAuto && spare);
  return kernel ? create_kernel_wire(gpus, options.topo, options.link.unordered)
                : create_engine_wire(gpus, options.topo);
}

}  // namespace

Result<std::unique_ptr<CudaNetwork>> CudaNetwork::create(VirtualGpus& gpus, const CudaNetworkOptions& options) {
  const auto depth = static_cast<std::uint32_t>(options.ring_depth);
  if (options.ring_depth < 1 || !std::has_single_bit(depth) || depth > kMaxRingDepth) {
    return bad_argument(fmt::format("a ring depth of {} is not possible: powers of two up to {} are",
                                    options.ring_depth, kMaxRingDepth));
  }
  Result<GpuRings> rings = GpuRings::create(gpus, options.topo, depth);
  if (!rings) return rings.error();
  Result<std::unique_ptr<Wire>> wire = create_wire(gpus, options);
  if (!wire) return wire.error();
  auto network = std::make_unique<GpuNetwork>(gpus, options, std::move(*rings), std::move(*wire));
  try {
    network->start();
  } catch (const std::system_error& error) {
    return Error{ErrorKind::kOutOfMemory, fmt::format("cannot start the network's threads: {}", error.what())};
  }
  return std::unique_ptr<CudaNetwork>(std::move(network));
}

}  // namespace mkernel
