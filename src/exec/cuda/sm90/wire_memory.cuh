// What rings and the wire need beyond memory.cuh: 64-bit words of pinned memory, words in shared memory, bulk copies
// whose stores stay in flight.
#pragma once
#include <cstdint>

#include "exec/cuda/planted_faults.cuh"

namespace mkernel {

__device__ __forceinline__ std::uint32_t ld_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_release_gpu(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ std::uint64_t ld_acquire_sys(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_release_sys(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence_acq_rel_sys() {
  delay_point();
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// --- words in shared memory, between the warps of a CTA ---

__device__ __forceinline__ std::uint32_t shared_word(const std::uint32_t* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ std::uint32_t ld_acquire_cta(const std::uint32_t* s_p) {
  std::uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(shared_word(s_p)) : "memory");
  return v;
}
__device__ __forceinline__ void st_release_cta(std::uint32_t* s_p, std::uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_word(s_p)), "r"(v) : "memory");
}

// --- bulk copies through shared memory; addresses and sizes are multiples of 16 ---

// One phase of one load at a time. order: wait() makes the loaded bytes visible to the waiting thread.
struct LoadBarrier {
  std::uint64_t word;

  __device__ __forceinline__ std::uint32_t address() const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(&word));
  }
  __device__ __forceinline__ void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
  }
  __device__ __forceinline__ void expect(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ bool try_wait(std::uint32_t parity) const {
    std::uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(address()), "r"(parity)
                 : "memory");
    return done != 0;
  }
  // The load is under way, so this ends.
  __device__ __forceinline__ void wait(std::uint32_t parity) const {
    while (!try_wait(parity)) {
    }
  }
};
// order: barriers that this thread has initialised are so for bulk copies too, after a barrier of the CTA.
__device__ __forceinline__ void fence_load_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void bulk_load_thread(void* s_dst, const void* g_src, std::uint32_t bytes,
                                                 LoadBarrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(s_dst))),
               "l"(g_src), "r"(bytes), "r"(full.address())
               : "memory");
}
// Joins the open group of this thread.
__device__ __forceinline__ void bulk_store_thread(void* g_dst, const void* s_src, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(g_dst),
               "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(s_src))), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_close_group_thread() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kPending groups of this thread have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read_groups_thread() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all groups of this thread are complete, and their writes visible to it.
__device__ __forceinline__ void bulk_wait_all_thread() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// order: ordinary reads of shared memory by this thread, or by threads it has been synchronised with, come before bulk
// loads that overwrite it.
__device__ __forceinline__ void fence_shared_reads_thread() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace mkernel
