#include "exec/cuda/wire_kernel.h"

#include <algorithm>
#include <cstddef>

#include "exec/cuda/wire_copier.cuh"
#include "exec/cuda/wire_shared.cuh"
#include "net/ring.h"

namespace mkernel {
namespace {

constexpr std::uint32_t kCommandsPerPoll = 4;  // 128 bytes: what one read over PCIe brings
constexpr std::uint32_t kQuickPolls = 64;      // about 80 us, at 1.2 us each
constexpr unsigned kIdleSleepNs = 300;

// Takes commands from the ring in pinned memory, and tells the host what is done. The only warp that reads the host's
// memory, with one load at a time: SMs that do so much starve the driver's own channels.
struct Poller {
  WireShared& s;
  WireMailbox& mailbox;
  std::uint32_t position = 0;
  std::uint32_t copies = 0;
  std::uint32_t stamps = 0;
  std::uint32_t idle_polls = 0;
  Leaving wish = Leaving::kStay;
  std::uint64_t told = 0;  // what the host knows to be done

  __device__ void run_warp() {
    bool left = false;
    while (!left) {
      const std::uint32_t taken = poll_warp();
      // order: the counts that the others had reached when they left; pairs with their last releases.
      left = ld_acquire_cta(&s.copier_left) != 0 && ld_acquire_cta(&s.stamper_left) != 0;
      left = __all_sync(kAllLanes, left);
      if (lane_index() == 0) tell_thread(taken == 0 || left);
      idle_polls = taken == 0 ? idle_polls + 1 : 0;
      if (idle_polls > kQuickPolls) __nanosleep(kIdleSleepNs);
    }
  }

  // Lanes 0..15 read a word of the next four commands each, lane 16 reads the host's wish that we leave.
  __device__ std::uint32_t poll_warp() {
    const std::uint32_t lane = lane_index();
    const std::uint32_t mine = position + lane / 4;
    const std::uint64_t* from = lane < 16 ? &mailbox.commands[mine % kWireCommands].word[lane % 4] : &mailbox.leave;
    std::uint64_t word = 0;
    // order: with a command comes what the proxy had acquired when it queued it, above all the bytes to be copied;
    // pairs with KernelWire::push().
    if (lane <= 16) word = ld_acquire_sys(from);
    const bool there = lane < 16 && (word & 0xff) == ring_lap(mine, kWireCommandsLog2);
    const std::uint32_t seen = __ballot_sync(kAllLanes, there);
    const bool leave = __shfl_sync(kAllLanes, word, 16) != 0;
    std::uint32_t taken = 0;
    while (taken < kCommandsPerPoll && ((seen >> (4 * taken)) & 0xf) == 0xf) {
      WireWords words;
#pragma unroll
      for (std::uint32_t i = 0; i < 4; ++i) words.word[i] = __shfl_sync(kAllLanes, word, 4 * taken + i);
      dispatch(wire_command(words));
      ++taken;
    }
    position += taken;
    // order: all lanes' acquires come before lane 0's releases, which hand them on.
    __syncwarp();
    if (lane == 0) {
      // order: the entries; pairs with Copier::open_thread() and Stamper::step_warp().
      if (taken > 0) st_release_cta(&s.copies_queued, copies);
      if (taken > 0) st_release_cta(&s.stamps_queued, stamps);
      // order: the commands before the one to stop are in their queues; pairs with Copier::step_thread() and
      // Stamper::step_warp().
      if (leave) wish = Leaving::kNow;
      if (wish != Leaving::kStay) st_release_cta(&s.leaving, static_cast<std::uint32_t>(wish));
    }
    return taken;
  }

  __device__ void dispatch(const WireCommand& command) {
    const bool writes = lane_index() == 0;
    switch (command.verb) {
      case WireVerb::kCopy:
        if (writes) s.copies[copies % kWireDepth] = {command.address, command.source, command.bytes};
        ++copies;
        break;
      case WireVerb::kStamp:
        if (writes) s.stamps[stamps % kWireDepth] = {command.address, command.value, command.rank, command.count};
        ++stamps;
        break;
      case WireVerb::kStop: wish = Leaving::kWhenDone; break;
    }
  }

