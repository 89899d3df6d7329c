// Moves: copies and reductions, by the threads of both consumer warpgroups.
#pragma once
#include "exec/cuda/kernel_shared.cuh"

namespace mkernel {

__device__ __forceinline__ std::uint32_t pack_pair(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ std::uint32_t pack_pair(float a, float b, __half) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack_pair(std::uint32_t bits, __nv_bfloat16) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack_pair(std::uint32_t bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ void from_float(float x, __nv_bfloat16* p) { *p = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, __half* p) { *p = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, float* p) { *p = x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

// By one lane of each warp, after all its lanes.
__device__ __forceinline__ void release_warp(Mbarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

template <class Tile, class T>
struct Mover {
  static constexpr int kAtOnce = 4;  // units of a thread that are loaded before the first is stored
  static constexpr int kScratch = Tile::kBn / 2;
  static_assert(kScratch >= kAtOnce * 8);

  const DeviceCall& call;
  SharedMemory<Tile>& s;
  const EpochView epoch;
  const int thread;  // 0..255, of both warpgroups

  // `stage` is where the producer puts the next slab. `r` are the accumulators of tiles, of which nothing is needed
  // now: the assembler would not give moves registers of their own beside them.
  __device__ __forceinline__ void move(const DeviceTask& task, RingPosition<Tile::kStages>& stage,
                                       float (&r)[kScratch]) const {
    if (task.path == Path::kBulk) {
      if (is_fp32(call.rank, task.src)) {
        move_bulk<true>(task, stage, r);
      } else {
        move_bulk<false>(task, stage, r);
      }
    } else if (is_fp32(call.rank, task.src)) {
      move_direct<float>(task);
    } else {
      move_direct<T>(task);
    }
  }

 private:
  // A part of the task that fills a stage. Packed buffers hold its units one after the other from `first` on.
  struct Slab {
    std::int64_t first;  // in units from the beginning of the task
    std::int32_t row;
    std::int32_t unit;  // of that row
    std::int32_t units_per_row;
    std::int32_t count;
  };
  // What the eight registers of a unit hold: bits to be stored as they are, or sums to be rounded.
  enum class Kind { kBits16, kBits32, kSums };

  template <bool kFp32>
  __device__ __forceinline__ void move_bulk(const DeviceTask& task, RingPosition<Tile::kStages>& stage,
                                            float (&r)[kScratch]) const {
    const Slabs slabs(task, call.rank, Tile::kStageBytes);
    const bool result_fp32 = task.dst != Buffer::kC && is_fp32(call.rank, task.dst);
    const bool copies = slabs.sources == 1 && kFp32 == result_fp32;
    const Kind kind = result_fp32 ? Kind::kBits32 : copies ? Kind::kBits16 : Kind::kSums;
    slabs.for_each([&](std::int32_t row, std::int32_t rows, std::int32_t unit, std::int32_t units) {
      const Slab slab{std::int64_t{row} * slabs.row_units + unit, row, unit, units, rows * units};
      s.full[stage.slot].wait(stage.phase);
      const std::uint32_t base = shared_address(s.stages[stage.slot]);
      for (std::int32_t begin = thread; begin < slab.count; begin += kAtOnce * kConsumerThreads) {
        if (copies) {
          load_units<kFp32>(slab.count, begin, base, r);
        } else {
          add_units<kFp32>(slab.count, begin, base, slabs.sources, slabs.source_bytes, r);
        }
        put_units(task, slab, begin, kind, r);
      }
      release_warp(s.empty[stage.slot]);
      stage.advance();
    });
  }

  // Bits as they are: four words of each unit, or eight.
  template <bool kFp32>
  __device__ __forceinline__ static void load_units(std::int32_t count, std::int32_t begin, std::uint32_t base,
                                                    float (&r)[kScratch]) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::int32_t i = begin + j * kConsumerThreads;
      if (i >= count) continue;
      to_registers(ld_shared_16(base + i * (kFp32 ? 32 : 16)), r + 8 * j);
      if constexpr (kFp32) to_registers(ld_shared_16(base + i * 32 + 16), r + 8 * j + 4);
    }
  }

  // Adds the sources in their order, in fp32.
  template <bool kFp32>
  __device__ __forceinline__ static void add_units(std::int32_t count, std::int32_t begin, std::uint32_t base,
                                                   std::int32_t sources, std::int32_t source_bytes,
                                                   float (&r)[kScratch]) {
    for (std::int32_t source = 0; source < sources; ++source, base += source_bytes) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const std::int32_t i = begin + j * kConsumerThreads;
        if (i >= count) continue;
        float x[8];
        load_unit<kFp32>(base + i * (kFp32 ? 32 : 16), x);
#pragma unroll
        for (int e = 0; e < 8; ++e) r[8 * j + e] = source == 0 ? x[e] : r[8 * j + e] + x[e];
      }
    }
  }

  __device__ __forceinline__ static void to_registers(Bytes16 v, float* r) {
    r[0] = __uint_as_float(v.x), r[1] = __uint_as_float(v.y), r[2] = __uint_as_float(v.z), r[3] = __uint_as_float(v.w);
  }
  __device__ __forceinline__ static Bytes16 as_bits(const float* r) {
    return {__float_as_uint(r[0]), __float_as_uint(r[1]), __float_as_uint(r[2]), __float_as_uint(r[3])};
  }
  template <bool kFp32>
  __device__ __forceinline__ static void load_unit(std::uint32_t address, float (&x)[8]) {
    const Bytes16 low = ld_shared_16(address);
    if constexpr (kFp32) {
      to_registers(low, x);
      to_registers(ld_shared_16(address + 16), x + 4);
    } else {
      const std::uint32_t words[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair(words[i], T{});
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }
  // The first 16 bytes that a unit is stored as.
  __device__ __forceinline__ static Bytes16 low_bits(Kind kind, const float* r) {
    if (kind != Kind::kSums) return as_bits(r);
    return {pack_pair(r[0], r[1], T{}), pack_pair(r[2], r[3], T{}), pack_pair(r[4], r[5], T{}),
            pack_pair(r[6], r[7], T{})};
  }

  // Calls f(gpu) for the GPUs whose `dst` the task writes, from the next one on, so that not all write to the same.
  template <class F>
  __device__ __forceinline__ void for_each_target(const DeviceTask& task, F f) const {
    const DeviceRank& rank = call.rank;
    if (task.dst_reach == Reach::kSelf) {
      f(rank.gpu);
      return;
    }
    std::int32_t gpu = rank.gpu;
    for (std::int32_t i = 0; i < rank.gpus; ++i) {
      if (++gpu == rank.gpus) gpu = 0;
      if (gpu != rank.gpu || task.dst_reach == Reach::kNode) f(gpu);
    }
  }
  __device__ __forceinline__ const DeviceMatrix& c_of(const DeviceTask& task, std::int32_t gpu) const {
    return task.dst_reach == Reach::kSelf ? call.c_matrix : s.c[gpu];
  }

  // Writes units of 8 elements to every place that the task names.
  __device__ __forceinline__ void put_units(const DeviceTask& task, const Slab& slab, std::int32_t begin, Kind kind,
                                            const float (&r)[kScratch]) const {
    const DeviceRank& rank = call.rank;
    const std::int64_t packed = task.dst_offset + (slab.first + begin) * 8;
    if (task.dst == Buffer::kC) {
      put_c(task, slab, begin, kind, r);
    } else {
      const std::int64_t offset = epoch.buffer_begin(rank, task.dst) + packed * (kind == Kind::kBits32 ? 4 : 2);
      for_each_target(task, [&](std::int32_t gpu) { put_packed(rank.heaps[gpu] + offset, slab, begin, kind, r); });
    }
    if (task.keep_result) {
      put_packed(rank.heaps[rank.gpu] + epoch.buffer_begin(rank, Buffer::kResult) + packed * 2, slab, begin, kind, r);
    }
  }
  __device__ __forceinline__ static void put_packed(std::byte* p, const Slab& slab, std::int32_t begin, Kind kind,
                                                    const float (&r)[kScratch]) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (begin + j * kConsumerThreads >= slab.count) continue;
      std::byte* const at = p + j * kConsumerThreads * (kind == Kind::kBits32 ? 32 : 16);
      st_global_16(at, low_bits(kind, r + 8 * j));
      if (kind == Kind::kBits32) st_global_16(at + 16, as_bits(r + 8 * j + 4));
    }
  }
  __device__ __forceinline__ void put_c(const DeviceTask& task, const Slab& slab, std::int32_t begin, Kind kind,
                                        const float (&r)[kScratch]) const {
    const std::int32_t units = slab.units_per_row;
    const bool power_of_two = (units & (units - 1)) == 0;  // full tiles
    const std::int32_t shift = 31 - __clz(units);
    for_each_target(task, [&](std::int32_t gpu) {
      const DeviceMatrix& c = c_of(task, gpu);
      T* const first =
          static_cast<T*>(c.data) + (task.row + slab.row) * c.row_stride + (task.col + slab.unit * 8) * c.col_stride;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const std::int32_t i = begin + j * kConsumerThreads;
        if (i >= slab.count) continue;
        const std::int32_t down = power_of_two ? i >> shift : i / units;
        T* const p = first + down * c.row_stride + (i - down * units) * 8 * c.col_stride;
        const Bytes16 bits = low_bits(kind, r + 8 * j);
        if (c.wide != 0) {
          st_global_16(p, bits);
        } else {
          put_elements(p, c.col_stride, bits);
        }
      }
    });
  }
  __device__ __forceinline__ static void put_elements(T* p, std::int64_t stride, Bytes16 bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const auto half = static_cast<std::uint16_t>(words[e / 2] >> (e % 2 * 16));
      *reinterpret_cast<std::uint16_t*>(p + e * stride) = half;
    }
  }

  // Element by element: offsets or widths that are no multiple of 16 bytes.
  template <class Element>
  __device__ void move_direct(const DeviceTask& task) const {
    const DeviceRank& rank = call.rank;
    const std::int32_t sources = task.source == Source::kNode   ? rank.gpus
                                 : task.source == Source::kRail ? rank.nodes
                                                                : 1;
    const std::int64_t count = std::int64_t{task.rows} * task.cols;
    const bool result_fp32 = task.dst != Buffer::kC && is_fp32(rank, task.dst);
    for (std::int64_t i = thread; i < count; i += kConsumerThreads) {
      float sum = 0;
      Element first{};
      for (std::int32_t source = 0; source < sources; ++source) {
        const Element x = reinterpret_cast<const Element*>(source_address(task, rank, call.a_matrix, epoch, source))[i];
        if (source == 0) first = x;
        sum = source == 0 ? to_float(x) : sum + to_float(x);
      }
      T result{};
      if constexpr (sizeof(Element) == sizeof(T)) {
        result = first;  // a copy keeps the bits, also of a NaN
        if (sources > 1) from_float(sum, &result);
      } else {
        from_float(sum, &result);
      }
      put_element(task, i, result, sum, result_fp32);
    }
  }
  __device__ __forceinline__ void put_element(const DeviceTask& task, std::int64_t i, T result, float sum,
                                              bool fp32) const {
    const DeviceRank& rank = call.rank;
    const std::int64_t row = i / task.cols;
    const std::int64_t col = i % task.cols;
    for_each_target(task, [&](std::int32_t gpu) {
      if (task.dst == Buffer::kC) {
        const DeviceMatrix& c = c_of(task, gpu);
        static_cast<T*>(c.data)[(task.row + row) * c.row_stride + (task.col + col) * c.col_stride] = result;
        return;
      }
      std::byte* base = rank.heaps[gpu] + epoch.buffer_begin(rank, task.dst);
      if (fp32) {
        reinterpret_cast<float*>(base)[task.dst_offset + i] = sum;
      } else {
        reinterpret_cast<T*>(base)[task.dst_offset + i] = result;
      }
    });
    if (task.keep_result) {
      reinterpret_cast<T*>(rank.heaps[rank.gpu] + epoch.buffer_begin(rank, Buffer::kResult))[task.dst_offset + i] =
          result;
    }
  }
};

}  // namespace mkernel
