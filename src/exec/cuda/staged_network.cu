#include "exec/cuda/staged_network.h"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "exec/cuda/cpu_affinity.h"
#include "exec/cuda/format.h"
#include "exec/cuda/gpu_rings.h"
#include "exec/cuda/staging.h"
#include "exec/host/doorbell.h"
#include "net/proxy.h"

namespace mkernel {
namespace {

constexpr Nanos kSpinNs = 2'000'000;  // without work, before the thread sleeps between looks
constexpr Nanos kSleepNs = 45'000;
// A process that fails leaves, and its peers' puts to it fail then. For so long whoever watches the processes may say
// who was the first, before we blame the one whose connection broke.
constexpr Nanos kBlameAfterNs = 1'000'000'000;

// Takes puts at once, and hands them to the network in the same order when their bytes are in the mirror.
class StagedEndpoint final : public Endpoint {
 public:
  StagedEndpoint(ProcessEndpoint* inner, Staging* staging) : inner_(inner), staging_(staging) {}

  PostStatus post(const Put& put, Nanos) override {
    if (count_ == Staging::kEvents) return PostStatus::kFull;
    const int slot = (first_ + count_) % Staging::kEvents;
    puts_[static_cast<std::size_t>(slot)] = put;
    staging_->copy_out(put, slot);
    ++count_;
    return PostStatus::kPosted;
  }

  int poll(Nanos now, std::span<TransportEvent> events) override {
    int filled = 0;
    while (count_ > 0 && filled < static_cast<int>(events.size()) && staging_->done(first_)) {
      const Put& put = puts_[static_cast<std::size_t>(first_)];
      const PostStatus status = inner_->post(put, now);
      if (status == PostStatus::kAgain || status == PostStatus::kFull) break;
      if (status == PostStatus::kFatal) {
        events[static_cast<std::size_t>(filled++)] = {EventKind::kFailed, put.dst_rank, put.id, put.op,
                                                      put.epoch,          put.flag};
      }
      first_ = (first_ + 1) % Staging::kEvents;
      --count_;
    }
    last_poll_ = now;
    inner_->flush(now);
    return filled + inner_->poll(now, events.subspan(static_cast<std::size_t>(filled)));
  }

  Nanos next_event() const override { return count_ > 0 ? last_poll_ : inner_->next_event(); }
  int arrivals_per_put() const override { return inner_->arrivals_per_put(); }
  void forget() { count_ = 0; }

 private:
  ProcessEndpoint* inner_;
  Staging* staging_;
  std::array<Put, Staging::kEvents> puts_;
  int first_ = 0;
  int count_ = 0;
  Nanos last_poll_ = 0;
};

// Arrivals are in the mirror, whether the network has written the stamp there itself or the proxy has counted.
class StagedLanding final : public Landing {
 public:
  explicit StagedLanding(Staging* staging) : staging_(staging) {}

  void land(const Put&, std::int64_t, std::int64_t) override { MK_CHECK(false); }  // only networks of one process do
  void stamp(std::int32_t, std::uint32_t op, std::int64_t flag, std::uint32_t value) override {
    if (staging_->heap(op) != nullptr) staging_->copy_in(op, flag, value);
  }
  void stamped(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override {
    stamp(rank, op, flag, value);
  }

 private:
  Staging* staging_;
};

class StagedNetwork final : public DeviceNetwork {
 public:
  StagedNetwork(const DriverApi* api, int device, GpuRings rings, const StagedNetworkOptions& options);
  ~StagedNetwork() override;
  // Throws std::system_error when the system has no more threads.
  Status start();

  Status add_operator(std::uint32_t number, std::shared_ptr<const PlanSource> source, const HeapLayout& layout,
                      std::uint64_t start_epoch, std::vector<std::byte*> heaps) override;
  void remove_operator(std::uint32_t number) override;
  HeapMemory open_heap(std::uint32_t number) override;
  void wake() override { woken_.store(true, std::memory_order_relaxed); }  // order: none, it publishes nothing
  const DeviceRing* rings(std::int32_t rank) const override { return rings_.table(rank); }
  std::int64_t operator_bytes(std::uint32_t number) const override { return options_.endpoint->bytes_sent(number); }
  void drop() override;

 private:
  // Excludes the thread's steps while it lives.
  class Pause {
   public:
    explicit Pause(StagedNetwork& network) : network_(network) {
      ++network_.pauses_;
      lock_ = std::unique_lock<std::mutex>(network_.mutex_);
    }
    ~Pause() { --network_.pauses_; }

   private:
    StagedNetwork& network_;
    std::unique_lock<std::mutex> lock_;
  };

  void run();
  bool step(Nanos now);
  void report(const ProxyFailure& failure, Nanos now);
  void fail(Error error);