  // Each store to the host's memory holds up those behind it, so a few are left out while there is much to do.
  __device__ void tell_thread(bool at_once) {
    // order: the copies and stamps that are counted; pairs with Copier::finish_warp() and Stamper::step_warp().
    const std::uint32_t copied = ld_acquire_cta(&s.copies_done);
    const std::uint32_t stamped = ld_acquire_cta(&s.stamps_done);
    const std::uint64_t done = done_word(copied, stamped);
    if (done == told) return;
    const bool many = copied - static_cast<std::uint32_t>(told) >= kWireDepth / 4 ||
                      stamped - static_cast<std::uint32_t>(told >> 32) >= kWireDepth / 4;
    if (!at_once && !many) return;
    // order: whoever reads the counts may reuse or free the memory; pairs with KernelWire::refresh().
    st_release_sys(&mailbox.done, done);
    told = done;
  }
};

// Raises stamps whose copies are done, up to 32 behind one fence.
struct Stamper {
  WireShared& s;
  std::uint32_t* copied;  // see WireArguments
  std::uint32_t rank;
  std::uint32_t done = 0;
  std::uint32_t told = 0;  // copies that other ranks know to be done

  __device__ void run_warp() {
    while (step_warp()) {
    }
    if (lane_index() == 0) st_release_cta(&s.stamper_left, 1);  // order: `stamps_done`; pairs with Poller::run_warp()
  }

  // False: leave.
  __device__ bool step_warp() {
    const std::uint32_t lane = lane_index();
    std::uint32_t queued = 0;
    std::uint32_t may_leave = 0;
    if (lane == 0) {
      // order: read before counts and queue, so that nothing is left when we leave; pairs with Poller::poll_warp()
      // and Copier::run_warp().
      const auto leaving = static_cast<Leaving>(ld_acquire_cta(&s.leaving));
      const bool copier_left = ld_acquire_cta(&s.copier_left) != 0;
      may_leave = leaving == Leaving::kNow ? 2 : (leaving == Leaving::kWhenDone && copier_left ? 1 : 0);
      if (copied != nullptr) tell_thread();
      queued = ld_acquire_cta(&s.stamps_queued);  // order: the entries; pairs with Poller::poll_warp()
    }
    queued = __shfl_sync(kAllLanes, queued, 0);
    may_leave = __shfl_sync(kAllLanes, may_leave, 0);
    __syncwarp();  // order: lane 0's acquire, for all lanes
    if (may_leave == 2 || (may_leave == 1 && queued == done)) return false;

    StampEntry entry{};
    bool ready = false;
    if (lane < queued - done) {
      entry = s.stamps[(done + lane) % kWireDepth];
      // order: all bytes that the stamp vouches for; pairs with Copier::finish_warp() and tell_thread().
      const std::uint32_t reached =
          entry.rank == rank ? ld_acquire_cta(&s.copies_done) : ld_acquire_sys(copied + entry.rank * kCopiedStride);
      ready = static_cast<std::int32_t>(reached - entry.count) >= 0;
    }
    const std::uint32_t blocked = ~__ballot_sync(kAllLanes, ready);
    const std::uint32_t count = blocked == 0 ? 32 : __ffs(static_cast<int>(blocked)) - 1;
    if (count == 0) {
      __nanosleep(kSpinSleepNs);
      return true;
    }
    raise_warp(entry, count);
    return true;
  }

  // The first `count` lanes have a stamp each.
  __device__ void raise_warp(const StampEntry& entry, std::uint32_t count) {
    const std::uint32_t lane = lane_index();
    // order: the bytes, acquired above, before the stamps. A fence and relaxed stores make a release, and one fence
    // serves all; pairs with whoever acquires the stamp. Readers through the async proxy put their own proxy fence
    // behind that acquire, as bulk stores here count as done only after ours.
    fence_acq_rel_sys();
    const std::uint32_t lanes = count == 32 ? kAllLanes : (1u << count) - 1;
    if (lane < count) {
      // Of several stamps of one flag only the last is written, since stores of different lanes have no order.
      const std::uint32_t same = __match_any_sync(lanes, static_cast<unsigned long long>(entry.flag));
      if ((same >> lane) == 1) st_relaxed_sys(reinterpret_cast<std::uint32_t*>(entry.flag), entry.value);
    }
    done += count;
    __syncwarp();                                         // order: all lanes' stamps before the count
    if (lane == 0) st_release_cta(&s.stamps_done, done);  // pairs with Poller::tell_thread()
  }

