// What the GPU tests of wire and network share: memory, streams, and kernels that fill and compare.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exec/cuda/cuda_network.h"
#include "exec/cuda/device_heap.h"
#include "exec/cuda/sm90/memory.cuh"
#include "exec/cuda/virtual_gpu.h"
#include "plan/plan.h"

namespace mkernel {

inline constexpr int kGuard = 0xee;                         // around what a copy writes
inline constexpr std::uint64_t kPatience = 10'000'000'000;  // ns

// In GPU memory; written by kernels, read by the host after them.
struct Verdict {
  std::uint32_t wrong = 0;     // bytes
  std::uint32_t timeouts = 0;  // of anything
  std::uint32_t never = 0;     // stays 0: for functions that want a word to look at
};

__device__ inline std::uint8_t pattern(std::uint32_t seed, std::int64_t i) {
  std::uint64_t x = (static_cast<std::uint64_t>(i) + (static_cast<std::uint64_t>(seed) << 40)) * 0x9e3779b97f4a7c15ull;
  return static_cast<std::uint8_t>(x >> 56);
}

__global__ static void fill_kernel(std::byte* p, std::int64_t bytes, std::uint32_t seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes; i += step) {
    p[i] = static_cast<std::byte>(pattern(seed, i));
  }
}

// Whether the flag reaches `value` in time.
__device__ inline bool await_thread(const std::uint32_t* flag, std::uint32_t value, Verdict* verdict) {
  const std::uint64_t end = global_time_ns() + kPatience;
  // order: the bytes that the stamp vouches for; pairs with the wire's stamp.
  while (!flag_reached(ld_acquire_sys(flag), value)) {
    if (global_time_ns() < end) continue;
    atomicAdd_system(&verdict->timeouts, 1);
    return false;
  }
  return true;
}

// Compares as soon as the stamp is there, with all threads of the CTA.
__global__ static void check_kernel(const std::uint32_t* flag, std::uint32_t value, const std::byte* p,
                                    std::int64_t bytes, std::uint32_t seed, Verdict* verdict, bool guarded = true) {
  if (threadIdx.x == 0) await_thread(flag, value, verdict);
  __syncthreads();
  std::uint32_t wrong = 0;
  const std::int64_t guard = guarded ? 64 : 0;
  for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) - guard; i < bytes + guard; i += blockDim.x) {
    const bool inside = i >= 0 && i < bytes;
    wrong += p[i] != static_cast<std::byte>(inside ? pattern(seed, i) : kGuard);
  }
  if (wrong > 0) atomicAdd_system(&verdict->wrong, wrong);
}

[[noreturn]] inline void give_up(const std::string& sentence) {
  std::fprintf(stderr, "%s\n", sentence.c_str());
  std::exit(1);
}
inline void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) give_up(std::string(what) + ": " + cudaGetErrorString(status));
}
template <class T>
T take(Result<T> result) {
  if (!result) give_up(result.error().message);
  return std::move(*result);
}

inline const char* name_of(WireKind kind) { return kind == WireKind::kCopyKernel ? "copy kernel" : "copy engine"; }

// What every test needs: GPUs, memory of each rank, and a place where kernels leave their verdict.
struct Bench {
  std::unique_ptr<VirtualGpus> gpus;
  Topology topo;
  std::vector<DeviceHeap> heaps;
  DeviceHeap verdict_memory;  // not from cudaMalloc: freeing that waits for all that runs on the GPU
  Verdict* verdict = nullptr;

  Bench(std::unique_ptr<VirtualGpus> g, const Topology& t) : gpus(std::move(g)), topo(t) {
    verdict_memory = take(DeviceHeap::create(gpus->devices().front(), sizeof(Verdict), gpus->devices()));
    verdict = reinterpret_cast<Verdict*>(verdict_memory.data());
    reset_verdict();
  }
  void allocate(std::int64_t bytes) {
    heaps.clear();
    for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
      heaps.push_back(take(DeviceHeap::create(gpus->rank(rank).device, bytes, gpus->devices())));
    }
  }
  std::byte* heap(std::int32_t rank) const { return heaps[static_cast<std::size_t>(rank)].data(); }
  cudaStream_t on(std::int32_t rank) const {
    require(cudaSetDevice(gpus->rank(rank).device), "cudaSetDevice");
    return gpus->rank(rank).stream;
  }
  void sync(std::int32_t rank) const { require(cudaStreamSynchronize(on(rank)), "a kernel of the test"); }
  void fill(std::int32_t rank, std::byte* p, std::int64_t bytes, std::uint32_t seed) const {
    fill_kernel<<<256, 256, 0, on(rank)>>>(p, bytes, seed);
    sync(rank);
  }
  void clear(std::int32_t rank, std::byte* p, std::int64_t bytes) const {
    require(cudaMemsetAsync(p, kGuard, static_cast<std::size_t>(bytes), on(rank)), "cudaMemsetAsync");
    sync(rank);
  }
  void reset_verdict() const {
    const Verdict fresh;
    require(cudaMemcpyAsync(verdict, &fresh, sizeof(fresh), cudaMemcpyHostToDevice, on(0)), "cudaMemcpyAsync");
    sync(0);
  }
  // After sync(): dies when a kernel has found something wrong.
  Verdict expect_right(const std::string& what) const {
    Verdict seen;
    require(cudaMemcpyAsync(&seen, verdict, sizeof(seen), cudaMemcpyDeviceToHost, on(0)), "cudaMemcpyAsync");
    sync(0);
    if (seen.timeouts != 0) give_up(what + ": a stamp was not seen, or a record not taken, in time");
    if (seen.wrong != 0) give_up(what + ": " + std::to_string(seen.wrong) + " bytes are wrong");
    return seen;
  }
};

// Four SMs of a shared GPU stay free for the copy kernel.
inline Result<std::unique_ptr<VirtualGpus>> make_gpus(const Topology& topo) {
  VirtualGpuOptions options;
  options.topo = topo;
  options.spare_sms = 4;
  return VirtualGpus::create(options);
}

// One line of JSON.
class Json {
 public:
  void add(const std::string& key, double value) {
    char text[64];
    std::snprintf(text, sizeof(text), "%.4g", value);
    text_ += (text_.empty() ? "\"" : ", \"") + key + "\": " + text;
  }
  void print() const { std::printf("{%s}\n", text_.c_str()); }

 private:
  std::string text_;
};

}  // namespace mkernel
