// The wire as a persistent kernel: the host's side of wire_kernel.h.
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "exec/cuda/device_heap.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/cuda/pinned_memory.h"
#include "exec/cuda/wire.h"
#include "exec/cuda/wire_kernel.h"
#include "exec/host/doorbell.h"
#include "net/ring.h"

namespace mkernel {
namespace {

// How long the GPU may make no progress before we take it for dead. A copy of 2 GB takes a tenth of it.
constexpr Nanos kPatienceNs = 2'000'000'000;

class KernelWire final : public Wire {
 public:
  static Result<std::unique_ptr<Wire>> create(VirtualGpus& gpus, const Topology& topo, bool cross_rank);
  ~KernelWire() override;

  WireKind kind() const override { return WireKind::kCopyKernel; }
  std::uint32_t copy_room(std::int32_t rank) override;
  std::uint32_t stamp_room(std::int32_t rank) override;
  CopyMark copy(std::int32_t rank, std::byte* dst, const std::byte* src, std::int64_t bytes) override;
  CopyMark reached(std::int32_t rank) override { return {rank, lane(rank).copies_done}; }
  void stamp(std::int32_t rank, std::uint32_t* flag, std::uint32_t value, CopyMark after) override;
  void rest(std::int32_t rank) override;
  void wake(std::int32_t rank) override;
  bool idle(std::int32_t rank) override;
  void abort() override;
  std::optional<Error> failure() const override;

 private:
  struct Kernel {
    int device = 0;
    cudaStream_t stream = nullptr;
    std::vector<std::int32_t> ranks;  // by CTA
    std::uint32_t stages = 0;
    std::mutex mutex;  // guards the next two, and the lanes that rest
    int awake = 0;     // lanes that do not rest
    bool running = false;
  };
  // The proxy's side of a mailbox; only the rank's proxy thread touches it while it does not rest. Counts wrap.
  struct alignas(128) Lane {
    WireMailbox* mailbox = nullptr;
    Kernel* kernel = nullptr;
    bool resting = true;
    std::uint32_t position = 0;  // commands queued
    std::uint32_t copies = 0;    // queued
    std::uint32_t stamps = 0;
    std::uint32_t copies_done = 0;  // as far as we know
    std::uint32_t stamps_done = 0;

    bool done() const { return copies == copies_done && stamps == stamps_done; }
  };

  Lane& lane(std::int32_t rank) { return lanes_[static_cast<std::size_t>(rank)]; }
  Status prepare(VirtualGpus& gpus, const Topology& topo, int device);
  void start(Kernel& kernel);
  void stop(Kernel& kernel);
  static void refresh(Lane& lane);
  static void push(Lane& lane, const WireCommand& command);
  template <class Room>
  bool make_ready(Lane& lane, Room has_room);
  static bool ended(const Kernel& kernel);
  static bool wait_for_end(const Kernel& kernel);

  std::vector<Lane> lanes_;  // by rank
  PinnedMemory mailboxes_;
  DeviceHeap copied_;                             // see WireArguments; empty unless stamps may wait for other ranks
  std::vector<std::unique_ptr<Kernel>> kernels_;  // by device
  // order: none needed for these three, which publish nothing.
  std::atomic<bool> aborted_{false};
  std::atomic<bool> stuck_{false};  // the GPU does not react, or a launch has failed
  std::atomic<cudaError_t> launch_error_{cudaSuccess};
};

Result<std::unique_ptr<Wire>> KernelWire::create(VirtualGpus& gpus, const Topology& topo, bool cross_rank) {
  auto wire = std::make_unique<KernelWire>();
  const auto world = static_cast<std::size_t>(topo.world());
  Result<PinnedMemory> mailboxes = PinnedMemory::create(world * sizeof(WireMailbox));
  if (!mailboxes) return mailboxes.error();
  wire->mailboxes_ = std::move(*mailboxes);
  wire->lanes_.resize(world);
  for (std::size_t rank = 0; rank < world; ++rank) {
    wire->lanes_[rank].mailbox = reinterpret_cast<WireMailbox*>(wire->mailboxes_.host()) + rank;
  }
  if (cross_rank) {
    const auto bytes = static_cast<std::int64_t>(world * kCopiedStride * sizeof(std::uint32_t));
    Result<DeviceHeap> copied = DeviceHeap::create(gpus.devices().front(), bytes, gpus.devices());
    if (!copied) return copied.error();
    wire->copied_ = std::move(*copied);
  }
  for (const int device : gpus.devices()) {
    const Status prepared = wire->prepare(gpus, topo, device);
    if (!prepared) return prepared.error();
  }
  return std::unique_ptr<Wire>(std::move(wire));
}

Status KernelWire::prepare(VirtualGpus& gpus, const Topology& topo, int device) {
  auto kernel = std::make_unique<Kernel>();
  kernel->device = device;
  kernel->stream = gpus.spare_stream(device);
  if (kernel->stream == nullptr) {
    return Error{
        ErrorKind::kUnsupported,
        fmt::format("the network's copy kernel needs SMs of GPU {} that no rank owns: give the ranks fewer SMs, "
                    "or let the copy engine move the bytes",
                    device)};
  }
  for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
    if (gpus.rank(rank).device != device) continue;
    kernel->ranks.push_back(rank);
    lane(rank).kernel = kernel.get();
  }
  const int ranks = static_cast<int>(kernel->ranks.size());
  const int sms = gpus.spare_sms(device);
  const DeviceGuard guard(device);
  cudaError_t status = guard.status();
  if (status == cudaSuccess) status = prepare_wire_kernel(ranks, sms, kernel->stages);
  if (status == cudaErrorLaunchOutOfResources) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("the network's copy kernel for {} ranks does not fit on the {} spare SMs of GPU {}", ranks,
                             sms, device)};
  }
  if (status != cudaSuccess) return cuda_error(status, fmt::format("preparing the network's kernel on GPU {}", device));
  kernels_.push_back(std::move(kernel));
  return Ok{};
}

