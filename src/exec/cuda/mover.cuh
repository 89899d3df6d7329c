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
  static constexpr int kAtOnce = 3;  // units of a thread that are under way together; a stage of 48 KiB holds 3 of each
                                     // of four sources

  const DeviceCall& call;
  SharedMemory<Tile>& s;
  const EpochView epoch;
  const int thread;  // 0..255, of both warpgroups

  // `stage` is where the producer puts the next slab.
  __device__ __forceinline__ void move(const DeviceTask& task, RingPosition<Tile::kStages>& stage) const {
    const bool fp32 = is_fp32(call.rank, task.src);
    if (task.path == Path::kDirect) {
      if (fp32) {
        move_direct<float>(task);
      } else {
        move_direct<T>(task);
      }
    } else if (fp32) {
      if (task.dst != Buffer::kC && is_fp32(call.rank, task.dst)) {
        move_bulk<Kind::kSumsFp32>(task, stage);
      } else {
        move_bulk<Kind::kSumsRounded>(task, stage);
      }
    } else if (task.source == Source::kNode || task.source == Source::kRail) {
      move_bulk<Kind::kSums>(task, stage);
    } else if (task.dst == Buffer::kC) {
      move_bulk<Kind::kCopy>(task, stage);
    } else {
      copy_bulk(task, stage);
    }
  }

 private:
  // What is done with 16-bit sources (the first two) or fp32 ones. A copy keeps the bits, also of a NaN.
  enum class Kind { kCopy, kSums, kSumsRounded, kSumsFp32 };
  static constexpr bool fp32_sources(Kind kind) { return kind == Kind::kSumsRounded || kind == Kind::kSumsFp32; }

  // The units of a batch: those of this thread in a part of the task that fills a stage. Packed buffers hold the task's
  // units one after the other.
  struct Batch {
    std::int64_t first;          // unit of the task at which the slab begins
    std::int32_t row;            // and its place in the rectangle
    std::int32_t unit;           // (of that row)
    std::int32_t units_per_row;  // of the slab
    std::int32_t count;          // units of the slab
    std::int32_t begin;          // this thread's are begin, begin + 256, ...

    __device__ __forceinline__ std::int32_t at(int j) const { return begin + j * kConsumerThreads; }
    __device__ __forceinline__ bool has(int j) const { return at(j) < count; }
    // Where to load it from. Beyond the end the last one, in vain: values that only some threads define would be kept
    // in registers throughout the kernel.
    __device__ __forceinline__ std::int32_t from(int j) const { return min(at(j), count - 1); }
  };

  // Copies to packed buffers are bulk stores out of the stage. One thread starts them; a stage is free when it has been
  // read, which is asked a slab later.
  __device__ __forceinline__ void copy_bulk(const DeviceTask& task, RingPosition<Tile::kStages>& stage) const {
    const Slabs slabs(task, call.rank, Tile::kStageBytes);
    const bool starter = thread < 32;
    std::uint32_t last = Tile::kStages;  // none
    slabs.for_each([&](std::int32_t row, std::int32_t rows, std::int32_t unit, std::int32_t units) {
      s.full[stage.slot].wait(stage.phase);
      if (!starter) {
        release_warp(s.empty[stage.slot]);
      } else if (elect_thread()) {
        const std::int64_t offset = (task.dst_offset + (std::int64_t{row} * slabs.row_units + unit) * 8) * 2;
        store_slab_thread(task, offset, s.stages[stage.slot], rows * units * 16);
        bulk_wait_read_thread<1>();
        if (last != Tile::kStages) s.empty[last].arrive();
      }
      __syncwarp();
      last = stage.slot;
      stage.advance();
    });
    if (starter && elect_thread()) {
      bulk_wait_thread();
      if (last != Tile::kStages) s.empty[last].arrive();
    }
  }
  __device__ __forceinline__ void store_slab_thread(const DeviceTask& task, std::int64_t offset, const std::byte* s_src,
                                                    std::int32_t bytes) const {
    const DeviceRank& rank = call.rank;
    const std::int64_t begin = epoch.buffer_begin(rank, task.dst) + offset;
    for_each_target(task, [&](std::int32_t gpu) { bulk_store_thread(rank.heaps[gpu] + begin, s_src, bytes); });
    if (task.keep_result) {
      bulk_store_thread(rank.heaps[rank.gpu] + epoch.buffer_begin(rank, Buffer::kResult) + offset, s_src, bytes);
    }
    bulk_commit_thread();
  }

  template <Kind kKind>
  __device__ __forceinline__ void move_bulk(const DeviceTask& task, RingPosition<Tile::kStages>& stage) const {
    const Slabs slabs(task, call.rank, Tile::kStageBytes);
    slabs.for_each([&](std::int32_t row, std::int32_t rows, std::int32_t unit, std::int32_t units) {
      Batch batch{std::int64_t{row} * slabs.row_units + unit, row, unit, units, rows * units, thread};
      s.full[stage.slot].wait(stage.phase);
      const std::uint32_t base = shared_address(s.stages[stage.slot]);
      for (; batch.begin < batch.count; batch.begin += kAtOnce * kConsumerThreads) {
        Bytes16 bits[kAtOnce];
        if constexpr (kKind == Kind::kCopy) {
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            bits[j] = ld_shared_16(base + batch.from(j) * 16);
          }
          put_units(task, batch, bits);
        } else {
          float sums[kAtOnce][8];
          add_units<fp32_sources(kKind)>(batch, base, slabs.sources, slabs.source_bytes, sums);
          if constexpr (kKind == Kind::kSumsFp32) {
            put_sums(task, batch, sums);
          } else {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) bits[j] = rounded(sums[j]);
            put_units(task, batch, bits);
          }
        }
      }
      release_warp(s.empty[stage.slot]);
      stage.advance();
    });
  }

  // Adds the sources in their order, in fp32.
  template <bool kFp32>
  __device__ __forceinline__ static void add_units(const Batch& batch, std::uint32_t base, std::int32_t sources,
                                                   std::int32_t source_bytes, float (&sums)[kAtOnce][8]) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      load_unit<kFp32>(base + batch.from(j) * (kFp32 ? 32 : 16), sums[j]);
    }
    for (std::int32_t source = 1; source < sources; ++source) {
      base += source_bytes;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float x[8];
        load_unit<kFp32>(base + batch.from(j) * (kFp32 ? 32 : 16), x);
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[j][e] += x[e];
      }
    }
  }

  __device__ __forceinline__ static void to_floats(Bytes16 v, float* x) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  }
  __device__ __forceinline__ static Bytes16 as_bits(const float* x) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
  }
  __device__ __forceinline__ static Bytes16 rounded(const float (&x)[8]) {
    return {pack_pair(x[0], x[1], T{}), pack_pair(x[2], x[3], T{}), pack_pair(x[4], x[5], T{}),
            pack_pair(x[6], x[7], T{})};
  }
  template <bool kFp32>
  __device__ __forceinline__ static void load_unit(std::uint32_t address, float (&x)[8]) {
    const Bytes16 low = ld_shared_16(address);
    if constexpr (kFp32) {
      to_floats(low, x);
      to_floats(ld_shared_16(address + 16), x + 4);
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

  // Calls f(gpu) for the GPUs whose `dst` the task writes, from the next one on, so that not all write to the same.
  template <class F>
  __device__ __forceinline__ void for_each_target(const DeviceTask& task, F f) const {
    const DeviceRank& rank = call.rank;
    const bool self_only = task.dst_reach == Reach::kSelf;
    const std::int32_t count = self_only ? 1 : task.dst_reach == Reach::kNode ? rank.gpus : rank.gpus - 1;
    std::int32_t gpu = self_only ? rank.gpu : rank.gpu + 1;
    for (std::int32_t i = 0; i < count; ++i, ++gpu) {
      if (gpu == rank.gpus) gpu = 0;
      f(gpu);
    }
  }
  __device__ __forceinline__ const DeviceMatrix& c_of(const DeviceTask& task, std::int32_t gpu) const {
    return task.dst_reach == Reach::kSelf ? call.c_matrix : s.c[gpu];
  }

  // Writes units of 8 elements to every place that the task names.
  __device__ __forceinline__ void put_units(const DeviceTask& task, const Batch& batch,
                                            const Bytes16 (&bits)[kAtOnce]) const {
    const DeviceRank& rank = call.rank;
    const std::int64_t packed = (task.dst_offset + (batch.first + batch.begin) * 8) * 2;
    if (task.dst == Buffer::kC) {
      put_c(task, batch, bits);
    } else {
      const std::int64_t offset = epoch.buffer_begin(rank, task.dst) + packed;
      for_each_target(task, [&](std::int32_t gpu) { put_packed(rank.heaps[gpu] + offset, batch, bits); });
    }
    if (task.keep_result) {
      put_packed(rank.heaps[rank.gpu] + epoch.buffer_begin(rank, Buffer::kResult) + packed, batch, bits);
    }
  }
  __device__ __forceinline__ static void put_packed(std::byte* p, const Batch& batch, const Bytes16 (&bits)[kAtOnce]) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (batch.has(j)) st_global_16(p + j * kConsumerThreads * 16, bits[j]);
    }
  }
  // The same for sums that stay fp32. They go to workspace only, and are not kept.
  __device__ __forceinline__ void put_sums(const DeviceTask& task, const Batch& batch,
                                           const float (&sums)[kAtOnce][8]) const {
    const std::int64_t offset =
        epoch.buffer_begin(call.rank, task.dst) + (task.dst_offset + (batch.first + batch.begin) * 8) * 4;
    for_each_target(task, [&](std::int32_t gpu) {
      std::byte* const p = call.rank.heaps[gpu] + offset;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (!batch.has(j)) continue;
        st_global_16(p + j * kConsumerThreads * 32, as_bits(sums[j]));
        st_global_16(p + j * kConsumerThreads * 32 + 16, as_bits(sums[j] + 4));
      }
    });
  }
  __device__ __forceinline__ void put_c(const DeviceTask& task, const Batch& batch,
                                        const Bytes16 (&bits)[kAtOnce]) const {
    const std::int32_t units = batch.units_per_row;
    const bool power_of_two = (units & (units - 1)) == 0;  // full tiles
    const std::int32_t shift = 31 - __clz(units);
    std::int32_t down[kAtOnce];
    std::int32_t across[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      down[j] = power_of_two ? batch.at(j) >> shift : batch.at(j) / units;
      across[j] = (batch.at(j) - down[j] * units) * 8;
    }
    for_each_target(task, [&](std::int32_t gpu) {
      const DeviceMatrix c = c_of(task, gpu);
      T* const first =
          static_cast<T*>(c.data) + (task.row + batch.row) * c.row_stride + (task.col + batch.unit * 8) * c.col_stride;
      if (c.wide != 0) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (batch.has(j)) st_global_16(first + down[j] * c.row_stride + across[j], bits[j]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (batch.has(j)) {
            put_elements(first + down[j] * c.row_stride + across[j] * c.col_stride, c.col_stride, bits[j]);
          }
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
