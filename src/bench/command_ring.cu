#include "bench/command_ring.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "bench/device_tools.h"
#include "exec/cuda/cuda_network.h"
#include "exec/cuda/device_heap.h"
#include "exec/cuda/device_push.cuh"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/cuda/sm90/memory.cuh"
#include "net/record.h"

namespace mkernel::bench {
namespace {

constexpr Topology kTopo{2, 1};
constexpr std::uint32_t kOp = 3;
constexpr int kPings = 1000;
constexpr int kWarmPings = 200;
constexpr std::uint32_t kFlood = 100'000;
constexpr std::uint64_t kPatienceNs = 10'000'000'000;

// In GPU memory; written by kernels, read by the host after them.
struct Times {
  std::uint32_t ticks[kPings] = {};
  std::uint64_t ping_ticks = 0;
  std::uint64_t ping_ns = 0;
  unsigned long long begin_ns = ~0ull;
  unsigned long long end_ns = 0;
  std::uint32_t timeouts = 0;
  std::uint32_t never = 0;  // stays 0
};

// Rank 0's view: how it pushes to rank 1, and where it sees the stamps. Task i stamps flag first + i * step.
struct PushSide {
  DeviceRing ring;
  std::uint32_t* flags = nullptr;
  std::uint32_t flag_count = 0;
  std::uint32_t first_flag = 0;
  std::uint32_t flag_step = 0;
  Times* times = nullptr;

  __device__ bool push(std::uint32_t task, std::uint64_t epoch) const {
    Record record;
    record.op = kOp;
    record.epoch = static_cast<std::uint32_t>(epoch) & 0xff;
    record.task = task;  // the plan has one lane, so that is its send_id()
    if (push_record(ring, encode(record), global_time_ns() + kPatienceNs, &times->never)) return true;
    atomicAdd(&times->timeouts, 1);
    return false;
  }
  __device__ bool await(std::uint32_t task, std::uint64_t epoch) const {
    const std::uint32_t* flag = flags + (epoch & 1) * flag_count + first_flag + std::uint64_t{task} * flag_step;
    const std::uint64_t end = global_time_ns() + kPatienceNs;
    // order: as a receiver would; pairs with the wire's stamp.
    while (!flag_reached(ld_acquire_sys(flag), use_of_epoch(epoch))) {
      if (global_time_ns() < end) continue;
      atomicAdd(&times->timeouts, 1);
      return false;
    }
    return true;
  }
};

// One record after the other, each when the last one's stamp has been seen.
__global__ void ping_kernel(PushSide side) {
  std::uint64_t begin_ns = 0;
  std::int64_t begin = 0;
  for (int i = 0; i < kWarmPings + kPings; ++i) {
    const std::uint64_t epoch = 1 + static_cast<std::uint64_t>(i);
    const std::int64_t start = clock64();
    if (i == kWarmPings) {
      begin = start;
      begin_ns = global_time_ns();
    }
    if (!side.push(0, epoch) || !side.await(0, epoch)) return;
    if (i >= kWarmPings) side.times->ticks[i - kWarmPings] = static_cast<std::uint32_t>(clock64() - start);
  }
  side.times->ping_ticks = static_cast<std::uint64_t>(clock64() - begin);
  side.times->ping_ns = global_time_ns() - begin_ns;
}

__global__ void flood_kernel(PushSide side) {
  const std::uint32_t threads = gridDim.x * blockDim.x;
  const std::uint32_t self = blockIdx.x * blockDim.x + threadIdx.x;
  if (self == 0) atomicMin(&side.times->begin_ns, global_time_ns());
  for (std::uint32_t i = self; i < kFlood; i += threads) {
    if (!side.push(i, 1)) return;
  }
  for (std::uint32_t i = self; i < kFlood; i += threads) {
    if (!side.await(i, 1)) return;
  }
  atomicMax(&side.times->end_ns, global_time_ns());
}

// Sends nothing but stamps.
class EmptyPuts : public PlanSource {
 public:
  EmptyPuts() : PlanSource(Plan(spec())) {}
  static PlanSpec spec() {
    PlanSpec spec;
    spec.op = Op::kGemmReduceScatter;
    spec.topo = kTopo;
    spec.m = 256 * kTopo.world();
    spec.n = 8192;
    spec.k = 16;
    spec.tiling = {1, 16, 1, 1, 1, 1};  // 131072 chunks per pair of nodes
    return spec;
  }
  Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const override {
    Task task = PlanSource::task(rank, role, lane, index);
    if (role == Role::kSend) task.length = 0;
    return task;
  }
};

// A network with fresh flags and counters.
class Side {
 public:
  static Result<std::unique_ptr<Side>> create(VirtualGpus& gpus, WireKind wire);
  // Launches, waits, and returns what the kernel wrote.
  template <class Kernel>
  Result<Times> run(Kernel kernel, unsigned blocks, unsigned threads);

