// One warp of each CTA copies chunks of keys and values within the node, beside the arithmetic, and one warp of the
// first CTA hands network writes to the proxy when what they wait for is there.
#pragma once
#include "exec/cuda/attention_shared.cuh"
#include "exec/cuda/device_push.cuh"
#include "net/record.h"

namespace mkernel {

// Rests for a moment because of what the task in `row` of thread 0 waits for; kNoTask: for whatever. False: the call is
// aborted. By a whole warp.
__device__ __forceinline__ bool wait_for_row(const AttentionCall& call, const EpochView& epoch,
                                             AttentionPatience& patience, std::uint32_t row) {
  row = __shfl_sync(kWholeWarp, row, 0);
  if (row == kNoTask) return true;
  const DeviceTask& task = call.rank.tasks[row];
  const bool first = !are_met(task.waits[0], {}, epoch.flag(call.rank, call.rank.gpu, 0), epoch.use);
  const Wait& wait = task.waits[first ? 0 : 1];
  return patience.lasts(wait.flag, wait.count, task.role_lane, task.index);
}

template <class Config>
struct AttentionMover {
  static constexpr std::int32_t kAhead = 16;  // tasks of a lane that are looked at together
  static constexpr int kStages = Config::kMoveStages;

  const AttentionCall& call;
  AttentionShared<Config>& s;
  const EpochView epoch;
  const std::uint32_t lane = threadIdx.x % 32;
  AttentionPatience patience{call.rank};
  RingPosition<kStages> in{0, 0};   // the next slab to arrive
  RingPosition<kStages> out{0, 0};  // the next stage to be filled

  __device__ void run_warp() {
    for (;;) {
      std::uint32_t row = 0;
      bool left = false;
      if (take(row, left)) {
        patience.renew();
        if (elect_thread()) move_thread(call.rank.tasks[row]);
        __syncwarp();
      } else if (!left || !keep_waiting()) {
        break;
      }
    }
  }

 private:
  // Claims a copy that is ready. `left`: there are some that nobody has claimed.
  __device__ bool take(std::uint32_t& row, bool& left) {
    for (std::int32_t i = 0; i < call.move_lanes; ++i) {
      const DeviceLane moves = call.rank.lane_table[i];
      // No task before it is left. As one thread has seen it.
      const std::uint32_t head = __shfl_sync(kWholeWarp, ld_relaxed_gpu(&call.rank.heads[i].next), 0);
      const std::uint32_t index = head + lane;
      const bool in_lane = lane < kAhead && index < moves.count;
      std::uint64_t before = s.epoch;
      bool ready = false;
      if (in_lane) {
        const DeviceTask& task = call.rank.tasks[moves.first + index];
        before = ld_relaxed_gpu(&call.rank.claims[moves.first + index]);
        ready = before != s.epoch &&
                are_met(task.waits[0], task.waits[1], epoch.flag(call.rank, call.rank.gpu, 0), epoch.use);
      }
      const std::uint32_t taken = __ballot_sync(kWholeWarp, in_lane && before == s.epoch);
      left = left || __any_sync(kWholeWarp, in_lane && before != s.epoch) || head + kAhead < moves.count;
      // order: none, the head only saves others from looking at what is taken.
      const std::uint32_t passed = min(static_cast<std::uint32_t>(__ffs(static_cast<int>(~taken)) - 1), 32u);
      if (passed > 0 && lane == 0) red_max_relaxed_gpu(&call.rank.heads[i].next, head + passed);
      std::uint32_t mask = __ballot_sync(kWholeWarp, ready);
      while (mask != 0) {
        // CTAs want different ones: else one of them would get it per round trip to memory.
        const std::uint32_t wanted = nth_bit(mask, blockIdx.x % __popc(mask));
        mask &= ~wanted;
        const int who = __ffs(static_cast<int>(wanted)) - 1;
        bool won = false;
        if (static_cast<int>(lane) == who) {
          won = atom_cas_relaxed_gpu(&call.rank.claims[moves.first + index], before, s.epoch) == before;
        }
        if (!__any_sync(kWholeWarp, won)) continue;
        row = moves.first + head + static_cast<std::uint32_t>(who);
        // order: what is copied comes after its flags; pairs with the network's stamps. It was written for the generic
        // proxy.
        fence_acquire_sys();
        __syncwarp();
        fence_proxy_async();
        return true;
      }
    }
    return false;
  }
  __device__ static std::uint32_t nth_bit(std::uint32_t mask, std::uint32_t n) {
    for (; n > 0; --n) mask &= mask - 1;
    return mask & -mask;
  }

