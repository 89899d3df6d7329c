// The consumers: two warpgroups that multiply tiles and add up what moves bring (mover.cuh). They know no plan.
//
// A finished tile is packed into registers and stored box by box behind the first k blocks of the next tile, so that
// its epilogue hides under that tile's multiplications. The scheduler sends a flush before it waits.
#pragma once
#include "exec/cuda/mover.cuh"

namespace mkernel {

template <class Tile, class T, Major kMajorB>
struct Consumer {
  static constexpr int kCols = Tile::kBn;
  using Mma = Wgmma<T, kCols, kMajorB>;

  const DeviceCall& call;
  SharedMemory<Tile>& s;
  const int wg;      // 0 or 1
  const int thread;  // 0..255, of both warpgroups
  EpochView epoch{};
  RingPosition<Tile::kStages> stage{0, 0};
  RingPosition<2> out{0, 1};

  __device__ __forceinline__ void run_wg() {
    float acc[kCols / 2];           // (64, BN) over the warpgroup, as wgmma lays it out
    std::uint32_t held[kCols / 4];  // the last tile's results, packed in the same order
    bool holding = false;
    bool begun = false;
    RingPosition<kTaskRing> at;
    for (bool more = true; more; at.advance()) {
      s.ring_full[at.slot].wait(at.phase);
      DeviceTask& task = s.ring[at.slot];
      if (task.action == DeviceAction::kGemm && call.k > 0) {
        // From one thread, so that the compiler knows them to be the same for the warp: else it would let no two wgmma
        // be under way at a time (ptxas' C7518).
        const std::int32_t blocks = __shfl_sync(0xffffffffu, task.part.blocks, 0);
        multiply(acc, held, holding, blocks);
        bool complete = begin(begun);
        if constexpr (Tile::kHasParts) {
          const std::int32_t parts = __shfl_sync(0xffffffffu, std::int32_t{task.part.count}, 0);
          complete = complete && (parts == 1 || add_parts(task, acc));
        }
        const bool tensor = is_boxed(call, task) && is_tensor(call, task);
        holding = complete && tensor && Tile::stores(wg);
        if (holding) {
          pack(acc, held);
        } else if (complete && !tensor) {
          if (!is_boxed(call, task)) {
            store_fp32(task, acc);
          } else if (Tile::stores(wg)) {
            write_boxes(task, acc);
          }
          report();
        }
      } else {
        if (holding) {
#pragma unroll
          for (int box = 0; box < Tile::kBoxes; ++box) put_box(box, held);
        }
        holding = false;
        const bool counts = begin(begun);
        if (task.action == DeviceAction::kMove) {
          Mover<Tile, T>{call, s, epoch, thread}.move(task, stage);
          report();
        }
        if (task.action == DeviceAction::kGemm && counts) store_zeros(task);  // K is 0
        more = task.action != DeviceAction::kExit;
      }
      release_warp(s.ring_empty[at.slot]);
    }
  }

 private:
  // False if this is the first task and does not count.
  __device__ __forceinline__ bool begin(bool& begun) {
    if (begun) return true;
    begun = true;
    s.begun.wait(0);
    epoch = EpochView(s.epoch);
    return s.first_counts;
  }

  // acc = A * B of this warpgroup's rows of the tile and `blocks` (at least 1) of K; the held tile is stored on the
  // way.
  __device__ __forceinline__ void multiply(float (&acc)[kCols / 2], const std::uint32_t (&held)[kCols / 4],
                                           bool holding, std::int32_t blocks) {
    std::uint32_t last = 0;
    std::int32_t k = first_block(acc, last, blocks);
    // One box behind each of the first k blocks: all behind one would hold the tensor cores up.
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      if (box > 0 && k < blocks) k = next_block(acc, last, k, blocks);
      if (holding) put_box(box, held);
    }
    while (k < blocks) k = next_block(acc, last, k, blocks);
    cute::warpgroup_wait<0>();
    fence_registers(acc);
    release_warp(s.empty[last]);
    if constexpr (Tile::kSplitK) {
      if (blocks > 1) add_halves(acc);
    }
  }

