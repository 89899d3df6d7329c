// Shared memory of the persistent kernel, and what its roles have in common.
#pragma once
#include "base/check.h"
#include "exec/cuda/device_call.h"
#include "exec/cuda/kernel_config.h"
#include "exec/cuda/launch_parts.h"
#include "exec/cuda/sm90/atoms.cuh"
#include "exec/cuda/sm90/memory.cuh"

namespace mkernel {

template <class Tile>
struct SharedMemory {
  alignas(1024) std::byte stages[Tile::kStages][Tile::kStageBytes];  // operands of GEMM tiles; sources of moves
  alignas(1024) std::byte staging[2][2][kBoxBytes];                  // finished boxes, by consumer warpgroup, twice
  DeviceTask ring[kTaskRing];                                        // scheduler -> all
  DeviceMatrix c[kMaxGpusPerNode];  // the node's C, once a task that writes them is in the ring
  Mbarrier full[Tile::kStages];     // producer -> consumers
  Mbarrier empty[Tile::kStages];
  Mbarrier ring_full[kTaskRing];
  Mbarrier ring_empty[kTaskRing];
  Mbarrier picked;        // the producer has nearly done with the last task: time to choose the next
  Mbarrier staged[2][2];  // consumers -> store warp
  Mbarrier unstaged[2][2];
  Mbarrier begun;       // the scheduler knows these two:
  std::uint64_t epoch;  // of this run
  bool first_counts;    // false: the first task is a tile that another CTA had taken, to be forgotten
};

// The next task is chosen when this many k blocks of the current tile are left to load: late, so that tiles are shared
// out evenly at the end, but early enough (about 2 us) for the scheduler to find it.
inline constexpr std::int32_t kChooseAhead = 6;

inline constexpr int kRingReaders = 1 + 8 + 2;  // producer, consumer warps, store warps
inline constexpr int kStageReaders = 8;         // consumer warps
inline constexpr int kStoreBarrier = 1;         // named barrier of the two store warps
inline constexpr int kConsumerBarrier = 2;      // named barrier of both consumer warpgroups

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  delay_point();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What an epoch decides, in registers of whoever needs it.
struct EpochView {
  std::uint32_t parity = 0;
  std::uint32_t use = 0;

  EpochView() = default;  // not known yet
  __device__ explicit EpochView(std::uint64_t epoch)
      : parity(static_cast<std::uint32_t>(epoch & 1)), use(use_of_epoch(epoch)) {}

  __device__ std::int64_t buffer_begin(const DeviceRank& rank, Buffer buffer) const {
    const int b = static_cast<int>(buffer);
    return rank.buffer_begin[b] + (parity != 0 ? rank.buffer_parity_bytes[b] : 0);
  }
  // A flag in the heap of `gpu` of the node.
  __device__ std::uint32_t* flag(const DeviceRank& rank, std::int32_t gpu, std::uint32_t flag) const {
    auto* flags = reinterpret_cast<std::uint32_t*>(rank.heaps[gpu]);
    return flags + (parity != 0 ? rank.flag_count : 0u) + flag;
  }
};

// Tells the node's GPUs where this call's C is. Every CTA writes the same, before its first signal.
__device__ __forceinline__ void tell_c_thread(const DeviceCall& call, std::uint64_t epoch) {
  DeviceMatrix* slot = call.rank.c_slots[call.rank.gpu] + (epoch & 1);
  slot->data = call.c_matrix.data;
  slot->row_stride = call.c_matrix.row_stride;
  slot->col_stride = call.c_matrix.col_stride;
  slot->wide = call.c_matrix.wide;
}

// Whether a workspace buffer holds fp32; all else is 16-bit.
__device__ __forceinline__ bool is_fp32(const DeviceRank& rank, Buffer buffer) {
  return rank.partial_fp32 != 0 &&
         (buffer == Buffer::kPartial || buffer == Buffer::kNodePartial || buffer == Buffer::kArrival);
}

// A tile leaves through shared memory box by box, but for sums that stay fp32.
__device__ __forceinline__ bool is_boxed(const DeviceCall& call, const DeviceTask& task) {
  return !is_fp32(call.rank, task.dst);
}
// Whether a boxed tile is stored by TMA. Otherwise it goes to rows that TMA cannot write, or it ends within a box, and
// the consumers write it.
__device__ __forceinline__ bool is_tensor(const DeviceCall& call, const DeviceTask& task) {
  return task.path == Path::kTensor && (task.dst != Buffer::kC || call.c_matrix.wide != 0);
}

// Where a tile's element (0, 0) goes, and the strides from there, in elements.
struct TileTarget {
  std::byte* base;
  std::int64_t row_stride;
  std::int64_t col_stride = 1;

