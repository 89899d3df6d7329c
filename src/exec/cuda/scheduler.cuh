// The scheduler: one warp that chooses the CTA's next task, waits for what it waits for, and hands it to the others.
//
// Compute tasks are claimed in order and held until they are ready; meanwhile the CTA serves other lanes. A CTA's first
// one is that of its own number, so that it can be fetched before it is claimed; tickets number the rest. Moves are
// claimed one by one, only when they are ready. So no CTA ever sits on a task that others could do while
// it does nothing, and any set of resident CTAs, even one, gets through the whole plan: first tiles of CTAs that have
// not begun are taken by others in the end (no plan lets a tile wait for another one of the same rank).
#pragma once
#include "exec/cuda/kernel_shared.cuh"

namespace mkernel {

inline constexpr std::uint32_t kWholeWarp = 0xffffffffu;
inline constexpr std::uint64_t kHostPollNs = 1'000'000;  // reading pinned memory more often would slow the driver down

// True when every flag of both waits has reached its target. Only looks; fence_acquire_sys() then acquires. The first
// flags, mostly the only ones, are looked at together.
__device__ __forceinline__ bool are_met(const Wait& a, const Wait& b, const std::uint32_t* flags, std::uint32_t use) {
  if (planted(Fault::kNoWait)) return true;
  // A wait for nothing names flag 0.
  const std::uint32_t seen_a = ld_relaxed_sys(flags + a.flag);
  const std::uint32_t seen_b = ld_relaxed_sys(flags + b.flag);
  bool met =
      (a.span == 0 || flag_reached(seen_a, use * a.count)) && (b.span == 0 || flag_reached(seen_b, use * b.count));
  for (std::uint32_t i = 1; i < a.span && met; ++i) {
    met = flag_reached(ld_relaxed_sys(flags + a.flag + i), use * a.count);
  }
  for (std::uint32_t i = 1; i < b.span && met; ++i) {
    met = flag_reached(ld_relaxed_sys(flags + b.flag + i), use * b.count);
  }
  return met;
}

template <class Tile>
struct Scheduler {
  static constexpr std::uint32_t kNone = 0xffffffffu;

  const DeviceCall& call;
  SharedMemory<Tile>& s;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool mover = static_cast<std::int32_t>(blockIdx.x) >= call.compute_ctas;
  EpochView epoch{};
  const std::uint32_t* flags = nullptr;  // of this rank
  RingPosition<kTaskRing> at{0, 1};
  std::uint32_t picked_phase = 0;
  bool unpicked = false;       // the last task has not been picked up
  std::uint32_t claimed = kNone;    // row of the compute task that this CTA holds
  std::uint32_t claimed_word = 0;   // of that row, the word that this thread copies
  bool tickets_left = has_tickets(call);
  bool has_second = false;         // a move has been taken together with the last one
  std::uint32_t second_word = 0;
  std::uint32_t word = 0;  // of the row that is to be published
  bool compute_left = (call.parts & kPartCompute) != 0;
  bool moves_left = (call.parts & kPartMoves) != 0;
  bool c_known = false;
  bool tile_open = false;  // the last task was a tile, whose results the consumers may still hold
  std::uint64_t idle_since = 0;
  std::uint64_t host_polled = 0;

  // This thread's word of the row of the CTA's own tile. Asked for while the barriers are made, and while the kernel
  // before may still run: the table never changes.
  __device__ static std::uint32_t first_word(const DeviceCall& call) {
    return has_own_tile(call) ? word_of(call, call.rank.compute.first + blockIdx.x) : 0;
  }

  __device__ void run_warp(std::uint32_t first_word) {
    const bool own = has_own_tile(call);
    const bool early = own && publish_early(first_word);
    wait_for_stream();
    const bool ours = begin(own, early);
    if (own && ours && !early) {
      claimed = call.rank.compute.first + blockIdx.x;
      claimed_word = first_word;
    }
    if (early && ours) note_time(s.ring[0].marks, s.ring[0].role_lane);  // the slot is not used again before 8 tasks
    for (;;) {
      if (tile_open) settle();  // the next task is chosen late; after a move at once, while that is under way
      if (!next_row()) break;
      publish_row();
    }
    publish_mark(DeviceAction::kExit);
  }

