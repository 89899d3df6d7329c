// What attention needs of Hopper's units beside atoms.cuh.
#pragma once
#include "exec/cuda/sm90/atoms.cuh"

namespace mkernel {

// Loads a box of 64 columns at (x, token, head, batch).
__device__ __forceinline__ void tma_load_thread(void* s_dst, const CUtensorMap& map, std::int32_t x, std::int32_t token,
                                                std::int32_t head, std::int32_t batch, Mbarrier& full) {
  cute::SM90_TMA_LOAD_4D::copy(&map, &full.word, kEvictNormal, s_dst, x, token, head, batch);
}

// O += P V: a 64 x N x 16 instruction, P in registers as four words, V in shared memory with N contiguous.
template <class T, int N>
struct WgmmaFromRegisters;

#define MKERNEL_WGMMA_RS(Type, Name, N)                                                                         \
  template <>                                                                                                   \
  struct WgmmaFromRegisters<Type, N> {                                                                          \
    using Atom = cute::SM90::GMMA::MMA_64x##N##x16_F32##Name##Name##_RS<cute::SM90::GMMA::Major::K,             \
                                                                        cute::SM90::GMMA::Major::MN>;           \
    template <std::size_t... kI>                                                                                \
    __device__ __forceinline__ static void call(const std::uint32_t* a, std::uint64_t b, float (&d)[N / 2],     \
                                                std::index_sequence<kI...>) {                                   \
      Atom::fma(a[0], a[1], a[2], a[3], b, d[kI]..., cute::SM90::GMMA::ScaleOut::One);                          \
    }                                                                                                           \
    __device__ __forceinline__ static void mma_wg(const std::uint32_t* a, std::uint64_t b, float (&d)[N / 2]) { \
      call(a, b, d, std::make_index_sequence<N / 2>{});                                                         \
    }                                                                                                           \
  };
MKERNEL_WGMMA_RS(__nv_bfloat16, BF16, 64)
MKERNEL_WGMMA_RS(__nv_bfloat16, BF16, 96)
MKERNEL_WGMMA_RS(__nv_bfloat16, BF16, 128)
MKERNEL_WGMMA_RS(__nv_bfloat16, BF16, 256)
MKERNEL_WGMMA_RS(__half, F16, 64)
MKERNEL_WGMMA_RS(__half, F16, 96)
MKERNEL_WGMMA_RS(__half, F16, 128)
MKERNEL_WGMMA_RS(__half, F16, 256)
#undef MKERNEL_WGMMA_RS

// The matrix descriptor of boxes of 64 columns in 128-byte swizzle, `box_bytes` apart (see operand_descriptor()). The
// low word comes from one thread, so that the compiler knows it to be the same for the warp.
template <Major kMajor, int kBoxBytes>
__device__ __forceinline__ std::uint64_t box_descriptor(std::uint32_t address) {
  constexpr std::uint32_t kLeading = kMajor == Major::kK ? 1 : kBoxBytes >> 4;
  constexpr std::uint32_t kHigh = (1024 >> 4) | (1u << 30);
  const std::uint32_t low = ((address & 0x3ffff) >> 4) | (kLeading << 16);
  return (static_cast<std::uint64_t>(kHigh) << 32) | __shfl_sync(0xffffffffu, low, 0);
}

template <int kCount>
__device__ __forceinline__ void fence_registers(std::uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(r[i]);
}

// 2^x, within 2^-22; 0 for -infinity and below the normal numbers.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Named barriers: one warpgroup goes on when the other has arrived.
__device__ __forceinline__ void order_sync_wg(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void order_arrive_wg(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

__device__ __forceinline__ void st_shared_zero_16(std::uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

}  // namespace mkernel