  // For the first copy that nobody has claimed. One thread looks for it, so that all go the same way.
  __device__ bool keep_waiting() {
    std::uint32_t row = kNoTask;
    for (std::int32_t i = 0; i < call.move_lanes && lane == 0 && row == kNoTask; ++i) {
      const DeviceLane moves = call.rank.lane_table[i];
      for (std::uint32_t next = ld_relaxed_gpu(&call.rank.heads[i].next); next < moves.count; ++next) {
        if (ld_relaxed_gpu(&call.rank.claims[moves.first + next]) == s.epoch) continue;
        row = moves.first + next;
        break;
      }
    }
    return wait_for_row(call, epoch, patience, row);
  }

  // --- copying ---

  // In slabs of whole rows: bulk loads into a stage, bulk stores out of it to every place.
  __device__ void move_thread(const DeviceTask& task) {
    const std::int32_t row_bytes = task.cols * 2;
    const std::int32_t slab_rows = Config::kMoveBytes / row_bytes;
    const std::int32_t slabs = (task.rows + slab_rows - 1) / slab_rows;
    const DeviceRank& rank = call.rank;
    const std::int64_t begin = epoch.buffer_begin(rank, Buffer::kKv) + task.dst_offset * 2;
    std::int64_t pitch = row_bytes;
    const std::byte* g_src = source(task, pitch);
    std::int32_t loaded = 0;
    for (std::int32_t slab = 0; slab < slabs; ++slab) {
      // The stage that is filled now was read for the slab before the last one.
      for (; loaded < slabs && loaded < slab + kStages - 1; ++loaded) {
        const std::int32_t first = loaded * slab_rows;
        const std::int32_t rows = min(slab_rows, task.rows - first);
        load_slab_thread(g_src + first * pitch, rows, row_bytes, pitch);
      }
      s.moved[in.slot].wait(in.phase);
      const std::int32_t bytes = min(slab_rows, task.rows - slab * slab_rows) * row_bytes;
      const std::int64_t offset = begin + std::int64_t{slab} * slab_rows * row_bytes;
      const bool peers = task.dst_reach == Reach::kPeers;
      for (std::int32_t i = peers ? 1 : 0; i < (peers ? rank.gpus : 1); ++i) {
        const std::int32_t gpu = (rank.gpu + i) % rank.gpus;
        bulk_store_thread(rank.heaps[gpu] + offset, s.move[in.slot], bytes);
      }
      bulk_commit_thread();
      bulk_wait_read_thread<1>();
      in.advance();
    }
    bulk_wait_thread();
    for (const DeviceSignal& signal : task.signals) raise_thread(task, signal);
    if (task.marks != 0) note_time_thread(task);
  }
  __device__ const std::byte* source(const DeviceTask& task, std::int64_t& pitch) const {
    const DeviceRank& rank = call.rank;
    if (task.src == Buffer::kKv) {
      return rank.heaps[rank.gpu] + epoch.buffer_begin(rank, Buffer::kKv) + task.src_offset * 2;
    }
    const AttentionView& view = task.src == Buffer::kK ? call.k_view : call.v_view;
    pitch = view.token_stride * 2;
    const std::int32_t batch = task.col / call.kv_heads;
    return static_cast<const std::byte*>(view.data) + offset_in(view, batch, task.col % call.kv_heads, task.row) * 2;
  }
  __device__ void load_slab_thread(const std::byte* g_src, std::int32_t rows, std::int32_t row_bytes,
                                   std::int64_t pitch) {
    Mbarrier& full = s.moved[out.slot];
    full.arrive_and_expect(static_cast<std::uint32_t>(rows * row_bytes));
    if (pitch == row_bytes) {
      bulk_load_thread(s.move[out.slot], g_src, rows * row_bytes, full);
    } else {
      for (std::int32_t r = 0; r < rows; ++r) {
        bulk_load_thread(s.move[out.slot] + r * row_bytes, g_src + r * pitch, row_bytes, full);
      }
    }
    out.advance();
  }