  // Tells stampers of other ranks, perhaps on other GPUs, how many copies are done.
  __device__ void tell_thread() {
    const std::uint32_t reached = ld_acquire_cta(&s.copies_done);
    if (reached == told) return;
    st_release_sys(copied + rank * kCopiedStride, reached);  // order: their bytes; pairs with step_warp()
    told = reached;
  }
};

constexpr int kThreads = 96;  // poller, copier, stamper

__global__ void __launch_bounds__(kThreads) wire_kernel(const __grid_constant__ WireArguments arguments) {
  extern __shared__ __align__(128) std::byte s_stages[];
  __shared__ WireShared s;
  const WireLane& lane = arguments.lanes[blockIdx.x];
  if (threadIdx.x == 0) {
    s.copies_queued = s.copies_done = lane.copies;
    s.stamps_queued = s.stamps_done = lane.stamps;
    s.copier_left = s.stamper_left = 0;
    s.leaving = static_cast<std::uint32_t>(Leaving::kStay);
    for (LoadBarrier& barrier : s.loaded) barrier.init();
    fence_load_barrier_init();
  }
  __syncthreads();
  switch (threadIdx.x / 32) {
    case 0: {
      Poller poller{.s = s, .mailbox = *lane.mailbox, .position = lane.position};
      poller.copies = lane.copies;
      poller.stamps = lane.stamps;
      poller.told = done_word(lane.copies, lane.stamps);
      poller.run_warp();
      break;
    }
    case 1: {
      Copier copier{.s = s, .s_stages = s_stages, .stages = arguments.stages};
      copier.loads.copy = copier.stores.copy = copier.done = lane.copies;
      copier.run_warp();
      break;
    }
    default: {
      Stamper stamper{.s = s, .copied = arguments.copied, .rank = lane.rank};
      stamper.done = lane.stamps;
      stamper.told = lane.copies;
      stamper.run_warp();
      break;
    }
  }
}

int dynamic_bytes(std::uint32_t stages) { return static_cast<int>(stages * kStageBytes); }

}  // namespace

cudaError_t prepare_wire_kernel(int ranks, int sms, std::uint32_t& stages) {
  int device = 0;
  int per_sm = 0;    // bytes of shared memory
  int per_cta = 0;   // at most
  int reserved = 0;  // of each CTA, for the system
  cudaFuncAttributes attributes{};
  cudaError_t status = cudaGetDevice(&device);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
  };
  get(per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(per_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, wire_kernel);
  if (status != cudaSuccess) return status;

  const int fixed = static_cast<int>(attributes.sharedSizeBytes);
  const int ctas_per_sm = (ranks + sms - 1) / sms;
  const int room = std::min(per_cta, per_sm / ctas_per_sm - reserved) - fixed;
  const int fitting = std::min(room / static_cast<int>(kStageBytes), static_cast<int>(kMaxWireStages));
  if (ranks > kMaxWireRanks || fitting < static_cast<int>(kMinStages)) return cudaErrorLaunchOutOfResources;
  stages = static_cast<std::uint32_t>(fitting);
  // The most that there is, as other worlds of this process may want more than we do.
  status = cudaFuncSetAttribute(wire_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, per_cta - fixed);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(wire_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  }
  int resident = 0;
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, wire_kernel, kThreads, dynamic_bytes(stages));
  }
  if (status != cudaSuccess) return status;
  return resident < ctas_per_sm ? cudaErrorLaunchOutOfResources : cudaSuccess;
}

cudaError_t launch_wire_kernel(const WireArguments& arguments, int ranks, cudaStream_t stream) {
  wire_kernel<<<ranks, kThreads, dynamic_bytes(arguments.stages), stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace mkernel
