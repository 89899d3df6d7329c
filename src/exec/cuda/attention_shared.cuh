// Shared memory of the attention kernel, and what its roles have in common.
#pragma once
#include "exec/cuda/attention_call.h"
#include "exec/cuda/attention_config.h"
#include "exec/cuda/mover.cuh"
#include "exec/cuda/scheduler.cuh"
#include "exec/cuda/sm90/attention_atoms.cuh"

namespace mkernel {

// What the consumers know of the keys in a stage.
struct alignas(16) AttentionControl {
  std::uint32_t flags = 0;  // of the enumeration below
  std::int32_t key = 0;     // place of the stage's first key in the whole sequence
  std::int32_t end = 0;     // keys from here on are not there
  std::int32_t number = 0;  // of the tile
  // The tile, at its run's first keys.
  std::int32_t token = 0;
  std::int32_t rows = 0;
  std::int32_t head = 0;
  std::int32_t batch = 0;
};
enum AttentionFlag : std::uint32_t {
  kLastKeys = 1,    // of this run of the tile
  kParkTile = 2,    // at its end the state goes to memory
  kDropTile = 4,    // or nowhere: the call is aborted
  kResumeTile = 8,  // at its beginning the state comes from memory
  kMaskKeys = 16,   // of a run's first keys: not all are seen by all
  kMaskNext = 32,   // the same of the next keys of the run
  kNoKeys = 64,     // nobody sees a key; this stage is empty
  kLeave = 128,
};

template <class Config>
struct AttentionShared {
  alignas(1024) std::byte q[Config::kQStages][Config::kQBytes];    // (128, 64) boxes
  alignas(1024) std::byte k[Config::kKvStages][Config::kKvBytes];  // (keys, 64) boxes
  alignas(1024) std::byte v[Config::kKvStages][Config::kKvBytes];
  alignas(128) std::byte move[Config::kMoveStages][Config::kMoveBytes];  // copies on their way
  int2 ranges[Config::kQStages][kAttentionRows];  // by row: which keys it sees, [x, y), in the whole sequence
  AttentionControl control[Config::kKvStages];    // of the keys in `k`
  std::uint16_t next_step[kOpenTiles];            // by tile of this CTA; see AttentionProducer
  Mbarrier q_full[Config::kQStages];              // producer -> consumers
  Mbarrier q_empty[Config::kQStages];
  Mbarrier k_full[Config::kKvStages];
  Mbarrier k_empty[Config::kKvStages];
  Mbarrier v_full[Config::kKvStages];
  Mbarrier v_empty[Config::kKvStages];
  Mbarrier patched;                     // values that the producer fills up with zeros
  Mbarrier moved[Config::kMoveStages];  // a slab of a copy is here
  std::uint64_t epoch;                  // of this run
};
static_assert(sizeof(AttentionShared<AttentionConfig<64>>) <= 227 * 1024);
static_assert(sizeof(AttentionShared<AttentionConfig<128>>) <= 227 * 1024);
static_assert(sizeof(AttentionShared<AttentionConfig<256>>) <= 227 * 1024);

inline constexpr int kOrderBarrier = 1;  // and the one behind it: whose turn it is to multiply

// Where the caller's tensor has an element, in elements.
__device__ __forceinline__ std::int64_t offset_in(const AttentionView& view, std::int32_t batch, std::int32_t head,
                                                  std::int32_t token) {
  return batch * view.batch_stride + head * view.head_stride + token * view.token_stride;
}

// How long somebody has waited without progress. By a whole warp.
struct AttentionPatience {
  const DeviceRank& rank;
  std::uint64_t begin = 0;
  std::uint64_t host_polled = 0;

  __device__ explicit AttentionPatience(const DeviceRank& of) : rank(of) {}
  __device__ void renew() { begin = 0; }
  // Rests for a moment. False: the call is aborted, or has just been because of us, who waited for `flag`.
  __device__ bool lasts(std::uint32_t flag, std::uint32_t count, std::uint32_t role_lane, std::uint32_t task) {
    __nanosleep(40);
    std::uint32_t leave = 0;
    if (threadIdx.x % 32 == 0) {
      const std::uint64_t now = global_time_ns();
      if (begin == 0) begin = host_polled = now;
      leave = ld_relaxed_gpu(&rank.control->abort);
      if (leave == 0 && now - host_polled > kHostPollNs) {
        host_polled = now;
        leave = ld_relaxed_sys(&rank.mailbox->leave);
      }
      if (leave == 0 && now - begin > rank.deadline_ns) {
        report_thread(flag, count, role_lane, task, now - begin);
        leave = 1;
      }
      if (leave != 0) st_relaxed_sys(&rank.control->abort, 1);
    }
    return __shfl_sync(kWholeWarp, leave, 0) == 0;
  }

 private:
  // Says who waited for what, if nobody else has said something.
  __device__ void report_thread(std::uint32_t flag, std::uint32_t count, std::uint32_t role_lane, std::uint32_t task,
                                std::uint64_t waited_ns) const {
    const std::uint64_t epoch_number = ld_relaxed_gpu(&rank.control->epoch) + 1;
    const EpochView view(epoch_number);
    DeviceAbort& out = rank.mailbox->abort;
    if (atom_cas_relaxed_sys(&out.state, 0, 1) != 0) return;
    out.kind = static_cast<std::uint32_t>(DeviceAbortKind::kFlag);
    out.role = role_lane & 3;
    out.lane = role_lane >> 2;
    out.task = task;
    out.flag = flag;
    out.wanted = count;
    out.seen = ld_relaxed_sys(view.flag(rank, rank.gpu, flag)) - (view.use - 1) * count;
    out.epoch = epoch_number;
    out.waited_ns = waited_ns;
    st_release_sys(&out.state, 2);  // order: the fields above; pairs with the host's acquire of `state`
  }
};

}  // namespace mkernel