KernelWire::~KernelWire() {
  // The proxies' threads have ended, so the lanes are ours.
  bool all_ended = true;
  for (const auto& kernel : kernels_) {
    if (kernel->running && !aborted_) stop(*kernel);
    all_ended &= wait_for_end(*kernel);
  }
  if (!all_ended) {
    abort();
    all_ended = true;
    for (const auto& kernel : kernels_) all_ended &= wait_for_end(*kernel);
  }
  if (!all_ended) mailboxes_.leak();
}

// With the kernel's mutex. The stream keeps kernels apart, so the last one may still be leaving.
void KernelWire::start(Kernel& kernel) {
  WireArguments arguments;
  for (std::size_t i = 0; i < kernel.ranks.size(); ++i) {
    const Lane& of = lane(kernel.ranks[i]);
    arguments.lanes[i] = {mailboxes_.on_gpu(of.mailbox), static_cast<std::uint32_t>(kernel.ranks[i]), of.position,
                          of.copies, of.stamps};
  }
  arguments.copied = reinterpret_cast<std::uint32_t*>(copied_.data());
  arguments.stages = kernel.stages;
  const DeviceGuard guard(kernel.device);
  const cudaError_t status = launch_wire_kernel(arguments, static_cast<int>(kernel.ranks.size()), kernel.stream);
  kernel.running = status == cudaSuccess;
  if (kernel.running) return;
  launch_error_.store(status, std::memory_order_relaxed);
  stuck_.store(true, std::memory_order_relaxed);
}

// With the kernel's mutex, while all its lanes rest, so that their rings have no other producer.
void KernelWire::stop(Kernel& kernel) {
  for (const std::int32_t rank : kernel.ranks) push(lane(rank), {.verb = WireVerb::kStop});
  kernel.running = false;
}

void KernelWire::rest(std::int32_t rank) {
  Lane& of = lane(rank);
  if (of.resting) return;
  refresh(of);
  if (!of.done()) return;
  const std::lock_guard<std::mutex> lock(of.kernel->mutex);
  of.resting = true;
  if (--of.kernel->awake == 0 && of.kernel->running) stop(*of.kernel);
}