 private:
  // Publishes the CTA's own tile before it is known to be free, if that waits for nothing and reads what does not depend
  // on the epoch. Its operands are on their way then; the consumers and store warps see to the rest.
  __device__ bool publish_early(std::uint32_t first_word) {
    DeviceTask& slot = s.ring[at.slot];
    reinterpret_cast<std::uint32_t*>(&slot)[lane] = first_word;
    __syncwarp();
    if (slot.src != Buffer::kA || slot.waits[0].span != 0 || slot.waits[1].span != 0) return false;
    tile_open = true;
    close_slot();
    return true;
  }

  // Finds out the epoch, and, with an own tile, whether that has not been taken by another CTA: false then. Tells the
  // other roles, and the node where C is.
  __device__ bool begin(bool own, bool early) {
    std::uint32_t before = 0;
    if (own && lane == 0) before = atom_add_relaxed_gpu(&call.rank.begun[blockIdx.x], 1);
    const std::uint64_t number = ld_relaxed_gpu(&call.rank.control->epoch) + 1;
    epoch = EpochView(number);
    flags = epoch.flag(call.rank, call.rank.gpu, 0);
    if (lane == 0) {
      s.epoch = number;
      s.first_counts = !early || before == 0;
      tell_c_thread(call, number);
      if (blockIdx.x == 0) call.rank.control->of(number).start = global_time_ns();
      s.begun.arrive();  // order: the above, before every role's first signal; pairs with their begun.wait()
    }
    __syncwarp();
    return __shfl_sync(kWholeWarp, before, 0) == 0;
  }

  // Waits until the producer has picked up the last task. Never more than one is ahead of it.
  __device__ void settle() {
    if (!unpicked) return;
    s.picked.wait(picked_phase);
    picked_phase ^= 1;
    unpicked = false;
  }

  // Puts the row of a ready task into `word`; false when there is none left or the run is aborted.
  __device__ bool next_row() {
    if (has_second) {
      has_second = false;
      word = second_word;
      return true;
    }
    idle_since = 0;
    for (;;) {
      if (mover ? try_moves() : try_compute()) return true;
      if (mover ? try_compute_as_mover() : try_moves()) return true;
      if (!compute_left && claimed == kNone && !moves_left) return false;
      // A tile in the consumers' registers may be what everybody waits for.
      if (tile_open && !planted(Fault::kNoFlush)) publish_flush();
      if (!keep_waiting()) return false;
    }
  }

  __device__ static bool has_own_tile(const DeviceCall& call) {
    return (call.parts & kPartCompute) != 0 && blockIdx.x < own_tiles(call);
  }
  // Tiles that belong to the CTA of their number, the first ones; tickets count on from there.
  __device__ static std::uint32_t own_tiles(const DeviceCall& call) {
    return min(static_cast<std::uint32_t>(call.compute_ctas), call.rank.compute.count);
  }
  __device__ static bool has_tickets(const DeviceCall& call) { return own_tiles(call) < call.rank.compute.count; }

  // This thread's word of a row: each copies one.
  __device__ static std::uint32_t word_of(const DeviceCall& call, std::uint32_t row) {
    static_assert(sizeof(DeviceTask) == 32 * sizeof(std::uint32_t));
    return reinterpret_cast<const std::uint32_t*>(&call.rank.tasks[row])[threadIdx.x % 32];
  }
  // One of the waits of the row whose words the warp holds.
  __device__ static Wait wait_of(std::uint32_t words, int which) {
    const int first = static_cast<int>(offsetof(DeviceTask, waits) + which * sizeof(Wait)) / 4;
    return {__shfl_sync(kWholeWarp, words, first), __shfl_sync(kWholeWarp, words, first + 1),
            __shfl_sync(kWholeWarp, words, first + 2)};
  }

  __device__ bool try_compute_as_mover() {
    // Movers leave tiles alone while moves may still come, for a tile takes long; unless nobody else computes.
    return (!moves_left || call.compute_ctas == 0) && try_compute();
  }

  __device__ bool try_compute() {
    if (claimed == kNone && compute_left) claim_tile();
    if (claimed == kNone) return false;
    const Wait first = wait_of(claimed_word, 0);
    const Wait other = wait_of(claimed_word, 1);
    if ((first.span | other.span) != 0) {
      // Every thread looks, and they may see different things.
      if (!__all_sync(kWholeWarp, are_met(first, other, flags, epoch.use))) return false;
      fence_acquire_sys();  // order: what the task reads comes after its flags; pairs with Store::raise(), the stamps
    }
    word = claimed_word;
    claimed = kNone;
    return true;
  }