 private:
  VirtualGpus* gpus_ = nullptr;
  std::shared_ptr<EmptyPuts> source_ = std::make_shared<EmptyPuts>();
  std::vector<DeviceHeap> heaps_;  // by rank, then the times
  std::unique_ptr<CudaNetwork> network_;
  PushSide side_;
};

Result<std::unique_ptr<Side>> Side::create(VirtualGpus& gpus, WireKind wire) {
  auto made = std::make_unique<Side>();
  made->gpus_ = &gpus;
  const HeapLayout layout(made->source_->plan());
  std::vector<std::byte*> heaps;
  for (const std::int64_t bytes : {layout.bytes(), layout.bytes(), static_cast<std::int64_t>(sizeof(Times))}) {
    Result<DeviceHeap> heap = DeviceHeap::create(gpus.devices().front(), bytes, gpus.devices());
    if (!heap.ok()) return heap.error();
    heaps.push_back(heap->data());
    made->heaps_.push_back(std::move(*heap));
  }
  PushSide& side = made->side_;
  side.times = reinterpret_cast<Times*>(heaps.back());
  heaps.pop_back();
  CudaNetworkOptions options;
  options.topo = kTopo;
  options.wire = wire;
  Result<std::unique_ptr<CudaNetwork>> network = CudaNetwork::create(gpus, options);
  if (!network.ok()) return network.error();
  made->network_ = std::move(*network);
  if (Status added = made->network_->add_operator(kOp, made->source_, layout, 1, heaps); !added.ok()) {
    return added.error();
  }
  const cudaStream_t stream = gpus.rank(0).stream;
  const Times fresh;
  cudaError_t status =
      cudaMemcpyAsync(&side.ring, made->network_->rings(0) + 1, sizeof(DeviceRing), cudaMemcpyDeviceToHost, stream);
  if (status == cudaSuccess) {
    status = cudaMemcpyAsync(side.times, &fresh, sizeof(fresh), cudaMemcpyHostToDevice, stream);
  }
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (status != cudaSuccess) return cuda_error(status, "preparing the command ring");
  side.flags = reinterpret_cast<std::uint32_t*>(heaps[1]);
  side.flag_count = made->source_->plan().flag_count();
  side.first_flag = made->source_->task(0, Role::kSend, 0, 0).signals[0].flag;
  side.flag_step = made->source_->task(0, Role::kSend, 0, 1).signals[0].flag - side.first_flag;
  return Result<std::unique_ptr<Side>>(std::move(made));
}

template <class Kernel>
Result<Times> Side::run(Kernel kernel, unsigned blocks, unsigned threads) {
  const cudaStream_t stream = gpus_->rank(0).stream;
  network_->wake();
  kernel<<<blocks, threads, 0, stream>>>(side_);
  Times times;
  cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) {
    status = cudaMemcpyAsync(&times, side_.times, sizeof(times), cudaMemcpyDeviceToHost, stream);
  }
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (status != cudaSuccess) return cuda_error(status, "timing the command ring");
  if (times.timeouts != 0) return Error{ErrorKind::kTimeout, "a record was not taken, or its stamp not seen, in time"};
  return times;
}

Status measure_once(VirtualGpus& gpus, WireKind wire, RingResult& result) {
  {
    Result<std::unique_ptr<Side>> side = Side::create(gpus, wire);
    if (!side.ok()) return side.error();
    const Result<Times> times = (*side)->run(ping_kernel, 1, 1);
    if (!times.ok()) return times.error();
    const double us_per_tick = static_cast<double>(times->ping_ns) / static_cast<double>(times->ping_ticks) * 1e-3;
    std::vector<std::uint32_t> ticks(times->ticks, times->ticks + kPings);
    std::sort(ticks.begin(), ticks.end());
    result.round_trip_us.push_back(ticks[kPings / 2] * us_per_tick);
    result.p99_us.push_back(ticks[kPings * 99 / 100] * us_per_tick);
  }
  Result<std::unique_ptr<Side>> side = Side::create(gpus, wire);
  if (!side.ok()) return side.error();
  const Result<Times> times = (*side)->run(flood_kernel, 16, 32);
  if (!times.ok()) return times.error();
  result.records_per_us.push_back(kFlood * 1e3 / static_cast<double>(times->end_ns - times->begin_ns));
  return Ok{};
}

}  // namespace

Result<std::vector<RingResult>> measure_command_ring(const RingOptions& options, Machine& machine) {
  VirtualGpuOptions gpu_options;
  gpu_options.topo = kTopo;
  gpu_options.spare_sms = 4;  // for the copy kernel
  Result<std::unique_ptr<VirtualGpus>> gpus = VirtualGpus::create(gpu_options);
  if (!gpus.ok()) return gpus.error();
  Result<Machine> described = describe_machine();
  if (!described.ok()) return described.error();
  machine = *described;
  std::vector<RingResult> results;
  for (const auto& [wire, name] :
       {std::pair{WireKind::kCopyKernel, "copy kernel"}, {WireKind::kCopyEngine, "copy engine"}}) {
    if (wire == WireKind::kCopyKernel && (*gpus)->spare_stream((*gpus)->devices().front()) == nullptr) continue;
    RingResult& result = results.emplace_back();
    result.wire = name;
    for (int round = 0; round < options.rounds; ++round) {
      if (Status status = measure_once(**gpus, wire, result); !status.ok()) return status.error();
    }
  }
  return results;
}

}  // namespace mkernel::bench