  __device__ void raise_thread(const DeviceTask& task, const DeviceSignal& signal) const {
    for (std::int32_t gpu = signal.gpu_begin; gpu < signal.gpu_end; ++gpu) {
      if (signal.local == 0 && task.dst_reach == Reach::kPeers && gpu == call.rank.gpu) continue;
      std::uint32_t* flag = epoch.flag(call.rank, gpu, signal.flag);
      // order: all that this thread has copied, before the flag; pairs with the acquire fences of who waits for it.
      if (signal.local != 0) {
        red_add_release_gpu(flag, 1);
      } else {
        red_add_release_sys(flag, 1);
      }
    }
  }
  __device__ void note_time_thread(const DeviceTask& task) const {
    DeviceTimes& times = call.rank.control->of(s.epoch);
    const std::uint64_t now = global_time_ns();
    if ((task.marks & kFirstOfLane) != 0) times.first[task.role_lane & 3] = now;
    if ((task.marks & kLastOfLane) != 0) times.last[task.role_lane & 3] = now;
  }
};

// Lanes of network writes, one per thread at a time: each in its order.
template <class Config>
struct AttentionSender {
  const AttentionCall& call;
  AttentionShared<Config>& s;
  const EpochView epoch;
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x % 32);
  AttentionPatience patience{call.rank};

  __device__ void run_warp() {
    for (bool left = true; left;) {
      left = false;
      bool sent = false;
      for (std::int32_t base = 0; base < call.send_lanes; base += 32) {
        const std::int32_t i = base + thread;
        bool mine = false;
        if (i < call.send_lanes) sent = send_thread(call.move_lanes + i, mine) || sent;
        left = __any_sync(kWholeWarp, mine) || left;
      }
      if (__any_sync(kWholeWarp, sent)) {
        patience.renew();
      } else if (left && !keep_waiting()) {
        return;
      }
    }
  }

 private:
  // Sends what is ready of a lane. `left`: not all of it was.
  __device__ bool send_thread(std::int32_t i, bool& left) {
    const DeviceLane sends = call.rank.lane_table[i];
    std::uint32_t& next = call.rank.heads[i].next;  // only this thread's
    const std::uint32_t first = next;
    std::uint32_t at = first;
    for (; at < sends.count; ++at) {
      const DeviceTask& task = call.rank.tasks[sends.first + at];
      if (!are_met(task.waits[0], task.waits[1], epoch.flag(call.rank, call.rank.gpu, 0), epoch.use)) break;
      fence_acquire_sys();  // order: what others have staged, before the record; pairs with AttentionMover's signals
      if (!push_thread(task)) break;
    }
    next = at;
    left = at < sends.count;
    return at > first;
  }
  __device__ bool push_thread(const DeviceTask& task) {
    const auto node = static_cast<std::uint32_t>(task.col);
    Record record;
    record.op = call.rank.op;
    record.epoch = static_cast<std::uint32_t>(s.epoch) & 0xff;
    record.task = static_cast<std::uint32_t>(task.row);
    const std::uint64_t begin = global_time_ns();
    if (push_record(call.rank.rings[node], encode(record), begin + call.rank.deadline_ns, &call.rank.control->abort)) {
      DeviceTimes& times = call.rank.control->of(s.epoch);
      times.last[static_cast<int>(Role::kSend)] = begin;
      if (times.first[static_cast<int>(Role::kSend)] == 0) times.first[static_cast<int>(Role::kSend)] = begin;
      return true;
    }
    st_relaxed_sys(&call.rank.control->abort, 1);
    DeviceAbort& out = call.rank.mailbox->abort;
    if (atom_cas_relaxed_sys(&out.state, 0, 1) != 0) return false;
    out.kind = static_cast<std::uint32_t>(DeviceAbortKind::kRingFull);
    out.role = static_cast<std::uint32_t>(Role::kSend);
    out.lane = node;
    out.task = record.task;
    out.epoch = s.epoch;
    out.waited_ns = global_time_ns() - begin;
    st_release_sys(&out.state, 2);  // order: the fields above; pairs with the host's acquire of `state`
    return false;
  }
  // For the first lane's next write. One thread looks for it, so that all go the same way.
  __device__ bool keep_waiting() {
    std::uint32_t row = kNoTask;
    for (std::int32_t i = call.move_lanes; i < call.move_lanes + call.send_lanes && thread == 0; ++i) {
      const DeviceLane sends = call.rank.lane_table[i];
      const std::uint32_t next = ld_relaxed_gpu(&call.rank.heads[i].next);
      if (next >= sends.count) continue;
      row = sends.first + next;
      break;
    }
    return wait_for_row(call, epoch, patience, row);
  }
};

}  // namespace mkernel
