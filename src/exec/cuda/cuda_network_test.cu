// The network of GPU ranks: bytes are right when the stamp is seen, for any size, wire and ring depth, with and without
// order; nothing arrives after drop(). Exit code 0 when all is well, 1 with a sentence when not, 77 (skipped) where
// there is no GPU for it.
#include <algorithm>
#include <thread>

#include "exec/cuda/device_push.cuh"
#include "exec/cuda/test_bench.cuh"
#include "exec/host/doorbell.h"
#include "net/record.h"

namespace {

using namespace mkernel;

constexpr std::uint32_t kOp = 5;

// What a kernel needs to push records to one node, and to see their stamps: task i stamps flag first + i * step.
struct PushSide {
  const DeviceRing* rings = nullptr;
  std::int32_t node = 0;
  std::uint32_t* flags = nullptr;  // of the destination
  std::uint32_t flag_count = 0;
  std::uint32_t first_flag = 0;
  std::uint32_t flag_step = 0;
  Verdict* verdict = nullptr;

  __device__ std::uint32_t* flag(std::uint32_t task, std::uint64_t epoch) const {
    return flags + (epoch & 1) * flag_count + first_flag + std::uint64_t{task} * flag_step;
  }
};

// As the persistent kernel does it. False after a timeout.
__device__ inline bool push_thread(const PushSide& side, std::uint32_t task, std::uint64_t epoch) {
  Record record;
  record.op = kOp;
  record.epoch = static_cast<std::uint32_t>(epoch) & 0xff;
  record.task = task;  // the plan has one lane, so that is its send_id()
  if (push_record(side.rings[side.node], encode(record), global_time_ns() + kPatience, &side.verdict->never)) {
    return true;
  }
  atomicAdd_system(&side.verdict->timeouts, 1);
  return false;
}

__global__ void push_kernel(PushSide side, std::uint32_t task, std::uint64_t epoch) { push_thread(side, task, epoch); }

// All threads push their share of tasks [first, first + count) of epoch 1, then wait for the stamps and compare the
// element that each has brought.
__global__ void flood_kernel(PushSide side, std::uint32_t first, std::uint32_t count, const std::byte* p,
                             std::uint32_t seed) {
  const std::uint32_t threads = gridDim.x * blockDim.x;
  const std::uint32_t self = blockIdx.x * blockDim.x + threadIdx.x;
  for (std::uint32_t i = self; i < count; i += threads) {
    if (!push_thread(side, first + i, 1)) return;
  }
  std::uint32_t wrong = 0;
  for (std::uint32_t i = self; i < count; i += threads) {
    if (!await_thread(side.flag(first + i, 1), 1, side.verdict)) return;
    for (std::int64_t b = 2 * std::int64_t{i}; b < 2 * std::int64_t{i} + 2; ++b) {
      wrong += p[b] != static_cast<std::byte>(pattern(seed, b));
    }
  }
  if (wrong > 0) atomicAdd_system(&side.verdict->wrong, wrong);
}

// Sends what the test wants instead of what the plan says: task i moves one element, or nothing, or what `sizes` says.
class TestSource : public PlanSource {
 public:
  TestSource(const Topology& topo, bool empty) : PlanSource(Plan(spec_of(topo))), empty_(empty) {}
  static PlanSpec spec_of(const Topology& topo) {
    PlanSpec spec;
    spec.op = Op::kGemmReduceScatter;
    spec.topo = topo;
    spec.m = 256 * topo.world();
    spec.n = 8192;
    spec.k = 16;
    spec.tiling = {1, 16, 1, 1, 1, 1};  // 131072 chunks of 16 elements per pair of nodes
    return spec;
  }
  static constexpr std::int64_t kSizes[] = {0, 1, 7, 8, 32'768, 524'288, 1'000'003};  // elements of the first tasks
  static constexpr std::int64_t kSpecial = 7;

  Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const override {
    Task task = PlanSource::task(rank, role, lane, index);
    if (role != Role::kSend) return task;
    const bool special = index < kSpecial && !empty_;
    task.length = empty_ ? 0 : special ? kSizes[index] : 1;
    task.src_offset = special ? 8 + index : kSpecial + 2'000 + index;
    task.dst_offset = special ? 3 * index : 1'500'000 + index;
    return task;
  }