  // Frees a stage that the other warpgroup multiplies. It is waited for all the same: a thread that skips phases of a
  // barrier may find the parity it waits for in a phase too early.
  __device__ __forceinline__ void skip_block() {
    s.full[stage.slot].wait(stage.phase);
    release_warp(s.empty[stage.slot]);
    stage.advance();
  }
  // Both return the number of blocks that are behind.
  __device__ __forceinline__ std::int32_t first_block(float (&acc)[kCols / 2], std::uint32_t& last,
                                                      std::int32_t blocks) {
    // With one block only, the second warpgroup multiplies it too, and its result is not added.
    const bool skips = Tile::kSplitK && wg == 1 && blocks > 1;
    if (skips) skip_block();
    last = start_block(acc, false);
    return skips ? 2 : 1;
  }
  __device__ __forceinline__ std::int32_t next_block(float (&acc)[kCols / 2], std::uint32_t& last, std::int32_t k,
                                                     std::int32_t blocks) {
    if constexpr (Tile::kSplitK) {
      skip_block();
      if (++k == blocks) return k;
    }
    const std::uint32_t slot = start_block(acc, true);
    // The block before is done when at most the new one is under way.
    cute::warpgroup_wait<1>();
    release_warp(s.empty[last]);
    last = slot;
    return k + 1;
  }

  // Starts the multiplications of the current stage's block, and returns its slot.
  __device__ __forceinline__ std::uint32_t start_block(float (&acc)[kCols / 2], bool add) {
    const std::uint32_t slot = stage.slot;
    if (!planted(Fault::kNoLoadWait)) s.full[slot].wait(stage.phase);
    const std::uint32_t base = shared_address(s.stages[slot]);
    const std::uint64_t a = operand_descriptor<Major::kK>(base + Tile::first_row(wg) * 128);
    const std::uint64_t b = operand_descriptor<kMajorB>(base + Tile::kABytes);
    fence_registers(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      Mma::mma_wg(a + step * kDescriptorStepK<Major::kK>, b + step * kDescriptorStepK<kMajorB>, acc, add || step > 0);
    }
    cute::warpgroup_commit_batch();
    stage.advance();
    return slot;
  }

  // Warpgroup 0 adds what warpgroup 1 has got from its blocks of K, 32 registers at a time through that one's staging.
  __device__ __forceinline__ void add_halves(float (&acc)[kCols / 2]) {
    auto* s_half = reinterpret_cast<float*>(&s.staging[1][0][0]) + threadIdx.x % 128;  // (32, 128)
#pragma unroll
    for (int begin = 0; begin < kCols / 2; begin += 32) {
      if (wg == 1) {
#pragma unroll
        for (int i = 0; i < 32; ++i) s_half[i * 128] = acc[begin + i];
      }
      named_barrier_sync(kConsumerBarrier, kConsumerThreads);
      if (wg == 0) {
#pragma unroll
        for (int i = 0; i < 32; ++i) acc[begin + i] += s_half[i * 128];
      }
      named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    }
  }

  // Leaves the sums of a part of a tile in memory, and adds all parts up, in the order of K, if this is the last one to
  // be finished: true then.
  __device__ __forceinline__ bool add_parts(DeviceTask& task, float (&acc)[kCols / 2]) {
    constexpr int kGroups = kCols / 8;  // of four accumulators: those of 8 columns, 2 rows
    constexpr int kAtOnce = 8;
    TilePart part = task.part;
    if (planted(Fault::kPartOrder)) part.number = part.count - 1 - part.number;
    const std::int32_t first_row = Tile::first_row(wg) + threadIdx.x / 32 % 4 * 16;  // of this warp
    const int groups = Tile::stores(wg) && first_row < task.rows ? (task.cols + 7) / 8 : 0;
    float4* const g_first = reinterpret_cast<float4*>(call.rank.part_sums) +
                            std::int64_t{part.slot} * kGroups * kConsumerThreads + thread;
    float4* const g_own = g_first + part.number * kGroups * kConsumerThreads;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i >= groups) continue;
      g_own[i * kConsumerThreads] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
    }
    named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    if (thread == 0) {
      // order: the parts' sums come before the count, and whoever sees it full sees all of them.
      task.complete = atom_add_acq_rel_gpu(&call.rank.parts_done[part.slot], 1) + 1 == part.count;
      if (task.complete && !planted(Fault::kPartsKept)) call.rank.parts_done[part.slot] = 0;
    }
    named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    const bool complete = task.complete;
    report();
    if (!complete) return false;
