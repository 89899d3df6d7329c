// The warp of the copy kernel that moves bytes.
#pragma once
#include "exec/cuda/wire_shared.cuh"

namespace mkernel {

// A copy goes through shared memory in pieces. Every wait for stores to have read their source takes about 1.1 us,
// however many may be pending and whatever their size (7.3 GB/s with pieces of 8 KB, 20 GB/s with 16 KB in the trial;
// H200, 2026-12-01): so pieces are large. Two CTAs on an SM have room for 3 each.
inline constexpr std::uint32_t kPieceBytes = 32768;
// A piece, up to 15 bytes on either side to make it aligned, and what reads of whole words touch beyond its end.
inline constexpr std::uint32_t kStageBytes = kPieceBytes + 128;
inline constexpr int kPendingStores = 1;  // stages whose stores may still be reading when the next load is issued
inline constexpr std::uint32_t kMinStages = kPendingStores + 1;

// A part of a copy that goes through one stage. All but the last end at a multiple of 16 of the destination.
struct Piece {
  std::uint64_t dst;
  std::uint64_t src;
  std::uint32_t bytes;
  std::uint32_t last;
};

// Where a reader of the queue of copies is.
struct CopyCursor {
  std::uint32_t copy = 0;  // copies before this one
  std::uint64_t at = 0;    // bytes of it
  CopyEntry entry = {};

  __device__ Piece next() {
    const std::uint64_t most = kPieceBytes - ((entry.dst + at) & 15);
    const std::uint64_t left = entry.bytes - at;
    const Piece piece{entry.dst + at, entry.src + at, static_cast<std::uint32_t>(left < most ? left : most),
                      left <= most ? 1u : 0u};
    at += piece.bytes;
    if (piece.last != 0) {
      at = 0;
      ++copy;
    }
    return piece;
  }
};

// Moves the bytes. Lane 0 loads and stores what is aligned with bulk copies; what is not, all lanes store.
struct Copier {
  WireShared& s;
  std::byte* s_stages;  // (stages, kStageBytes)
  std::uint32_t stages;
  CopyCursor loads;  // lane 0 only, like the next
  CopyCursor stores;
  std::uint32_t ahead = 0;  // pieces loaded and not yet stored
  std::uint32_t load_slot = 0;
  std::uint32_t loaded = 0;  // pieces, up to the number of stages: then every load reuses a stage
  std::uint32_t store_slot = 0;
  std::uint32_t store_parity = 0;
  std::uint32_t done = 0;

  __device__ void run_warp() {
    for (;;) {
      Piece piece{};
      if (lane_index() == 0) piece = step_thread();
      piece.bytes = __shfl_sync(kAllLanes, piece.bytes, 0);
      piece.last = __shfl_sync(kAllLanes, piece.last, 0);
      if (piece.bytes > 0) {
        piece.dst = __shfl_sync(kAllLanes, piece.dst, 0);
        piece.src = __shfl_sync(kAllLanes, piece.src, 0);
        store_warp(piece);
        if (piece.last != 0) finish_warp();
      } else if (piece.last != 0) {
        break;
      } else {
        __nanosleep(kSpinSleepNs);
      }
    }
    __syncwarp();
    if (lane_index() != 0) return;
    bulk_wait_all_thread();             // shared memory must outlive what reads it
    st_release_cta(&s.copier_left, 1);  // order: `copies_done`; pairs with Poller::run_warp()
  }

  // Loads ahead, then returns the next piece to store. No bytes: there is none; and `last`: leave.
  __device__ Piece step_thread() {
    // order: read before the queue, so that nothing is left in it when we leave; pairs with Poller::poll_warp().
    const auto leaving = static_cast<Leaving>(ld_acquire_cta(&s.leaving));
    while (leaving != Leaving::kNow && ahead < stages - kPendingStores && open_thread()) load_thread(loads.next());
    if (ahead > 0) {
      if (stores.at == 0) stores.entry = s.copies[stores.copy % kWireDepth];
      return stores.next();
    }
    return {0, 0, 0, leaving == Leaving::kStay ? 0u : 1u};
  }