  __device__ void claim_tile() {
    std::uint32_t tile = kNone;
    if (tickets_left) {
      if (lane == 0) tile = own_tiles(call) + atom_add_relaxed_gpu(&call.rank.heads[0].next, 1);
      tile = __shfl_sync(kWholeWarp, tile, 0);
      tickets_left = tile < call.rank.compute.count;
    }
    if (!tickets_left) tile = claim_unbegun();
    compute_left = tile != kNone;
    if (!compute_left) return;
    claimed = call.rank.compute.first + tile;
    claimed_word = word_of(call, claimed);
  }
  // The own tile of a CTA that has not begun, or kNone. As many are looked at together as an H200 has SMs.
  __device__ std::uint32_t claim_unbegun() const {
    constexpr int kAtOnce = 5;
    for (std::uint32_t base = lane; base - lane < own_tiles(call); base += 32 * kAtOnce) {
      std::uint32_t seen[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        seen[i] = 1;
        if (base + 32 * i < own_tiles(call)) seen[i] = ld_relaxed_gpu(&call.rank.begun[base + 32 * i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        bool free = seen[i] == 0;
        while (const std::uint32_t mask = __ballot_sync(kWholeWarp, free)) {
          const int one = __ffs(static_cast<int>(mask)) - 1;
          std::uint32_t before = 1;
          if (static_cast<int>(lane) == one) {
            before = atom_add_relaxed_gpu(&call.rank.begun[base + 32 * i], 1);
            free = false;
          }
          if (__shfl_sync(kWholeWarp, before, one) == 0) return base - lane + 32 * i + static_cast<std::uint32_t>(one);
        }
      }
    }
    return kNone;
  }

  // Threads look at the next tasks of all lanes of moves at once, some of each. Of the lanes that have a ready one the
  // first is served: what is to be sent (intra) goes before what has come (recv), or the wire would idle now and be the
  // last to finish (measured, H200, GEMM + AllReduce at balance: 1052 instead of 1302 us). CTAs choose different ones
  // of its ready tasks: if all wanted the first, one of them would get it per round trip to memory.
  __device__ bool try_moves() {
    if (!moves_left) return false;
    const std::int32_t move_lanes = call.rank.lanes - 1;
    std::int32_t each = 16;  // threads per lane
    while (each > 1 && each * move_lanes > 32) each /= 2;
    bool any_left = false;
    for (std::int32_t base = 0; base < move_lanes; base += 32 / each) {
      const std::int32_t i = 1 + base + static_cast<std::int32_t>(lane) / each;
      const std::int32_t ahead = static_cast<std::int32_t>(lane) % each;
      bool taken = false;
      bool ready = false;
      std::uint64_t before = 0;
      std::uint32_t head = 0;
      DeviceLane moves;
      if (i <= move_lanes) {
        moves = call.rank.lane_table[i];
        head = ld_relaxed_gpu(&call.rank.heads[i].next);  // no task before it is left
      }
      // From one thread of the lane: if one looked from a newer head than the others, it would take the tasks that they
      // have found taken for later ones, and move the head past some that are not.
      head = __shfl_sync(kWholeWarp, head, static_cast<int>(lane) - ahead);
      const bool in_lane = head + ahead < moves.count;
      const std::uint32_t row = moves.first + head + ahead;
      any_left = any_left || head + each < moves.count;  // beyond those that are looked at
      if (in_lane) {
        const DeviceTask& task = call.rank.tasks[row];
        const Wait first = task.waits[0];
        const Wait other = task.waits[1];
        before = ld_relaxed_gpu(&call.rank.claims[row]);
        taken = before == s.epoch;
        ready = !taken && are_met(first, other, flags, epoch.use);
      }
      any_left = __any_sync(kWholeWarp, any_left || (in_lane && !taken));
      advance_head(i, head, ahead, each, __ballot_sync(kWholeWarp, taken));
      std::uint32_t mask = __ballot_sync(kWholeWarp, ready);
      while (mask != 0) {
        const std::uint32_t wanted = choose(mask, each);
        mask &= ~wanted;
        if (claim(wanted, row, before)) return true;
      }
    }
    moves_left = any_left;
    return false;
  }

  // Claims the rows of the one or two threads in `wanted`. `before`: what the row's claim was when it was free.
  __device__ bool claim(std::uint32_t wanted, std::uint32_t row, std::uint64_t before) {
    const int one = __ffs(static_cast<int>(wanted)) - 1;
    const int other = 31 - __clz(static_cast<int>(wanted));
    // order: none, the task's data is ordered by its flags.
    const bool won =
        (wanted >> lane & 1) != 0 &&
        (atom_cas_relaxed_gpu(&call.rank.claims[row], before, s.epoch) == before || planted(Fault::kDoubleClaim));
    // The rows come while the claims are under way.
    const std::uint32_t one_word = word_of(call, __shfl_sync(kWholeWarp, row, one));
    const std::uint32_t other_word = one == other ? one_word : word_of(call, __shfl_sync(kWholeWarp, row, other));
    const std::uint32_t got = __ballot_sync(kWholeWarp, won);
    if (got == 0) return false;
    fence_acquire_sys();  // order: as in try_compute()
    word = (got >> one & 1) != 0 ? one_word : other_word;
    has_second = __popc(got) == 2;
    second_word = other_word;
    return true;
  }

  // Which of the ready tasks in `mask` to take, as bits of the threads that have them: of the first lane, others for
  // every CTA, movers the first ones. While there are many a mover takes two, since to find one takes about as long as
  // to do it.
  __device__ std::uint32_t choose(std::uint32_t mask, std::int32_t each) const {
    const std::uint32_t first = (__ffs(static_cast<int>(mask)) - 1) / each * each;
    const std::uint32_t of_lane = mask & (((1u << each) - 1) << first);
    const std::uint32_t count = __popc(of_lane);
    const std::uint32_t movers = gridDim.x - call.compute_ctas;
    const std::uint32_t number = mover ? blockIdx.x - call.compute_ctas : blockIdx.x + movers;
    const bool two = mover && count >= 2 * movers + 2;
    const std::uint32_t pick = nth_bit(of_lane, (two ? 2 * number : number) % count);
    return two ? pick | nth_bit(of_lane, 2 * number + 1) : pick;
  }
  __device__ static std::uint32_t nth_bit(std::uint32_t mask, std::uint32_t n) {
    for (; n > 0; --n) mask &= mask - 1;
    return mask & -mask;
  }

  // Moves a lane's head past tasks that are taken.
  __device__ void advance_head(std::int32_t i, std::uint32_t head, std::int32_t ahead, std::int32_t each,
                               std::uint32_t taken) const {
    if (ahead != 0 || i >= call.rank.lanes) return;
    const std::uint32_t of_lane = taken >> lane;
    const std::uint32_t passed = min(static_cast<std::uint32_t>(each), static_cast<std::uint32_t>(__ffs(~of_lane) - 1));
    // order: none, the head only saves others from looking at what is taken.
    if (passed > 0) red_max_relaxed_gpu(&call.rank.heads[i].next, head + passed);
  }

  __device__ DeviceTask& open_slot() {
    settle();
    s.ring_empty[at.slot].wait(at.phase);
    return s.ring[at.slot];
  }
  __device__ void close_slot() {
    // order: the slot, and what this warp has acquired, before the readers' work; pairs with their ring_full.wait().
    __syncwarp();
    if (lane == 0) s.ring_full[at.slot].arrive();
    at.advance();
    unpicked = true;
  }

  __device__ void publish_row() {
    DeviceTask& slot = open_slot();
    reinterpret_cast<std::uint32_t*>(&slot)[lane] = word;
    __syncwarp();
    tile_open = slot.action == DeviceAction::kGemm;
    if (!c_known && slot.dst == Buffer::kC && slot.dst_reach == Reach::kNode) learn_c();
    const std::uint8_t marks = slot.marks;  // the slot may be reused once it is closed
    const std::uint8_t role_lane = slot.role_lane;
    close_slot();
    note_time(marks, role_lane);
  }
  __device__ void note_time(std::uint8_t marks, std::uint8_t role_lane) const {
    if (marks == 0 || lane != 0) return;
    DeviceTimes& times = call.rank.control->of(s.epoch);
    const std::uint64_t now = global_time_ns();
    if ((marks & kFirstOfLane) != 0) times.first[role_lane & 3] = now;
    if ((marks & kLastOfLane) != 0) times.last[role_lane & 3] = now;
  }
  __device__ void publish_mark(DeviceAction action) {
    DeviceTask& slot = open_slot();
    reinterpret_cast<std::uint32_t*>(&slot)[lane] = 0;  // above all the signals of the task that was here before
    __syncwarp();
    if (lane == 0) slot.action = action;
    close_slot();
  }
  __device__ void publish_flush() {
    publish_mark(DeviceAction::kFlush);
    tile_open = false;
  }

  // Copies where the node's GPUs have their C. They all have said so by now: this task adds up what each of them made.
  __device__ void learn_c() {
    constexpr int kWords = sizeof(DeviceMatrix) / 4;
    for (std::int32_t gpu = 0; gpu < call.rank.gpus; ++gpu) {
      const auto* words = reinterpret_cast<const std::uint32_t*>(call.rank.c_slots[gpu] + (epoch.parity ^ planted(Fault::kOldC)));
      if (lane < kWords) reinterpret_cast<std::uint32_t*>(&s.c[gpu])[lane] = ld_relaxed_sys(words + lane);
    }
    c_known = true;
  }

  // --- waiting ---

  // False when the run is aborted, by this very wait where it has lasted too long.
  __device__ bool keep_waiting() {
    __nanosleep(40);
    std::uint32_t leave = 0;
    if (lane == 0) {
      const std::uint64_t now = global_time_ns();
      if (idle_since == 0) idle_since = host_polled = now;
      leave = ld_relaxed_gpu(&call.rank.control->abort);
      if (leave == 0 && now - host_polled > kHostPollNs) {
        host_polled = now;
        leave = ld_relaxed_sys(&call.rank.mailbox->leave);
      }
      if (leave == 0 && now - idle_since > call.rank.deadline_ns) {
        report_stall(now - idle_since);
        leave = 1;
      }
      if (leave != 0) st_relaxed_sys(&call.rank.control->abort, 1);
    }
    return __shfl_sync(kWholeWarp, leave, 0) == 0;
  }

  // Writes who waited for what into the mailbox, if nobody else has: the claimed tile, or the first
  // move that is not ready.
  __device__ void report_stall(std::uint64_t waited_ns) const {
    if (claimed != kNone) {
      if (report_task(claimed, waited_ns)) return;
    }
    for (std::int32_t i = 1; i < call.rank.lanes; ++i) {
      const DeviceLane moves = call.rank.lane_table[i];
      for (std::uint32_t next = ld_relaxed_gpu(&call.rank.heads[i].next); next < moves.count; ++next) {
        if (report_task(moves.first + next, waited_ns)) return;
      }
    }
  }
  __device__ bool report_task(std::uint32_t row, std::uint64_t waited_ns) const {
    const DeviceTask& task = call.rank.tasks[row];
    return report_unmet(call, task.waits[0], task.index, task.role_lane, waited_ns) ||
           report_unmet(call, task.waits[1], task.index, task.role_lane, waited_ns);
  }

 public:
  // False when all flags of `wait` are there. One thread.
  __device__ static bool report_unmet(const DeviceCall& call, const Wait& wait, std::uint32_t index,
                                      std::uint32_t role_lane, std::uint64_t waited_ns) {
    const std::uint64_t epoch_number = ld_relaxed_gpu(&call.rank.control->epoch) + 1;
    const EpochView view(epoch_number);
    for (std::uint32_t i = 0; i < wait.span; ++i) {
      const std::uint32_t seen = ld_relaxed_sys(view.flag(call.rank, call.rank.gpu, wait.flag + i));
      if (flag_reached(seen, view.use * wait.count)) continue;
      DeviceAbort& out = call.rank.mailbox->abort;
      if (atom_cas_relaxed_sys(&out.state, 0, 1) != 0) return true;
      out.kind = static_cast<std::uint32_t>(DeviceAbortKind::kFlag);
      out.role = role_lane & 3;
      out.lane = role_lane >> 2;
      out.task = index;
      out.flag = wait.flag + i;
      out.wanted = wait.count;
      out.seen = seen - (view.use - 1) * wait.count;
      out.epoch = epoch_number;
      out.waited_ns = waited_ns;
      st_release_sys(&out.state, 2);  // order: the fields above; pairs with the host's acquire of `state`
      return true;
    }
    return false;
  }
};

}  // namespace mkernel