 private:
  bool empty_;
};

// A world that sends from rank r to rank (r + W/2) % W.
struct World {
  Bench& bench;
  std::shared_ptr<TestSource> source;
  HeapLayout layout;
  std::unique_ptr<CudaNetwork> network;

  World(Bench& b, WireKind wire, int ring_depth, const LinkModel& link, bool empty)
      : bench(b), source(std::make_shared<TestSource>(b.topo, empty)), layout(source->plan()) {
    bench.allocate(layout.bytes());
    CudaNetworkOptions options;
    options.topo = bench.topo;
    options.link = link;
    options.ring_depth = ring_depth;
    options.wire = wire;
    options.on_failure = [](Error error) { give_up("the network has failed: " + error.message); };
    network = take(CudaNetwork::create(*bench.gpus, options));
    if (network->wire() != wire) give_up("another wire than the one asked for");
    std::vector<std::byte*> heaps;
    for (std::int32_t rank = 0; rank < bench.topo.world(); ++rank) heaps.push_back(bench.heap(rank));
    MK_CHECK(network->add_operator(kOp, source, layout, 1, heaps).ok());
  }
  std::int32_t peer(std::int32_t rank) const { return (rank + bench.topo.world() / 2) % bench.topo.world(); }

  // What kernels on `rank` need to push to its peer, and to see what arrives there.
  PushSide side(std::int32_t rank) const {
    const Task task = source->task(rank, Role::kSend, 0, 0);
    PushSide side;
    side.rings = network->rings(rank);
    side.node = bench.topo.node_of(peer(rank));
    side.flags = reinterpret_cast<std::uint32_t*>(bench.heap(peer(rank)));
    side.flag_count = source->plan().flag_count();
    side.first_flag = task.signals[0].flag;
    side.flag_step = source->task(rank, Role::kSend, 0, 1).signals[0].flag - side.first_flag;
    side.verdict = bench.verdict;
    return side;
  }
  std::byte* address(std::int32_t rank, Buffer buffer, std::int64_t element, std::uint64_t epoch) const {
    return bench.heap(rank) + layout.offset(buffer, element, epoch);
  }
};

void check_sizes(Bench& bench, WireKind kind, bool unordered) {
  LinkModel link;
  link.bytes_per_ns = 10;
  link.latency_ns = 5'000;
  if (unordered) {
    link.unordered = true;
    link.pieces = 3;
    link.jitter_ns = 20'000;
  }
  World world(bench, kind, 256, link, false);
  for (std::uint64_t epoch = 1; epoch <= 2; ++epoch) {
    for (std::int64_t i = 0; i < TestSource::kSpecial; ++i) {
      const auto seed = [&](std::int32_t rank) { return static_cast<std::uint32_t>(100 * epoch + 10 * i + rank); };
      const auto task = [&](std::int32_t rank) { return world.source->task(rank, Role::kSend, 0, i); };
      for (std::int32_t rank = 0; rank < bench.topo.world(); ++rank) {
        bench.fill(rank, world.address(rank, task(rank).src, task(rank).src_offset, epoch), 2 * task(rank).length,
                   seed(rank));
      }
      for (std::int32_t rank = 0; rank < bench.topo.world(); ++rank) {
        push_kernel<<<1, 1, 0, bench.on(rank)>>>(world.side(rank), static_cast<std::uint32_t>(i), epoch);
      }
      // Behind the pushes in each rank's stream, so that nobody's push waits for a check.
      for (std::int32_t rank = 0; rank < bench.topo.world(); ++rank) {
        const Task put = task(world.peer(rank));
        const std::uint32_t* const flag =
            reinterpret_cast<std::uint32_t*>(bench.heap(rank)) + world.layout.flag_index(put.signals[0].flag, epoch);
        check_kernel<<<1, 512, 0, bench.on(rank)>>>(flag, use_of_epoch(epoch),
                                                    world.address(rank, put.dst, put.dst_offset, epoch), 2 * put.length,
                                                    seed(world.peer(rank)), bench.verdict, false);
      }
      for (std::int32_t rank = 0; rank < bench.topo.world(); ++rank) bench.sync(rank);
      bench.expect_right(std::string(name_of(kind)) + ", put of " + std::to_string(2 * TestSource::kSizes[i]) +
                         " bytes");
    }
  }
}

constexpr std::uint32_t kFlood = 100'000;

void check_flood(Bench& bench, WireKind kind, int ring_depth) {
  World world(bench, kind, ring_depth, LinkModel(), false);
  const Task task = world.source->task(0, Role::kSend, 0, TestSource::kSpecial);
  bench.fill(0, world.address(0, task.src, task.src_offset, 1), 2 * kFlood, 7);
  flood_kernel<<<16, 32, 0, bench.on(0)>>>(world.side(0), TestSource::kSpecial, kFlood,
                                           world.address(1, task.dst, task.dst_offset, 1), 7);
  require(cudaGetLastError(), "flood_kernel");
  bench.sync(0);
  bench.expect_right(std::string(name_of(kind)) + ", 100000 records through a ring of " + std::to_string(ring_depth));
}

void check_drop(Bench& bench, WireKind kind) {
  World world(bench, kind, 256, LinkModel(), true);
  const Nanos begin = steady_now();
  world.network->drop();
  if (steady_now() - begin > 1'000'000'000) give_up("drop() took more than a second");
  push_kernel<<<1, 1, 0, bench.on(0)>>>(world.side(0), 0, 1);
  bench.sync(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const PushSide side = world.side(0);
  std::uint32_t flag = 1;
  require(
      cudaMemcpyAsync(&flag, side.flags + side.flag_count + side.first_flag, 4, cudaMemcpyDeviceToHost, bench.on(0)),
      "cudaMemcpyAsync");
  bench.sync(0);
  if (flag != 0) give_up("a stamp was raised after drop()");
  world.network->remove_operator(kOp);
}

// A wire without traffic leaves the GPU, so that whoever waits for the whole GPU does not wait for ever, and comes
// back.
void check_rest(Bench& bench) {
  World world(bench, WireKind::kCopyKernel, 256, LinkModel(), true);
  const cudaStream_t wire_stream = bench.gpus->spare_stream(bench.gpus->devices().front());
  for (std::uint64_t epoch = 1; epoch <= 4; ++epoch) {
    world.network->wake();
    push_kernel<<<1, 1, 0, bench.on(0)>>>(world.side(0), 0, epoch);
    const PushSide side = world.side(0);
    check_kernel<<<1, 32, 0, bench.on(0)>>>(side.flags + (epoch & 1) * side.flag_count + side.first_flag,
                                            use_of_epoch(epoch), nullptr, 0, 0, bench.verdict, false);
    bench.sync(0);
    bench.expect_right("a record after a rest");
    const Nanos end = steady_now() + 1'000'000'000;
    while (cudaStreamQuery(wire_stream) == cudaErrorNotReady) {
      if (steady_now() > end) give_up("the wire is still on the GPU a second after its last work");
    }
  }
}

}  // namespace

int main() {
  Result<std::unique_ptr<VirtualGpus>> first = make_gpus({2, 1});
  if (!first && first.error().kind == ErrorKind::kUnsupported) {
    std::printf("skipped: %s\n", first.error().message.c_str());
    return 77;
  }
  std::unique_ptr<VirtualGpus> gpus = take(std::move(first));
  for (const Topology& topo : {Topology{2, 1}, Topology{2, 4}}) {
    Bench bench(gpus ? std::move(gpus) : take(make_gpus(topo)), topo);
    for (const WireKind kind : {WireKind::kCopyKernel, WireKind::kCopyEngine}) {
      const bool kernel = kind == WireKind::kCopyKernel;
      if (kernel && bench.gpus->spare_stream(bench.gpus->devices().front()) == nullptr) continue;
      for (const bool unordered : {false, true}) check_sizes(bench, kind, unordered);
      if (topo.world() > 2) continue;
      for (const int depth : {1, 2, 256}) check_flood(bench, kind, depth);
      check_drop(bench, kind);
      if (kernel) check_rest(bench);
    }
  }
  return 0;
}
