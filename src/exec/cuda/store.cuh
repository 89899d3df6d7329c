// The store warps, one per consumer warpgroup: write finished boxes out by TMA, then raise the task's flags and hand the
// network writes that these complete to the proxy. Consumers need not wait for any of it.
#pragma once
#include "exec/cuda/device_push.cuh"
#include "exec/cuda/kernel_shared.cuh"
#include "net/record.h"

namespace mkernel {

template <class Tile>
struct Store {
  const DeviceCall& call;
  SharedMemory<Tile>& s;
  const int wg;  // the consumer warpgroup that this warp serves
  EpochView epoch{};
  const std::uint32_t lane = threadIdx.x % 32;
  RingPosition<2> in{0, 0};

  __device__ void run_warp() {
    RingPosition<kTaskRing> at;
    s.begun.wait(0);
    epoch = EpochView(s.epoch);
    bool counts = s.first_counts;
    for (bool more = true; more; at.advance()) {
      s.ring_full[at.slot].wait(at.phase);
      const DeviceTask& task = s.ring[at.slot];
      const bool signals =
          task.signals[0].gpu_begin != task.signals[0].gpu_end || task.signals[1].gpu_begin != task.signals[1].gpu_end;
      const bool is_product = task.action == DeviceAction::kGemm && call.k > 0;
      bool complete = counts;
      counts = true;
      if (complete && is_product && task.part.count > 1) {
        take_report_warp();
        complete = task.complete;
      }
      if (planted(Fault::kFlagFirst) && complete && signals) raise(task.signals[wg]);
      if (!complete) {
        // another CTA has this tile, or adds its parts up
      } else if (is_product && is_boxed(call, task) && is_tensor(call, task)) {
        if (Tile::stores(wg)) {  // else the other warpgroup has the results
          store_tile(task);
          if (signals && !planted(Fault::kNoStoreWait) && elect_thread()) bulk_wait_thread();
        }
      } else if (task.action == DeviceAction::kGemm || task.action == DeviceAction::kMove) {
        take_report_warp();
      }
      if (complete && signals) {
        // order: both warpgroups' halves come before either's signals.
        __syncwarp();
        named_barrier_sync(kStoreBarrier, 64);
        if (!planted(Fault::kFlagFirst)) raise(task.signals[wg]);
      }
      more = task.action != DeviceAction::kExit;
      __syncwarp();
      if (lane == 0) s.ring_empty[at.slot].arrive();
    }
    if (elect_thread()) bulk_wait_read_thread();  // the end of the kernel completes the rest
  }

 private:
  __device__ void take_report_warp() {
    // order: what the consumers have stored comes before our signals; pairs with Consumer::report().
    s.staged[wg][in.slot].wait(in.phase);
    // All threads have seen this phase before the consumers may begin the next: one that came late would find the
    // parity of the phase after that, and wait for ever.
    __syncwarp();
    if (lane == 0) s.unstaged[wg][in.slot].arrive();
    in.advance();
  }

  // The boxes of one tile, as the consumers hand them over.
  __device__ void store_tile(const DeviceTask& task) {
    const bool to_c = task.dst == Buffer::kC;
    const CUtensorMap& map = to_c ? call.c : call.packed[epoch.parity];
    const std::int32_t row = (to_c ? task.row : static_cast<std::int32_t>(task.dst_offset / Tile::kBn)) +
                             Tile::first_row(planted(Fault::kWrongHalf) ? 1 - wg : wg);
    const std::int32_t col = to_c ? task.col : 0;
    for (int box = 0; box < Tile::kBoxes; ++box) {
      // order: the consumers' writes to shared memory, fenced for the async proxy; pairs with Consumer::put_box().
      s.staged[wg][in.slot].wait(in.phase);
      if (elect_thread()) {
        tma_store_thread(map, s.staging[wg][in.slot], col + box * 64, row);
        bulk_commit_thread();
        // Two are under way: the one before has been read.
        bulk_wait_read_thread<1>();
        if (box > 0 && !planted(Fault::kNoCredit)) s.unstaged[wg][in.slot ^ 1].arrive();
      }
      in.advance();
    }
    if (elect_thread()) {
      bulk_wait_read_thread();
      s.unstaged[wg][in.slot ^ 1].arrive();
    }
  }

  // One GPU per thread.
  __device__ void raise(const DeviceSignal& signal) {
    if (planted(Fault::kNoSignal) && blockIdx.x == 0) return;
    for (std::int32_t gpu = signal.gpu_begin + static_cast<std::int32_t>(lane); gpu < signal.gpu_end; gpu += 32) {
      std::uint32_t* flag = epoch.flag(call.rank, gpu, signal.flag);
      if (signal.records > 0 && gpu == call.rank.gpu) {
        // order: as below; also acquires what the other raisers released, for the network reads all of it. Pairs with
        // the proxy's acquire of the record.
        const std::uint32_t before = signal.local != 0 ? atom_add_acq_rel_gpu(flag, 1) : atom_add_acq_rel_sys(flag, 1);
        const std::uint32_t wanted = epoch.use * signal.record_count;
        if (before + (planted(Fault::kRecordFirst) ? signal.record_count : 1) == wanted) push_records(signal);
      } else if (signal.local != 0) {
        // order: all that this CTA has stored for the task, before the flag; pairs with the scheduler's acquire fence.
        red_add_release_gpu(flag, 1);
      } else {
        red_add_release_sys(flag, 1);  // order: the same, for other GPUs
      }
    }
  }

  __device__ void push_records(const DeviceSignal& signal) {
    for (std::uint32_t i = 0; i < signal.records; ++i) {
      const DeviceRecord& entry = call.rank.records[signal.record + i];
      Record record;
      record.op = call.rank.op;
      record.epoch = static_cast<std::uint32_t>(s.epoch) & 0xff;
      record.task = entry.task;
      // A ring that stays full until the deadline makes everybody leave.
      const std::uint64_t begin = global_time_ns();
      if (push_record(call.rank.rings[entry.node], encode(record), begin + call.rank.deadline_ns,
                      &call.rank.control->abort)) {
        DeviceTimes& times = call.rank.control->of(s.epoch);
        times.last[static_cast<int>(Role::kSend)] = begin;
        if (times.first[static_cast<int>(Role::kSend)] == 0) times.first[static_cast<int>(Role::kSend)] = begin;
        continue;
      }
      report_full_ring(entry, global_time_ns() - begin);
      return;
    }
  }
  __device__ void report_full_ring(const DeviceRecord& entry, std::uint64_t waited_ns) {
    st_relaxed_sys(&call.rank.control->abort, 1);
    DeviceAbort& out = call.rank.mailbox->abort;
    if (atom_cas_relaxed_sys(&out.state, 0, 1) != 0) return;
    out.kind = static_cast<std::uint32_t>(DeviceAbortKind::kRingFull);
    out.role = static_cast<std::uint32_t>(Role::kSend);
    out.lane = entry.node;
    out.task = entry.task;
    out.epoch = s.epoch;
    out.waited_ns = waited_ns;
    st_release_sys(&out.state, 2);  // order: the fields above; pairs with the host's acquire of `state`
  }
};

}  // namespace mkernel
