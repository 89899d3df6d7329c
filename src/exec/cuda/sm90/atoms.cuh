// Hopper's units through CuTe's and CUTLASS' atoms: TMA, mbarriers, wgmma. Shared memory is named by 32-bit addresses.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <utility>

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "exec/cuda/planted_faults.cuh"

namespace mkernel {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// --- mbarriers ---

// A barrier in shared memory. Our own few lines instead of CUTLASS' class, whose assembly does not tell the compiler
// that it orders memory.
// order: arrive() releases what the arriving threads did before (to threads of the CTA), wait() acquires it.
struct Mbarrier {
  std::uint64_t word;

  __device__ __forceinline__ std::uint32_t address() const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(&word));
  }
  __device__ __forceinline__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    delay_point();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  // Arrives, and makes the phase wait for `bytes` more of bulk copies.
  __device__ __forceinline__ void arrive_and_expect(std::uint32_t bytes) {
    delay_point();
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // Whether the phase of parity `phase` is complete; may wait for a moment.
  __device__ __forceinline__ bool try_wait(std::uint32_t phase) const {
    std::uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(address()), "r"(phase)
                 : "memory");
    return done != 0;
  }
  __device__ __forceinline__ void wait(std::uint32_t phase) const {
    delay_point();
    while (!try_wait(phase)) {
    }
  }
};
// order: mbarriers that this thread has initialised are so for the async proxy too, after a barrier of the CTA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One position in a ring of mbarriers: the slot, and the parity of the phase that is waited for.
template <int kSlots>
struct RingPosition {
  std::uint32_t slot = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// --- TMA ---

// True for one thread of a whole warp, always the same. The compiler then issues TMA instructions once; under any other
// condition it loops over the threads that may be active, which takes longer than the rest of a load.
__device__ __forceinline__ bool elect_thread() { return cute::elect_one_sync() != 0; }

// The default L2 policy, as a cache hint (createpolicy's "evict_normal").
inline constexpr std::uint64_t kEvictNormal = 0x1000000000000000ull;

// Fetches a map before its first use.
__device__ __forceinline__ void prefetch_map_thread(const CUtensorMap& map) { cute::prefetch_tma_descriptor(&map); }

// Loads the box of `map` at (x, y), x the contiguous coordinate; completes on `full`.
__device__ __forceinline__ void tma_load_thread(void* s_dst, const CUtensorMap& map, std::int32_t x, std::int32_t y,
                                                Mbarrier& full) {
  cute::SM90_TMA_LOAD_2D::copy(&map, &full.word, kEvictNormal, s_dst, x, y);
}
// Loads `bytes` contiguous bytes; both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load_thread(void* s_dst, const void* g_src, std::int32_t bytes, Mbarrier& full) {
  cute::SM90_BULK_COPY_G2S::copy(g_src, &full.word, s_dst, bytes);
}
// Stores the box of `map` at (x, y), clipped to the matrix. Joins the open bulk group of this thread.
__device__ __forceinline__ void tma_store_thread(const CUtensorMap& map, const void* s_src, std::int32_t x,
                                                 std::int32_t y) {
  delay_point();
  cute::SM90_TMA_STORE_2D::copy(&map, s_src, x, y);
}
// Stores `bytes` contiguous bytes; both addresses and the size are multiples of 16. Joins the open bulk group.
__device__ __forceinline__ void bulk_store_thread(void* g_dst, const void* s_src, std::int32_t bytes) {
  delay_point();
  cute::SM90_BULK_COPY_S2G::copy(s_src, g_dst, bytes);
}
__device__ __forceinline__ void bulk_commit_thread() { cute::tma_store_arrive(); }
// Waits until all but the last kPending bulk groups of this thread have read their sources.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read_thread() {
  cute::tma_store_wait<kPending>();
}
// Waits until all bulk stores of this thread are complete and visible to it.
__device__ __forceinline__ void bulk_wait_thread() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// order: shared memory that this thread has written by ordinary stores (stmatrix) comes before bulk stores that read
// it, whoever issues them after a barrier.
__device__ __forceinline__ void fence_shared_to_async() {
  delay_point();
  if (!planted(Fault::kNoSharedFence)) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8x8 matrices of 16-bit elements, one row per thread's `address`.
__device__ __forceinline__ void store_matrix_x4(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                                std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// --- wgmma ---

enum class Major : std::uint8_t { kK, kMn };  // which index of an operand is contiguous

// A 64 x N x 16 instruction: D fp32 in registers, A and B in shared memory, A K-major.
template <class T, int N, Major kMajorB>
struct Wgmma;

#define MKERNEL_WGMMA(Type, Name, N)                                                                               \
  template <Major kMajorB>                                                                                         \
  struct Wgmma<Type, N, kMajorB> {                                                                                 \
    static constexpr cute::SM90::GMMA::Major kB =                                                                  \
        kMajorB == Major::kK ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;                           \
    using Atom = cute::SM90::GMMA::MMA_64x##N##x16_F32##Name##Name##_SS<cute::SM90::GMMA::Major::K, kB>;           \
    template <std::size_t... kI>                                                                                   \
    __device__ __forceinline__ static void call(std::uint64_t a, std::uint64_t b, float (&d)[N / 2], bool add,     \
                                                std::index_sequence<kI...>) {                                      \
      Atom::fma(a, b, d[kI]..., add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);         \
    }                                                                                                              \
    /* D = A * B, added to D when `add`. */                                                                        \
    __device__ __forceinline__ static void mma_wg(std::uint64_t a, std::uint64_t b, float (&d)[N / 2], bool add) { \
      call(a, b, d, add, std::make_index_sequence<N / 2>{});                                                       \
    }                                                                                                              \
  };
MKERNEL_WGMMA(__nv_bfloat16, BF16, 64)
MKERNEL_WGMMA(__nv_bfloat16, BF16, 128)
MKERNEL_WGMMA(__nv_bfloat16, BF16, 256)
MKERNEL_WGMMA(__half, F16, 64)
MKERNEL_WGMMA(__half, F16, 128)
MKERNEL_WGMMA(__half, F16, 256)
#undef MKERNEL_WGMMA

// Keeps the compiler from moving accesses of accumulators across a wgmma fence or wait.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(r[i]);
}

// The matrix descriptor of an operand in 128-byte swizzle (PTX ISA, "Matrix descriptor"): address / 16 in bits 0-13,
// leading dimension offset / 16 in bits 16-29, stride dimension offset / 16 in bits 32-45, layout 1 in bits 62-63.
// K-major: rows of 64 elements, 8 of them (1024 bytes) per swizzle atom. MN-major: boxes of 64 k x 64 n elements,
// 8192 bytes apart along n.
template <Major kMajor>
__device__ __forceinline__ std::uint64_t operand_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kLeading = kMajor == Major::kK ? 1 : 8192 >> 4;
  constexpr std::uint64_t kStride = 1024 >> 4;
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | (kLeading << 16) | (kStride << 32) |
         (std::uint64_t{1} << 62);
}
// What 16 elements further along k add to a descriptor.
template <Major kMajor>
inline constexpr std::uint64_t kDescriptorStepK = kMajor == Major::kK ? (16 * 2) >> 4 : (16 * 128) >> 4;

// --- beginning and end of a kernel ---

// Lets the next kernel of the stream begin, if it is launched that way: its CTAs come as these leave.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// order: what earlier kernels of the stream did comes before what follows, also where this one has begun before their
// end. By every thread that accesses memory of others.
__device__ __forceinline__ void wait_for_stream() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- registers ---

template <int kRegisters>
__device__ __forceinline__ void take_registers_wg() {
  cutlass::arch::warpgroup_reg_alloc<kRegisters>();
}
template <int kRegisters>
__device__ __forceinline__ void give_registers_wg() {
  cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}

}  // namespace mkernel