#pragma unroll
    for (int begin = 0; begin < kGroups; begin += kAtOnce) {
      if (begin >= groups) continue;
      float4 sum[kAtOnce] = {};
      const auto load = [&](int p, float4(&next)[kAtOnce]) {
        const float4* g_part = g_first + (std::int64_t{p} * kGroups + begin) * kConsumerThreads;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float* own = &acc[4 * (begin + i)];
          next[i] =
              p == part.number ? float4{own[0], own[1], own[2], own[3]} : ld_relaxed_gpu(g_part + i * kConsumerThreads);
        }
      };
      const auto add = [&](int p, const float4(&next)[kAtOnce]) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          sum[i].x = p == 0 ? next[i].x : sum[i].x + next[i].x;
          sum[i].y = p == 0 ? next[i].y : sum[i].y + next[i].y;
          sum[i].z = p == 0 ? next[i].z : sum[i].z + next[i].z;
          sum[i].w = p == 0 ? next[i].w : sum[i].w + next[i].w;
        }
      };
      // Two parts are on their way together.
      for (int p = 0; p < part.count; p += 2) {
        float4 one[kAtOnce];
        float4 other[kAtOnce];
        load(p, one);
        load(min(p + 1, part.count - 1), other);
        add(p, one);
        if (p + 1 < part.count) add(p + 1, other);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        acc[4 * (begin + i)] = sum[i].x;
        acc[4 * (begin + i) + 1] = sum[i].y;
        acc[4 * (begin + i) + 2] = sum[i].z;
        acc[4 * (begin + i) + 3] = sum[i].w;
      }
    }
    return true;
  }

  __device__ __forceinline__ void pack(const float (&acc)[kCols / 2], std::uint32_t (&held)[kCols / 4]) const {
#pragma unroll
    for (int i = 0; i < kCols / 4; ++i) {
      held[i] = pack_pair(acc[2 * i], acc[2 * i + 1], T{});
      cute::warpgroup_fence_operand(held[i]);  // packs now, or the compiler would keep the accumulators
    }
  }

  // Hands 64 columns of the held tile to the store warp: (64, 64) in 128-byte swizzle, 16 rows by each warp.
  __device__ __forceinline__ void put_box(int box, const std::uint32_t (&held)[kCols / 4]) {
    s.unstaged[wg][out.slot].wait(out.phase);
    std::uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = held[box * 16 + i];
    stage_warp(words);
    fence_shared_to_async();
    release_warp(s.staged[wg][out.slot]);
    out.advance();
  }

  // This warp's part of a box: `words` are its packed results, four for each 16 columns.
  __device__ __forceinline__ void stage_warp(const std::uint32_t (&words)[16]) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t matrix = lane / 8;
    const std::uint32_t row = matrix % 2 * 8 + lane % 8;
    const std::uint32_t address = shared_address(warp_staging()) + row * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t chunk = (j * 2 + matrix / 2) ^ (row & 7);
      store_matrix_x4(address + chunk * 16, words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
    }
  }
  __device__ __forceinline__ std::byte* warp_staging() {
    return s.staging[wg][out.slot] + threadIdx.x / 32 % 4 * 2048;
  }

  // A tile that TMA cannot store (odd pitch, or it ends within a box), box by box through this warp's own staging.
  __device__ __forceinline__ void write_boxes(const DeviceTask& task, const float (&acc)[kCols / 2]) {
    const TileTarget target(call, epoch, task);
    const std::int32_t row0 = Tile::first_row(wg) + threadIdx.x / 32 % 4 * 16;
    const std::int32_t rows = min(16, task.rows - row0);
    s.unstaged[wg][out.slot].wait(out.phase);  // the store warp has done with what was there
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      const std::int32_t cols = min(64, task.cols - planted(Fault::kClippedShort) - box * 64);
      if (rows <= 0 || cols <= 0) break;
      std::uint32_t words[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) words[i] = pack_pair(acc[box * 32 + 2 * i], acc[box * 32 + 2 * i + 1], T{});
      stage_warp(words);
      __syncwarp();
      auto* g_box = target.template at<std::uint16_t>(row0, box * 64);
      if (target.col_stride == 1) {
        write_rows_warp(g_box, target.row_stride, rows, cols);
      } else {
        write_elements_warp(g_box, target, rows, cols);
      }
      __syncwarp();  // all have read the box
    }
  }
  // Two elements per thread and row, those that share a word of memory.
  __device__ __forceinline__ void write_rows_warp(std::uint16_t* g_box, std::int64_t row_stride, std::int32_t rows,
                                                  std::int32_t cols) {
    constexpr int kAtOnce = 8;
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::byte* s_word = warp_staging() + lane % 4 * 4;
    for (std::int32_t base = 0; base < rows; base += kAtOnce) {
      std::uint32_t pairs[kAtOnce];
      std::uint32_t shifted[kAtOnce];
#pragma unroll
      for (std::int32_t r = 0; r < kAtOnce; ++r) {
        pairs[r] = *reinterpret_cast<const std::uint32_t*>(s_word + (base + r) * 128 + ((lane / 4) ^ r) * 16);
      }
#pragma unroll
      for (std::int32_t r = 0; r < kAtOnce; ++r) {
        shifted[r] = __funnelshift_r(pairs[r], __shfl_down_sync(0xffffffffu, pairs[r], 1), 16);
      }
#pragma unroll
      for (std::int32_t r = 0; r < kAtOnce; ++r) {
        const bool odd = (reinterpret_cast<std::uintptr_t>(g_box) & 2) != 0;
        const bool inside = base + r < rows;
        const std::int32_t col = 2 * lane + (odd ? 1 : 0);
        const std::uint32_t pair = odd ? shifted[r] : pairs[r];
        if (inside && odd && lane == 0) g_box[0] = static_cast<std::uint16_t>(pairs[r]);
        if (inside && col + 1 < cols) *reinterpret_cast<std::uint32_t*>(g_box + col) = pair;
        if (inside && col + 1 == cols) g_box[col] = static_cast<std::uint16_t>(pair);
        g_box += row_stride;
      }
    }
  }
  // Any strides, one element per thread: 16 rows of two columns.
  __device__ __forceinline__ void write_elements_warp(std::uint16_t* g_box, const TileTarget& target,
                                                      std::int32_t rows, std::int32_t cols) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int32_t row = lane % 16;
    const std::byte* s_row = warp_staging() + row * 128;
    for (std::int32_t col = lane / 16; col < cols && row < rows; col += 2) {
      g_box[row * target.row_stride + col * target.col_stride] =
          *reinterpret_cast<const std::uint16_t*>(s_row + ((col / 8) ^ (row & 7)) * 16 + col % 8 * 2);
    }
  }

  // Tells the store warp that this warpgroup's results are in global memory, or what has become of a part.
  __device__ __forceinline__ void report() {
    s.unstaged[wg][out.slot].wait(out.phase);
    release_warp(s.staged[wg][out.slot]);
    out.advance();
  }

  // Sums that stay fp32, straight from the accumulators.
  __device__ __forceinline__ void store_fp32(const DeviceTask& task, const float (&acc)[kCols / 2]) {
    const std::int32_t lane = threadIdx.x % 32;
    const std::int32_t row0 = Tile::first_row(wg) + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const std::int32_t col0 = lane % 4 * 2;
    const TileTarget target(call, epoch, task);
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      const std::int32_t row = row0 + i / 2 % 2 * 8;
      const std::int32_t col = col0 + i / 4 * 8 + i % 2;
      if (Tile::stores(wg) && row < task.rows && col < task.cols) *target.at<float>(row, col) = acc[i];
    }
  }
  __device__ void store_zeros(const DeviceTask& task) {
    const TileTarget target(call, epoch, task);
    const bool boxed = is_boxed(call, task);
    for (std::int32_t i = thread; i < task.rows * task.cols; i += kConsumerThreads) {
      const std::int32_t row = i / task.cols;
      const std::int32_t col = i % task.cols;
      if (boxed) {
        *target.at<std::uint16_t>(row, col) = 0;
      } else {
        *target.at<float>(row, col) = 0;
      }
    }
    report();
  }
};

}  // namespace mkernel
