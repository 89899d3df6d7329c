// The wire alone: bytes are right when the stamp is seen, for any size and alignment, and more copies than it takes at
// once. Prints its rate as one line of JSON. Exit code 0 when all is well, 1 with a sentence when not, 77 (skipped)
// where there is no GPU for it.
#include "exec/cuda/test_bench.cuh"
#include "exec/cuda/wire.h"
#include "exec/host/doorbell.h"

namespace {

using namespace mkernel;

constexpr std::int64_t kBufferBytes = 64 << 20;  // per rank
constexpr std::int64_t kSourceAt = 1 << 20;      // flags come first
constexpr std::int64_t kTargetAt = 32 << 20;

// A copy of its own size and alignment in each of many slots.
constexpr std::int64_t kSlotBytes = 20'480;
struct Slot {
  std::int64_t src = 0;
  std::int64_t dst = 0;
  std::int64_t bytes = 0;
};
MK_HD constexpr Slot slot_of(std::int64_t i) {
  return {i * kSlotBytes + 32 + i * 11 % 16, i * kSlotBytes + 32 + i * 7 % 16, 1 + i * 337 % 20'000};
}

// One CTA per slot.
__global__ void check_slots_kernel(const std::uint32_t* flag, std::uint32_t value, const std::byte* p,
                                   std::uint32_t seed, Verdict* verdict) {
  if (threadIdx.x == 0) await_thread(flag, value, verdict);
  __syncthreads();
  const Slot slot = slot_of(blockIdx.x);
  std::uint32_t wrong = 0;
  for (std::int64_t i = threadIdx.x; i < kSlotBytes; i += blockDim.x) {
    const std::int64_t at = std::int64_t{blockIdx.x} * kSlotBytes + i;
    const bool inside = at >= slot.dst && at < slot.dst + slot.bytes;
    const std::uint8_t want = inside ? pattern(seed, at - slot.dst + slot.src) : kGuard;
    wrong += p[at] != static_cast<std::byte>(want);
  }
  if (wrong > 0) atomicAdd_system(&verdict->wrong, wrong);
}

void check_one_copy(Bench& bench, Wire& wire, std::int64_t bytes, int src_shift, int dst_shift, std::uint32_t value) {
  std::byte* const src = bench.heap(0) + kSourceAt + src_shift;
  std::byte* const dst = bench.heap(1) + kTargetAt + 64 + dst_shift;
  auto* const flag = reinterpret_cast<std::uint32_t*>(bench.heap(1)) + value % 64;
  bench.fill(0, src, bytes, value);
  bench.clear(1, bench.heap(1) + kTargetAt, bytes + 256);
  // It spins while the bytes come, so that it also sees what comes too late.
  check_kernel<<<1, 512, 0, bench.on(1)>>>(flag, value, dst, bytes, value, bench.verdict);
  require(cudaGetLastError(), "check_kernel");
  const CopyMark mark = bytes == 0 ? wire.reached(0) : wire.copy(0, dst, src, bytes);
  wire.stamp(0, flag, value, mark);
  bench.sync(1);
  bench.expect_right(std::string(name_of(wire.kind())) + ", " + std::to_string(bytes) + " bytes from +" +
                     std::to_string(src_shift) + " to +" + std::to_string(dst_shift));
}

// More copies than the wire takes at once, of all alignments, behind a single stamp.
void check_many_copies(Bench& bench, Wire& wire, std::uint32_t value) {
  constexpr int kCopies = 600;
  std::byte* const src = bench.heap(0) + kSourceAt;
  std::byte* const dst = bench.heap(1) + kTargetAt;
  auto* const flag = reinterpret_cast<std::uint32_t*>(bench.heap(1)) + value % 64;
  bench.fill(0, src, kCopies * kSlotBytes, value);
  bench.clear(1, dst, kCopies * kSlotBytes);
  check_slots_kernel<<<kCopies, 128, 0, bench.on(1)>>>(flag, value, dst, value, bench.verdict);
  require(cudaGetLastError(), "check_slots_kernel");
  CopyMark mark{};
  for (int i = 0; i < kCopies; ++i) {
    const Slot slot = slot_of(i);
    mark = wire.copy(0, dst + slot.dst, src + slot.src, slot.bytes);
  }
  wire.stamp(0, flag, value, mark);
  bench.sync(1);
  bench.expect_right(std::string(name_of(wire.kind())) + ", many copies");
}

void check_wire(Bench& bench, Wire& wire) {
  std::uint32_t value = 0;
  constexpr std::int64_t kSizes[] = {0, 1, 15, 16, 17, 8192, 65536, 1 << 20, (3 << 20) + 5};
  constexpr int kShifts[][2] = {{0, 0}, {1, 0}, {0, 3}, {5, 5}, {2, 14}, {8, 4}};
  for (const std::int64_t bytes : kSizes) {
    for (const auto& [src_shift, dst_shift] : kShifts) {
      check_one_copy(bench, wire, bytes, src_shift, dst_shift, ++value);
    }
  }
  check_many_copies(bench, wire, ++value);
}

// GB/s per rank with all ranks at work, in chunks of 512 KB.
double wire_rate(Bench& bench, Wire& wire) {
  constexpr std::int64_t kChunk = 512 << 10;
  constexpr int kChunks = 48;
  constexpr int kRounds = 8;
  const std::int32_t world = bench.topo.world();
  const auto wait_all = [&] {
    const Nanos end = steady_now() + 5'000'000'000;
    for (std::int32_t rank = 0; rank < world; ++rank) {
      while (!wire.idle(rank)) {
        if (steady_now() > end) give_up("the wire does not become idle");
      }
    }
  };
  Nanos begin = 0;
  for (int round = 0; round <= kRounds; ++round) {
    if (round == 1) begin = steady_now();  // the first is for warming up
    for (int i = 0; i < kChunks; ++i) {
      for (std::int32_t rank = 0; rank < world; ++rank) {
        wire.copy(rank, bench.heap((rank + world / 2) % world) + kTargetAt + i * kChunk,
                  bench.heap(rank) + kSourceAt + i * kChunk, kChunk);
      }
    }
    wait_all();
  }
  return static_cast<double>(kRounds) * kChunks * kChunk / static_cast<double>(steady_now() - begin);
}

}  // namespace

int main() {
  Result<std::unique_ptr<VirtualGpus>> first = make_gpus({2, 1});
  if (!first && first.error().kind == ErrorKind::kUnsupported) {
    std::printf("skipped: %s\n", first.error().message.c_str());
    return 77;
  }
  Json json;
  std::unique_ptr<VirtualGpus> gpus = take(std::move(first));
  for (const Topology& topo : {Topology{2, 1}, Topology{2, 4}}) {
    Bench bench(gpus ? std::move(gpus) : take(make_gpus(topo)), topo);
    for (const bool kernel : {true, false}) {
      if (kernel && bench.gpus->spare_stream(bench.gpus->devices().front()) == nullptr) continue;
      bench.allocate(kBufferBytes);
      const auto wire =
          take(kernel ? create_kernel_wire(*bench.gpus, topo, false) : create_engine_wire(*bench.gpus, topo));
      if (topo.world() == 2) check_wire(bench, *wire);
      json.add(std::string(kernel ? "kernel_" : "engine_") + std::to_string(topo.world()) + "_ranks_gb_per_s_each",
               wire_rate(bench, *wire));
    }
  }
  json.print();
  return 0;
}