void KernelWire::wake(std::int32_t rank) {
  Lane& of = lane(rank);
  if (!of.resting || aborted_.load(std::memory_order_relaxed) || stuck_.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(of.kernel->mutex);
  of.resting = false;
  ++of.kernel->awake;
  if (!of.kernel->running) start(*of.kernel);
}

bool KernelWire::ended(const Kernel& kernel) {
  const DeviceGuard guard(kernel.device);
  return cudaStreamQuery(kernel.stream) != cudaErrorNotReady;
}

// Asks instead of synchronising, for a kernel that hangs must not make us hang.
bool KernelWire::wait_for_end(const Kernel& kernel) {
  const Nanos end = steady_now() + kPatienceNs;
  while (!ended(kernel)) {
    if (steady_now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

void KernelWire::refresh(Lane& lane) {
  // order: the GPU's accesses of what is done come before whatever we do with that memory; pairs with
  // Poller::tell_thread().
  const std::uint64_t done = std::atomic_ref<std::uint64_t>(lane.mailbox->done).load(std::memory_order_acquire);
  lane.copies_done = static_cast<std::uint32_t>(done);
  lane.stamps_done = static_cast<std::uint32_t>(done >> 32);
}

void KernelWire::push(Lane& lane, const WireCommand& command) {
  const std::uint32_t slot = lane.position % kWireCommands;
  const WireWords words = wire_words(command, ring_lap(lane.position, kWireCommandsLog2));
  for (int i = 0; i < 4; ++i) {
    // order: what this thread has acquired, above all the bytes to be copied; pairs with Poller::poll_warp(), which
    // takes the command when it has seen all four words.
    std::atomic_ref<std::uint64_t>(lane.mailbox->commands[slot].word[i])
        .store(words.word[i], std::memory_order_release);
  }
  ++lane.position;
}

std::uint32_t KernelWire::copy_room(std::int32_t rank) {
  Lane& to = lane(rank);
  // The GPU's counts are read only when they matter: each time they have changed, that is a cache miss.
  if (to.copies - to.copies_done >= kWireDepth / 2) refresh(to);
  return kWireDepth - (to.copies - to.copies_done);
}

std::uint32_t KernelWire::stamp_room(std::int32_t rank) {
  Lane& to = lane(rank);
  if (to.stamps - to.stamps_done >= kWireDepth / 2) refresh(to);
  return kWireDepth - (to.stamps - to.stamps_done);
}

// Waits until `has_room()`; false when the wire is dead.
template <class Room>
bool KernelWire::make_ready(Lane& lane, Room has_room) {
  if (aborted_.load(std::memory_order_relaxed) || stuck_.load(std::memory_order_relaxed)) return false;
  if (has_room()) return true;
  Nanos end = steady_now() + kPatienceNs;
  while (steady_now() < end && !aborted_.load(std::memory_order_relaxed)) {
    const std::uint64_t before = done_word(lane.copies_done, lane.stamps_done);
    refresh(lane);
    if (has_room()) return true;
    if (done_word(lane.copies_done, lane.stamps_done) != before) end = steady_now() + kPatienceNs;
  }
  if (!aborted_.load(std::memory_order_relaxed)) stuck_.store(true, std::memory_order_relaxed);
  return false;
}

CopyMark KernelWire::copy(std::int32_t rank, std::byte* dst, const std::byte* src, std::int64_t bytes) {
  MK_CHECK_OP(bytes, >, 0);
  Lane& to = lane(rank);
  if (to.resting) wake(rank);
  if (!make_ready(to, [&] { return to.copies - to.copies_done < kWireDepth; })) return {rank, to.copies};
  WireCommand command;
  command.verb = WireVerb::kCopy;
  command.address = reinterpret_cast<std::uint64_t>(dst);
  command.source = reinterpret_cast<std::uint64_t>(src);
  command.bytes = static_cast<std::uint64_t>(bytes);
  MK_CHECK_OP((command.address | command.source | command.bytes) >> 56, ==, 0u);
  push(to, command);
  return {rank, ++to.copies};
}

void KernelWire::stamp(std::int32_t rank, std::uint32_t* flag, std::uint32_t value, CopyMark after) {
  MK_CHECK(after.rank == rank || copied_.data() != nullptr);
  Lane& to = lane(rank);
  if (to.resting) wake(rank);
  if (!make_ready(to, [&] { return to.stamps - to.stamps_done < kWireDepth; })) return;
  WireCommand command;
  command.verb = WireVerb::kStamp;
  command.rank = static_cast<std::uint32_t>(after.rank);
  command.address = reinterpret_cast<std::uint64_t>(flag);
  command.value = value;
  command.count = after.count;
  push(to, command);
  ++to.stamps;
}

bool KernelWire::idle(std::int32_t rank) {
  Lane& of = lane(rank);
  refresh(of);
  if (of.done()) return true;
  return (aborted_.load(std::memory_order_relaxed) || stuck_.load(std::memory_order_relaxed)) && ended(*of.kernel);
}

void KernelWire::abort() {
  aborted_ = true;
  for (const Lane& lane : lanes_) {
    // order: none needed, it publishes nothing.
    std::atomic_ref<std::uint64_t>(lane.mailbox->leave).store(1, std::memory_order_relaxed);
  }
}

std::optional<Error> KernelWire::failure() const {
  if (!stuck_.load(std::memory_order_relaxed)) return std::nullopt;
  cudaError_t status = launch_error_.load(std::memory_order_relaxed);
  for (const auto& kernel : kernels_) {
    const DeviceGuard guard(kernel->device);
    if (status == cudaSuccess) status = cudaStreamQuery(kernel->stream);
    if (status == cudaErrorNotReady) status = cudaSuccess;
  }
  if (status != cudaSuccess) return cuda_error(status, "the network's copy kernel");
  return Error{ErrorKind::kAborted,
               fmt::format("the network's copy kernel has done nothing for {} seconds", kPatienceNs / 1'000'000'000)};
}

}  // namespace

Result<std::unique_ptr<Wire>> create_kernel_wire(VirtualGpus& gpus, const Topology& topo, bool cross_rank) {
  return KernelWire::create(gpus, topo, cross_rank);
}

}  // namespace mkernel
