// Memory operations that spell order and scope, and the clock. All inline assembly of the kernels is in this folder.
#pragma once
#include <cstdint>

#include "exec/cuda/planted_faults.cuh"

namespace mkernel {

__device__ __forceinline__ std::uint32_t ld_relaxed_sys(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t ld_relaxed_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::uint64_t ld_relaxed_gpu(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t ld_acquire_sys(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// order: what was written before the flags that this thread has seen (by relaxed loads) is visible to what follows.
// Unlike fence.acq_rel it does not wait for the SM's stores (measured, H200: that took twice the time of communication
// alone), and unlike ld.acquire it takes one step for many flags.
__device__ __forceinline__ void fence_acquire_sys() {
  delay_point();
  if (!planted(Fault::kNoAcquire)) asm volatile("fence.acquire.sys;" ::: "memory");
}
__device__ __forceinline__ void st_relaxed_sys(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_release_sys(std::uint32_t* p, std::uint32_t v) {
  delay_point();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void red_add_release_sys(std::uint32_t* p, std::uint32_t v) {
  delay_point();
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void red_add_release_gpu(std::uint32_t* p, std::uint32_t v) {
  delay_point();
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ std::uint32_t atom_add_relaxed_gpu(std::uint32_t* p, std::uint32_t v) {
  delay_point();
  std::uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
__device__ __forceinline__ std::uint32_t atom_add_acq_rel_sys(std::uint32_t* p, std::uint32_t v) {
  delay_point();
  std::uint32_t old;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
__device__ __forceinline__ std::uint32_t atom_add_acq_rel_gpu(std::uint32_t* p, std::uint32_t v) {
  delay_point();
  std::uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
__device__ __forceinline__ std::uint64_t atom_cas_relaxed_gpu(std::uint64_t* p, std::uint64_t seen, std::uint64_t v) {
  delay_point();
  std::uint64_t old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(p), "l"(seen), "l"(v) : "memory");
  return old;
}
__device__ __forceinline__ void red_max_relaxed_gpu(std::uint32_t* p, std::uint32_t v) {
  delay_point();
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ std::uint32_t atom_cas_relaxed_sys(std::uint32_t* p, std::uint32_t seen, std::uint32_t v) {
  delay_point();
  std::uint32_t old;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(seen), "r"(v) : "memory");
  return old;
}

// Nanoseconds since some moment, the same clock on all SMs; ticks about every microsecond.
__device__ __forceinline__ std::uint64_t global_time_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// order: accesses of the generic proxy (ordinary loads and stores, also those that an acquire made visible) come before
// accesses of the async proxy (TMA) that follow.
__device__ __forceinline__ void fence_proxy_async() {
  delay_point();
  if (!planted(Fault::kNoProxyFence)) asm volatile("fence.proxy.async;" ::: "memory");
}

// Four words, none of them from this SM's cache.
__device__ __forceinline__ float4 ld_relaxed_gpu(const float4* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p));
  return v;
}

struct Bytes16 {
  std::uint32_t x, y, z, w;
};
__device__ __forceinline__ Bytes16 ld_shared_16(std::uint32_t address) {
  Bytes16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void st_global_16(void* p, Bytes16 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace mkernel
