// The producer's half of the command ring on the GPU; net/ring.h has the same for the host, and the protocol.
//
// One difference: a producer takes its position first and then waits until the ring has room for it, so that a crowd of
// producers costs one atomic addition each. (A compare-and-swap succeeds once per round trip to the L2 cache, however
// many try.) The proxy cannot pass a position that is not published, so whoever gives up waiting has blocked the ring:
// it must make the whole world fail.
#pragma once
#include <cstdint>

#include "exec/cuda/device_ring.h"
#include "exec/cuda/sm90/memory.cuh"
#include "exec/cuda/sm90/wire_memory.cuh"
#include "net/ring.h"

namespace mkernel {

// Waits until the slot of `position` is free: until `deadline_ns` of global_time_ns(), or until `*abort` is not 0; then
// false.
__device__ inline bool wait_for_slot_thread(const DeviceRing& ring, std::uint32_t position, std::uint64_t deadline_ns,
                                            const std::uint32_t* abort) {
  for (std::uint32_t round = 1;; ++round) {
    // order: the proxy has read the slot's last lap before we overwrite it; pairs with the release below, of the
    // producer that has acquired the proxy's tail.
    const std::uint32_t used = position - ld_acquire_gpu(ring.tail_seen);
    if (used < ring.depth) return true;
    // Only the first of those who wait looks at the host's memory, and tells the others what it has seen: SMs that read
    // host memory hold up the driver's own accesses.
    if (used == ring.depth) {
      const std::uint32_t tail = ld_acquire_sys(ring.tail);  // order: as above; pairs with CommandRing::pop()
      // order: as above. Nobody else writes the word now: whoever is first next becomes so by this store.
      if (position - tail < ring.depth) {
        st_release_gpu(ring.tail_seen, tail);
        return true;
      }
    }
    if (round % 16 == 0 && (ld_relaxed_sys(abort) != 0 || global_time_ns() >= deadline_ns)) return false;
    if (used != ring.depth) __nanosleep(200);
  }
}

// Pushes `record`, whose lap is 0. False when it gave up: the record was not pushed, and none can be any more.
// order: what this thread wrote, and whatever it has acquired or been synchronised with, is visible to the network
// before the record is; pairs with CommandRing::peek().
__device__ inline bool push_record(const DeviceRing& ring, std::uint64_t record, std::uint64_t deadline_ns,
                                   const std::uint32_t* abort) {
  // Both at once, as each takes a trip to the L2 cache. order: none needed for the position; the record is published by
  // its slot. That the slot is free is acquired by the read and the fence behind it, or by waiting.
  const std::uint32_t tail = ld_relaxed_gpu(ring.tail_seen);
  const std::uint32_t position = atom_add_relaxed_gpu(ring.head, 1);
  if (position - tail >= ring.depth && !wait_for_slot_thread(ring, position, deadline_ns, abort)) return false;
  fence_acq_rel_sys();
  st_relaxed_sys(ring.slots + (position & (ring.depth - 1)), record | ring_lap(position, ring.depth_log2));
  return true;
}

}  // namespace mkernel