  // Whether there is something left to load.
  __device__ bool open_thread() {
    if (loads.at > 0) return true;
    // order: the entry, and with it the bytes to be copied; pairs with Poller::poll_warp().
    if (ld_acquire_cta(&s.copies_queued) == loads.copy) return false;
    loads.entry = s.copies[loads.copy % kWireDepth];
    fence_proxy_async();  // order: the bytes, now acquired, before the bulk loads that read them
    return true;
  }

  __device__ void load_thread(const Piece& piece) {
    if (loaded < stages) {
      ++loaded;
    } else {
      // The stage was stored from `stages` pieces ago; since then at most kPendingStores others were.
      bulk_wait_read_groups_thread<kPendingStores>();
    }
    // Whole 16-byte units: those at the ends may belong to others, but lie in the same allocation.
    const std::uint64_t begin = piece.src & ~std::uint64_t{15};
    const std::uint64_t end = (piece.src + piece.bytes + 15) & ~std::uint64_t{15};
    LoadBarrier& barrier = s.loaded[load_slot];
    barrier.expect(static_cast<std::uint32_t>(end - begin));
    bulk_load_thread(s_stages + load_slot * kStageBytes, reinterpret_cast<const void*>(begin),
                     static_cast<std::uint32_t>(end - begin), barrier);
    if (++load_slot == stages) load_slot = 0;
    ++ahead;
  }

  __device__ void store_warp(const Piece& piece) {
    const std::uint32_t lane = lane_index();
    s.loaded[store_slot].wait(store_parity);
    const std::byte* const s_src = s_stages + store_slot * kStageBytes + (piece.src & 15);
    auto* const dst = reinterpret_cast<std::byte*>(piece.dst);
    const auto to_align = static_cast<std::uint32_t>((16 - (piece.dst & 15)) & 15);
    const std::uint32_t head = min(piece.bytes, to_align);
    const std::uint32_t body = (piece.bytes - head) & ~15u;
    const std::uint32_t tail = piece.bytes - head - body;
    const bool aligned = ((piece.src + head) & 15) == 0;
    if (lane < head) dst[lane] = s_src[lane];
    if (lane < tail) dst[head + body + lane] = s_src[head + body + lane];
    const bool bulk_only = head == 0 && tail == 0 && aligned;
    if (body > 0 && !aligned) store_shifted_warp(dst + head, s_src + head, body);
    // order: all lanes have read the stage, and stored, before lane 0 goes on.
    __syncwarp();
    if (lane == 0) {
      if (body > 0 && aligned) bulk_store_thread(dst + head, s_src + head, body);
      bulk_close_group_thread();  // also when it is empty: the groups count the pieces
      // order: the lanes' reads of the stage before the load that overwrites it.
      if (!bulk_only) fence_shared_reads_thread();
    }
    --ahead;
    if (++store_slot == stages) {
      store_slot = 0;
      store_parity ^= 1;
    }
  }

  // Source and destination differ modulo 16: words are read where they are and shifted into place.
  __device__ static void store_shifted_warp(std::byte* dst, const std::byte* s_src, std::uint32_t bytes) {
    const auto from = reinterpret_cast<std::uintptr_t>(s_src);
    const auto* const s_words = reinterpret_cast<const std::uint32_t*>(from & ~std::uintptr_t{3});
    const auto shift = static_cast<std::uint32_t>(from & 3) * 8;
#pragma unroll 4
    for (std::uint32_t i = lane_index(); i < bytes / 16; i += 32) {
      const std::uint32_t* const s_word = s_words + 4 * i;
      uint4 v;
      v.x = __funnelshift_r(s_word[0], s_word[1], shift);
      v.y = __funnelshift_r(s_word[1], s_word[2], shift);
      v.z = __funnelshift_r(s_word[2], s_word[3], shift);
      v.w = __funnelshift_r(s_word[3], s_word[4], shift);
      reinterpret_cast<uint4*>(dst)[i] = v;
    }
  }

  // A copy's last piece has been stored.
  __device__ void finish_warp() {
    ++done;
    if (lane_index() != 0) return;
    bulk_wait_all_thread();
    fence_proxy_async();  // order: the bulk stores, complete by now, before the count
    // order: all bytes of the copy, also what the other lanes stored before the barrier in store_warp(); pairs with
    // Stamper::step_warp() and Poller::tell_thread().
    st_release_cta(&s.copies_done, done);
  }
};

}  // namespace mkernel