  __device__ TileTarget(const DeviceCall& call, const EpochView& epoch, const DeviceTask& task) {
    const DeviceRank& rank = call.rank;
    if (task.dst == Buffer::kC) {
      const DeviceMatrix& c = call.c_matrix;
      base = static_cast<std::byte*>(c.data) + (task.row * c.row_stride + task.col * c.col_stride) * 2;
      row_stride = c.row_stride;
      col_stride = c.col_stride;
    } else {
      base = rank.heaps[rank.gpu] + epoch.buffer_begin(rank, task.dst) +
             task.dst_offset * (is_fp32(rank, task.dst) ? 4 : 2);
      row_stride = task.cols;
    }
  }
  template <class Element>
  __device__ __forceinline__ Element* at(std::int32_t row, std::int32_t col) const {
    return reinterpret_cast<Element*>(base) + row * row_stride + col * col_stride;
  }
};

// How a move's rows are cut into pieces that fit a stage; producer and consumers go through the same sequence.
// A unit is 8 elements.
struct Slabs {
  std::int32_t sources = 1;
  std::int32_t unit_bytes = 16;
  std::int32_t rows = 0;
  std::int32_t row_units = 0;
  std::int32_t slab_rows = 1;     // rows per slab, or
  std::int32_t slab_units = 0;    // units of one row per slab
  std::int32_t source_bytes = 0;  // room for each source in a stage

  __device__ Slabs(const DeviceTask& task, const DeviceRank& rank, std::int32_t stage_bytes) {
    sources = task.source == Source::kNode ? rank.gpus : task.source == Source::kRail ? rank.nodes : 1;
    unit_bytes = is_fp32(rank, task.src) ? 32 : 16;
    rows = task.rows;
    row_units = task.cols >> 3;
    const std::int32_t room = stage_bytes / (sources * unit_bytes);
    slab_units = min(room, row_units);
    slab_rows = slab_units == row_units && row_units > 0 ? min(room / row_units, rows) : 1;
    source_bytes = room * unit_bytes;
  }
  // Calls f(first row, rows, first unit of the row, units of the row) for every slab.
  template <class F>
  __device__ __forceinline__ void for_each(F f) const {
    if (row_units == 0) return;
    for (std::int32_t row = 0; row < rows; row += slab_rows) {
      for (std::int32_t unit = 0; unit < row_units; unit += slab_units) {
        f(row, min(slab_rows, rows - row), unit, min(slab_units, row_units - unit));
      }
    }
  }
};

// Where source `i` of a move begins, in its stated order.
__device__ __forceinline__ const std::byte* source_address(const DeviceTask& task, const DeviceRank& rank,
                                                           const DeviceMatrix& a, const EpochView& epoch,
                                                           std::int32_t i) {
  const std::int64_t element = is_fp32(rank, task.src) ? 4 : 2;
  if (task.src == Buffer::kA) {
    return static_cast<const std::byte*>(a.data) + task.src_offset * a.row_stride * 2;
  }
  const std::int32_t gpu = task.source == Source::kNode ? i : rank.gpu;
  if (task.source != Source::kRail || i == rank.node) {
    return rank.heaps[gpu] + epoch.buffer_begin(rank, task.src) + task.src_offset * element;
  }
  const std::int32_t slot = i < rank.node ? i : i - 1;
  return rank.heaps[gpu] + epoch.buffer_begin(rank, Buffer::kArrival) +
         (task.arrivals.offset + slot * task.arrivals.stride) * element;
}

}  // namespace mkernel
