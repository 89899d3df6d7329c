// The persistent kernel: one CTA per SM, one warpgroup of service warps and two of consumers.
//
//   warp 0      producer   loads operands and sources into the stages (TMA)
//   warps 1, 2  store      write results out, raise flags, hand network writes to the proxy
//   warp 3      scheduler  chooses tasks and waits for their flags
//   warps 4-11  consumers  multiply and add
//
// Tasks go through one ring in shared memory, in which every role sees every task.
#pragma once
#include "exec/cuda/consumer.cuh"
#include "exec/cuda/producer.cuh"
#include "exec/cuda/scheduler.cuh"
#include "exec/cuda/store.cuh"

namespace mkernel {

// Registers per thread, multiples of 8: consumers hold a tile's sums and the results of the one before; the rest is for
// the service warps, which would else keep some of their words in memory.
template <class Tile>
inline constexpr int kConsumerRegisters = Tile::kBn > 128 ? 232 : 200;
template <class Tile>
inline constexpr int kServiceRegisters = Tile::kBn > 128 ? 40 : 104;
static_assert(128 * 40 + 256 * 232 <= 168 * kThreads && 128 * 104 + 256 * 200 <= 168 * kThreads);

template <class Tile>
__device__ __forceinline__ void init_shared_thread(SharedMemory<Tile>& s) {
  for (int i = 0; i < Tile::kStages; ++i) {
    s.full[i].init(1);
    s.empty[i].init(kStageReaders - planted(Fault::kWrongCount));
  }
  for (int i = 0; i < kTaskRing; ++i) {
    s.ring_full[i].init(1);
    s.ring_empty[i].init(kRingReaders);
  }
  s.picked.init(1);
  s.begun.init(1);
  for (int wg = 0; wg < 2; ++wg) {
    for (int i = 0; i < 2; ++i) {
      s.staged[wg][i].init(4);  // warps of the consumer warpgroup
      s.unstaged[wg][i].init(1);
    }
  }
  fence_mbarrier_init();
}

// The scheduler of the last CTA out waits until the call is complete and prepares the next one. Other warps may still
// store their last results: the next launch starts after the end of this one.
template <class Tile>
__device__ __forceinline__ void leave_warp(const DeviceCall& call, std::uint64_t epoch_number) {
  const DeviceRank& rank = call.rank;
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t before = 0;
  // order: what the scheduler has done with heads and claims comes before the count, and the last one sees all of it.
  __syncwarp();
  if (lane == 0) before = atom_add_acq_rel_gpu(&rank.control->exited, 1);
  before = __shfl_sync(0xffffffffu, before, 0);
  if (before != gridDim.x - 1) return;
  if (lane == 0) rank.control->exited = 0;
  if ((call.parts & kPartLast) == 0) return;
  const EpochView epoch(epoch_number);
  const std::uint32_t* flags = epoch.flag(rank, rank.gpu, 0);
  const std::uint64_t begin = global_time_ns();
  std::uint64_t host_polled = begin;
  bool leave = ld_relaxed_gpu(&rank.control->abort) != 0;
  for (std::uint32_t i = lane; i < rank.completion.span && !leave; i += 32) {
    const Wait wait{rank.completion.flag + i, 1, rank.completion.count};
    while (!leave && !are_met(wait, {}, flags, epoch.use)) {
      __nanosleep(100);
      const std::uint64_t now = global_time_ns();
      leave = ld_relaxed_gpu(&rank.control->abort) != 0;
      if (now - host_polled > kHostPollNs) {
        host_polled = now;
        leave = leave || ld_relaxed_sys(&rank.mailbox->leave) != 0;
      }
      if (!leave && now - begin > rank.deadline_ns) {
        Scheduler<Tile>::report_unmet(call, wait, kNoTask, 0, now - begin);
        leave = true;
      }
    }
  }
  if (rank.completion.span != 0) fence_acquire_sys();  // order: what the flags vouch for comes before the call's end
  leave = __any_sync(0xffffffffu, leave);
  if (leave) {
    if (lane == 0) st_relaxed_sys(&rank.control->abort, 1);
    return;  // the world has failed: this epoch never ends
  }
  for (std::int32_t i = static_cast<std::int32_t>(lane); i < rank.lanes; i += 32) {
    if (!planted(Fault::kHeadsKept)) rank.heads[i].next = 0;
  }
  for (std::int32_t i = static_cast<std::int32_t>(lane); i < rank.ctas; i += 32) {
    if (!planted(Fault::kBegunKept)) rank.begun[i] = 0;
  }
  if (lane == 0) {
    rank.control->of(epoch_number).end = global_time_ns();
    rank.control->of(epoch_number + 1) = {};
    rank.control->epoch = epoch_number - planted(Fault::kEpochKept);
  }
}

template <class Tile, class T, Major kMajorB>
__global__ void __launch_bounds__(kThreads, 1) persistent_kernel(const __grid_constant__ DeviceCall call) {
  extern __shared__ __align__(1024) std::byte raw[];
  auto& s = *reinterpret_cast<SharedMemory<Tile>*>(raw);
  // From one thread, so that the compiler knows it to be the same for the warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  if (threadIdx.x == 32) {
    prefetch_map_thread(call.a);
    prefetch_map_thread(call.b);
    prefetch_map_thread(call.c);
  }
  const std::uint32_t first_word = warp == 3 ? Scheduler<Tile>::first_word(call) : 0;
  if (threadIdx.x == 0) init_shared_thread(s);
  // A world of one rank waits for nobody, so its next call may have the SMs as they become free. In others it would
  // keep them from kernels that somebody waits for.
  if (call.rank.nodes * call.rank.gpus == 1) let_next_begin();
  __syncthreads();  // order: the barriers, before every role
  if (warp < 4) {
    give_registers_wg<kServiceRegisters<Tile>>();
    if (warp == 3) {
      Scheduler<Tile> scheduler{call, s};
      scheduler.run_warp(first_word);
      leave_warp<Tile>(call, s.epoch);
    } else if (warp == 0) {
      if (elect_thread()) Producer<Tile, kMajorB>{call, s}.run_thread();
    } else {
      Store<Tile>{call, s, warp - 1}.run_warp();
    }
  } else {
    take_registers_wg<kConsumerRegisters<Tile>>();
    Consumer<Tile, T, kMajorB>{call, s, warp / 4 - 1, static_cast<int>(threadIdx.x) - 128}.run_wg();
  }
}

}  // namespace mkernel
