// The attention kernel: one CTA per SM, one warpgroup of service warps and two of consumers.
//
//   warp 0      producer  chooses tiles, waits for keys, loads queries, keys and values (TMA)
//   warp 1      mover     copies chunks of keys and values within the node
//   warp 2      sender    of the first CTA: hands network writes to the proxy
//   warps 4-11  consumers multiply, weigh, and write results
#pragma once
#include "exec/cuda/attention_consumer.cuh"
#include "exec/cuda/attention_kernel_table.h"
#include "exec/cuda/attention_mover.cuh"
#include "exec/cuda/attention_producer.cuh"

namespace mkernel {

template <class Config>
__device__ __forceinline__ void init_attention_thread(AttentionShared<Config>& s) {
  for (int i = 0; i < Config::kQStages; ++i) {
    s.q_full[i].init(1);
    s.q_empty[i].init(8);  // consumer warps
  }
  for (int i = 0; i < Config::kKvStages; ++i) {
    s.k_full[i].init(1);
    s.k_empty[i].init(8);
    s.v_full[i].init(1);
    s.v_empty[i].init(8);
  }
  s.patched.init(1);
  for (int i = 0; i < Config::kMoveStages; ++i) s.moved[i].init(1);
  fence_mbarrier_init();
}

// The last of all producers, movers and senders waits until the call is complete and prepares the next one.
// Consumers may still store their last results: the next launch starts after the end of this one.
__device__ __forceinline__ void leave_attention_warp(const AttentionCall& call, std::uint64_t epoch_number) {
  const DeviceRank& rank = call.rank;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t leavers = 2 * gridDim.x + 1;
  std::uint32_t before = 0;
  // order: what this warp has done with heads and claims comes before the count, and the last one sees all of it.
  __syncwarp();
  if (lane == 0) before = atom_add_acq_rel_gpu(&rank.control->exited, 1);
  before = __shfl_sync(kWholeWarp, before, 0);
  if (before != leavers - 1) return;
  if (lane == 0) rank.control->exited = 0;
  // Also for keys that no tile sees: a rank may then not be two calls ahead of another whose memory it writes.
  const EpochView epoch(epoch_number);
  AttentionPatience patience{rank};
  std::uint32_t leave = lane == 0 ? ld_relaxed_gpu(&rank.control->abort) : 0;
  leave = __shfl_sync(kWholeWarp, leave, 0);
  for (std::int32_t base = 0; base < call.step_count && leave == 0; base += 32) {
    const std::int32_t i = min(base + static_cast<std::int32_t>(lane), call.step_count - 1);
    const Wait wait{call.steps[i].flag, call.steps[i].count != 0 ? 1u : 0u, call.steps[i].count};
    for (;;) {
      const bool met = are_met(wait, {}, epoch.flag(rank, rank.gpu, 0), epoch.use);
      const std::uint32_t late = __ballot_sync(kWholeWarp, !met);
      if (late == 0) break;
      const int who = __ffs(static_cast<int>(late)) - 1;
      const std::uint32_t flag = __shfl_sync(kWholeWarp, wait.flag, who);
      const std::uint32_t count = __shfl_sync(kWholeWarp, wait.count, who);
      leave = patience.lasts(flag, count, static_cast<std::uint32_t>(Role::kCompute), kNoTask) ? 0 : 1;
      if (leave != 0) break;
    }
  }
  if (leave != 0) return;  // the world has failed: this epoch never ends
  fence_acquire_sys();     // order: what the flags vouch for comes before the call's end
  for (std::int32_t i = static_cast<std::int32_t>(lane); i < rank.lanes; i += 32) rank.heads[i].next = 0;
  if (lane == 0) {
    rank.control->of(epoch_number).end = global_time_ns();
    rank.control->of(epoch_number + 1) = {};
    rank.control->epoch = epoch_number;
  }
}

template <class Config, class T>
__global__ void __launch_bounds__(kAttentionThreads, 1) attention_kernel(const __grid_constant__ AttentionCall call) {
  extern __shared__ __align__(1024) std::byte raw[];
  auto& s = *reinterpret_cast<AttentionShared<Config>*>(raw);
  if (threadIdx.x == 32) {
    prefetch_map_thread(call.q);
    prefetch_map_thread(call.k);
    prefetch_map_thread(call.v);
  }
  if (threadIdx.x == 0) {
    s.epoch = ld_relaxed_gpu(&call.rank.control->epoch) + 1;
    init_attention_thread(s);
    if (blockIdx.x == 0) call.rank.control->of(s.epoch).start = global_time_ns();
  }
  // order: the barriers and the epoch, before every role.
  __syncthreads();
  const EpochView epoch(s.epoch);
  // From one thread, so that the compiler knows it to be the same for the warp.
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x / 32), 0);
  if (warp < 4) {
    give_registers_wg<Config::kServiceRegisters>();
    constexpr int kCompute = static_cast<int>(Role::kCompute);
    if (warp == 0) {
      DeviceTimes& times = call.rank.control->of(s.epoch);
      if (blockIdx.x == 0 && threadIdx.x == 0) times.first[kCompute] = global_time_ns();
      AttentionProducer<Config>{call, s, epoch}.run_warp();
      if (threadIdx.x == 0) times.last[kCompute] = global_time_ns();  // whoever is last
      leave_attention_warp(call, s.epoch);
    } else if (warp == 1) {
      AttentionMover<Config>{call, s, epoch}.run_warp();
      leave_attention_warp(call, s.epoch);
    } else if (warp == 2 && blockIdx.x == 0) {
      AttentionSender<Config>{call, s, epoch}.run_warp();
      leave_attention_warp(call, s.epoch);
    }
  } else {
    take_registers_wg<Config::kConsumerRegisters>();
    AttentionConsumer<Config, T>{call, s, epoch, warp / 4 - 1}.run_wg();
  }
}

}  // namespace mkernel