  const StagedNetworkOptions options_;
  const int device_;
  GpuRings rings_;
  Staging staging_;
  StagedEndpoint endpoint_;
  StagedLanding landing_;
  std::unique_ptr<Proxy> proxy_;
  std::vector<std::shared_ptr<const PlanSource>> sources_;  // the proxy knows them as long as it lives
  std::mutex mutex_;  // guards all of the above; the thread holds it while it steps
  bool dropped_ = false;
  bool failure_told_ = false;
  Nanos lost_since_ = kNever;
  std::atomic<int> pauses_{0};  // threads that wait for mutex_: the thread lets them
  std::atomic<bool> woken_{false};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

StagedNetwork::StagedNetwork(const DriverApi* api, int device, GpuRings rings, const StagedNetworkOptions& options)
    : options_(options),
      device_(device),
      rings_(std::move(rings)),
      staging_(api, device),
      endpoint_(options.endpoint, &staging_),
      landing_(&staging_) {
  ProxyConfig config;
  config.rank = options.rank;
  config.topo = options.topo;
  for (std::int32_t node = 0; node < options.topo.nodes; ++node) {
    config.rings.push_back(rings_.ring(options.rank, node));
  }
  config.endpoint = &endpoint_;
  config.landing = &landing_;
  config.max_post_failures_ns = options.max_post_failures_ns;
  proxy_ = std::make_unique<Proxy>(config);
}

StagedNetwork::~StagedNetwork() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

Status StagedNetwork::start() {
  if (Status status = staging_.open(); !status.ok()) return status;
  thread_ = std::thread([this] { run(); });
  return Ok{};
}

Status StagedNetwork::add_operator(std::uint32_t number, std::shared_ptr<const PlanSource> source,
                                   const HeapLayout& layout, std::uint64_t start_epoch, std::vector<std::byte*> heaps) {
  const std::int32_t rank = options_.rank;
  auto heap = StagedHeap::create(*source, layout, rank, heaps[static_cast<std::size_t>(rank)]);
  if (!heap.ok()) return heap.error();
  const Pause pause(*this);
  staging_.set_heap(number, std::move(*heap));
  proxy_->add_operator(number, source.get(), layout, start_epoch);
  sources_.push_back(std::move(source));
  return Ok{};
}

void StagedNetwork::remove_operator(std::uint32_t number) {
  const Pause pause(*this);
  const DeviceGuard guard(device_);
  staging_.settle();
  options_.endpoint->remove_heap(number);
  staging_.set_heap(number, nullptr);
}

HeapMemory StagedNetwork::open_heap(std::uint32_t number) {
  const Pause pause(*this);
  const StagedHeap& heap = *staging_.heap(number);
  return {heap.mirror.host(), heap.bytes};
}

void StagedNetwork::drop() {
  const Pause pause(*this);
  const DeviceGuard guard(device_);
  dropped_ = true;
  proxy_->drop();
  endpoint_.forget();
  staging_.settle();
}

void StagedNetwork::fail(Error error) {
  if (!std::exchange(failure_told_, true) && options_.on_failure) options_.on_failure(std::move(error));
}

void StagedNetwork::report(const ProxyFailure& failure, Nanos now) {
  if (failure.own_bug) return fail({ErrorKind::kAborted, failure.message()});
  lost_since_ = std::min(lost_since_, now);
  if (now - lost_since_ < kBlameAfterNs) return;
  const std::string cause = options_.endpoint->last_error();
  fail({ErrorKind::kPeerLost, cause.empty()
                                  ? failure.message()
                                  : fmt::format("{}: {}: {}", failure.message(), options_.endpoint->name(), cause)});
}

bool StagedNetwork::step(Nanos now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (dropped_) return false;
  const bool worked = proxy_->step(now);
  if (proxy_->failure()) report(*proxy_->failure(), now);
  if (std::optional<Error> failure = staging_.failure()) fail(std::move(*failure));
  return worked;
}

void StagedNetwork::run() {
  char bus_id[32] = "";
  if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device_) == cudaSuccess) stay_near_pci_device(bus_id);
  (void)cudaSetDevice(device_);
  // Else the kernel makes sleeps 50 us longer, to save wake-ups.
  (void)prctl(PR_SET_TIMERSLACK, 1'000, 0, 0, 0);
  Nanos worked_at = steady_now();
  while (!stop_.load(std::memory_order_relaxed)) {
    const Nanos now = steady_now();
    // order: none, see wake().
    if (step(now) || woken_.exchange(false, std::memory_order_relaxed)) worked_at = now;
    if (now - worked_at > kSpinNs || pauses_.load(std::memory_order_relaxed) > 0) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kSleepNs));
    }
  }
}

}  // namespace

Result<std::unique_ptr<DeviceNetwork>> create_staged_network(VirtualGpus& gpus, const StagedNetworkOptions& options) {
  const Result<const DriverApi*> api = driver_api();
  if (!api) return api.error();
  Result<GpuRings> rings = GpuRings::create(gpus, options.topo, static_cast<std::uint32_t>(options.ring_depth));
  if (!rings) return rings.error();
  auto network = std::make_unique<StagedNetwork>(*api, gpus.rank(options.rank).device, std::move(*rings), options);
  try {
    if (Status status = network->start(); !status.ok()) return status.error();
  } catch (const std::system_error& error) {
    return Error{ErrorKind::kOutOfMemory, fmt::format("cannot start the network's thread: {}", error.what())};
  }
  return std::unique_ptr<DeviceNetwork>(std::move(network));
}

}  // namespace mkernel
