// The wire by the copy engine: a few calls of the driver per put, about 8 us of host time.
#include <array>
#include <atomic>
#include <vector>

#include "base/check.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/cuda/wire.h"

namespace mkernel {
namespace {

constexpr std::uint32_t kEvents = 128;  // copies of a rank in flight; a stream holds about 1000 commands

class EngineWire final : public Wire {
 public:
  static Result<std::unique_ptr<Wire>> create(VirtualGpus& gpus, const Topology& topo);
  ~EngineWire() override;

  WireKind kind() const override { return WireKind::kCopyEngine; }
  std::uint32_t copy_room(std::int32_t rank) override;
  std::uint32_t stamp_room(std::int32_t) override { return kEvents; }  // a stream that is full waits by itself
  CopyMark copy(std::int32_t rank, std::byte* dst, const std::byte* src, std::int64_t bytes) override;
  CopyMark reached(std::int32_t rank) override { return {rank, lane(rank).copies_done}; }
  void stamp(std::int32_t rank, std::uint32_t* flag, std::uint32_t value, CopyMark after) override;
  bool idle(std::int32_t rank) override;
  void abort() override { aborted_ = true; }
  std::optional<Error> failure() const override;

 private:
  // Two streams, so that a stamp can overtake later copies. Copy number i (from 1) has event i - 1, modulo kEvents.
  struct alignas(128) Lane {
    int device = 0;
    cudaStream_t copies_stream = nullptr;
    cudaStream_t stamps_stream = nullptr;
    std::array<cudaEvent_t, kEvents> events = {};
    std::uint32_t copies = 0;       // queued
    std::uint32_t copies_done = 0;  // as far as we know
  };

  Lane& lane(std::int32_t rank) { return lanes_[static_cast<std::size_t>(rank)]; }
  static cudaError_t open(Lane& lane);
  cudaEvent_t event(CopyMark mark) { return lane(mark.rank).events[(mark.count - 1) % kEvents]; }
  void refresh(Lane& lane);
  void check(cudaError_t status);
  bool dead() const;

  const DriverApi* api_ = nullptr;
  std::vector<Lane> lanes_;  // by rank
  std::atomic<bool> aborted_{false};
  std::atomic<cudaError_t> error_{cudaSuccess};
};

Result<std::unique_ptr<Wire>> EngineWire::create(VirtualGpus& gpus, const Topology& topo) {
  const Result<const DriverApi*> api = driver_api();
  if (!api) return api.error();
  auto wire = std::make_unique<EngineWire>();
  wire->api_ = *api;
  wire->lanes_.resize(static_cast<std::size_t>(topo.world()));
  for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
    Lane& lane = wire->lane(rank);
    lane.device = gpus.rank(rank).device;
    const cudaError_t status = open(lane);
    if (status != cudaSuccess) {
      return cuda_error(status, fmt::format("creating the network's streams of rank {} on GPU {}", rank, lane.device));
    }
  }
  return std::unique_ptr<Wire>(std::move(wire));
}

cudaError_t EngineWire::open(Lane& lane) {
  const DeviceGuard guard(lane.device);
  cudaError_t status = guard.status();
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&lane.copies_stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&lane.stamps_stream, cudaStreamNonBlocking);
  for (cudaEvent_t& event : lane.events) {
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  }
  return status;
}

EngineWire::~EngineWire() {
  // None of these waits; the driver frees them when the GPU is done with them.
  for (Lane& lane : lanes_) {
    const DeviceGuard guard(lane.device);
    for (const cudaEvent_t event : lane.events) {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
    if (lane.copies_stream != nullptr) (void)cudaStreamDestroy(lane.copies_stream);
    if (lane.stamps_stream != nullptr) (void)cudaStreamDestroy(lane.stamps_stream);
  }
}

// order: none needed for both words, they publish nothing.
void EngineWire::check(cudaError_t status) {
  cudaError_t none = cudaSuccess;
  if (status != cudaSuccess) error_.compare_exchange_strong(none, status, std::memory_order_relaxed);
}

bool EngineWire::dead() const {
  return aborted_.load(std::memory_order_relaxed) || error_.load(std::memory_order_relaxed) != cudaSuccess;
}

void EngineWire::refresh(Lane& lane) {
  while (lane.copies_done != lane.copies) {
    const cudaError_t status = cudaEventQuery(lane.events[lane.copies_done % kEvents]);
    if (status == cudaErrorNotReady) return;
    check(status);
    ++lane.copies_done;
  }
}

std::uint32_t EngineWire::copy_room(std::int32_t rank) {
  Lane& to = lane(rank);
  if (to.copies - to.copies_done >= kEvents / 2) refresh(to);
  return kEvents - (to.copies - to.copies_done);
}

CopyMark EngineWire::copy(std::int32_t rank, std::byte* dst, const std::byte* src, std::int64_t bytes) {
  MK_CHECK_OP(bytes, >, 0);
  Lane& to = lane(rank);
  if (dead()) return {rank, to.copies};
  const DeviceGuard guard(to.device);
  // Only networks without order come here without having asked for room: their copies are already due.
  if (to.copies - to.copies_done == kEvents) {
    check(cudaEventSynchronize(to.events[to.copies_done % kEvents]));
    ++to.copies_done;
  }
  check(cudaMemcpyAsync(dst, src, static_cast<std::size_t>(bytes), cudaMemcpyDefault, to.copies_stream));
  check(cudaEventRecord(to.events[to.copies % kEvents], to.copies_stream));
  return {rank, ++to.copies};
}

void EngineWire::stamp(std::int32_t rank, std::uint32_t* flag, std::uint32_t value, CopyMark after) {
  if (dead()) return;
  Lane& to = lane(rank);
  const DeviceGuard guard(to.device);
  bool wait = true;
  if (after.rank == rank) {
    // Mostly the copy is done by now, and asking is cheaper than making the stream wait.
    if (static_cast<std::int32_t>(to.copies_done - after.count) < 0) refresh(to);
    wait = static_cast<std::int32_t>(to.copies_done - after.count) < 0;
  }
  // Another rank's thread may have used the event for a later copy by now: that one comes after the copy meant.
  if (wait && after.count != 0) check(cudaStreamWaitEvent(to.stamps_stream, event(after), 0));
  // order: the copies, complete or waited for above; the write has a fence at system scope before it (its default), and
  // pairs with whoever acquires the stamp.
  const CUresult got = api_->stream_write_value32(to.stamps_stream, reinterpret_cast<CUdeviceptr>(flag), value,
                                                  CU_STREAM_WRITE_VALUE_DEFAULT);
  if (got != CUDA_SUCCESS) check(cudaErrorUnknown);
}

bool EngineWire::idle(std::int32_t rank) {
  Lane& of = lane(rank);
  const DeviceGuard guard(of.device);
  return cudaStreamQuery(of.copies_stream) != cudaErrorNotReady &&
         cudaStreamQuery(of.stamps_stream) != cudaErrorNotReady;
}

std::optional<Error> EngineWire::failure() const {
  const cudaError_t status = error_.load(std::memory_order_relaxed);
  if (status == cudaSuccess) return std::nullopt;
  return cuda_error(status, "moving the network's bytes with the copy engine");
}

}  // namespace

Result<std::unique_ptr<Wire>> create_engine_wire(VirtualGpus& gpus, const Topology& topo) {
  return EngineWire::create(gpus, topo);
}

}  // namespace mkernel
