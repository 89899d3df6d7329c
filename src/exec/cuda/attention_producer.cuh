// The producer of attention: one warp that decides which of its CTA's tiles goes on, waits for keys, and loads queries,
// keys and values.
//
// A tile is folded with one run of keys after the other, in the plan's order, for as long as they are there. When the
// next are late and another tile can go on, the state of the first is parked and that one's turn comes. Which it is
// depends on time, but no bit of any result does: the state is parked as it is.
#pragma once
#include "exec/cuda/attention_shared.cuh"

namespace mkernel {

template <class Config>
struct AttentionProducer {
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kRowsOfLane = kAttentionRows / 32;
  // In next_step: the tile has a state in memory, and it has no step left.
  static constexpr std::uint32_t kHasState = 0x8000;
  static constexpr std::uint32_t kFinished = 0x7fff;

  const AttentionCall& call;
  AttentionShared<Config>& s;
  const EpochView epoch;
  const std::uint32_t lane = threadIdx.x % 32;
  const AttentionTile* tiles = call.tiles + first_tile(call);
  const std::int32_t tile_count = first_tile(call, 1) - first_tile(call);
  std::int32_t opened = 0;
  std::int32_t ready = 0;  // so many steps have their keys here; they come in this order
  bool aborted = false;
  AttentionPatience patience{call.rank};
  RingPosition<Config::kQStages> q{0, 1};
  RingPosition<Config::kKvStages> k{0, 1};
  RingPosition<Config::kKvStages> v{0, 1};
  std::uint32_t patched_phase = 0;

  __device__ void run_warp() {
    advance();
    std::int32_t finished = 0;
    std::int32_t at = 0;
    while (finished < tile_count && !aborted) {
      const std::int32_t next = find_runnable(at);
      if (next < 0) {
        wait_for(ready);
        continue;
      }
      if (run(next)) ++finished;
      at = next + 1 == tile_count ? 0 : next + 1;
    }
    publish_empty(kLeave, {});
  }

 private:
  // Bounds of what a tile's rows see.
  struct Sight {
    std::int32_t begin_least, begin_most, end_least, end_most;
    __device__ bool meets(std::int32_t position, std::int32_t keys) const {
      return max(position, begin_least) < min(position + keys, end_most);
    }
  };
  // Keys of one stage: where TMA finds them, and how many there are.
  struct Block {
    std::int32_t row = 0;
    std::int32_t keys = 0;
    std::int32_t own = 0;
    std::int32_t value_row = 0;  // the same for values
  };

  __device__ static std::int32_t first_tile(const AttentionCall& call, std::int32_t further = 0) {
    return static_cast<std::int32_t>(blockIdx.x) < call.compute_ctas ? call.tile_begin[blockIdx.x + further] : 0;
  }

  // --- what is there ---

  // Looks once whether more steps are ready.
  __device__ bool advance() {
    const std::int32_t i = ready + static_cast<std::int32_t>(lane);
    bool met = false;
    if (i < call.step_count) {
      const std::uint32_t flag = call.steps[i].flag;
      const std::uint32_t count = call.steps[i].count;
      met = count == 0 || flag_reached(ld_relaxed_sys(epoch.flag(call.rank, call.rank.gpu, flag)), epoch.use * count);
    }
    const std::uint32_t mask = __ballot_sync(kWholeWarp, met);
    const int grown = mask == kWholeWarp ? 32 : __ffs(static_cast<int>(~mask)) - 1;
    if (grown == 0) return false;
    // order: keys and values come after their flags; pairs with the movers' and the network's signals. And they were
    // written for the generic proxy.
    fence_acquire_sys();
    __syncwarp();
    fence_proxy_async();
    ready += grown;
    patience.renew();
    return true;
  }
  // False when the call is aborted.
  __device__ bool wait_for(std::int32_t step) {
    while (ready <= step) {
      if (advance()) continue;
      const AttentionStep late = call.steps[ready];
      const std::uint32_t task = static_cast<std::uint32_t>(ready) * static_cast<std::uint32_t>(call.tiles_in_plan);
      if (!patience.lasts(late.flag, late.count, static_cast<std::uint32_t>(Role::kCompute), task)) {
        aborted = true;
        return false;
      }
    }
    return true;
  }

  // The first tile from `from` on, in a circle, that can go on; -1: none.
  __device__ std::int32_t find_runnable(std::int32_t from) const {
    if (opened < tile_count && from == opened) return from;  // own keys are always there
    for (std::int32_t base = 0; base < tile_count; base += 32) {
      std::int32_t i = from + base + static_cast<std::int32_t>(lane);
      const bool in_circle = base + static_cast<std::int32_t>(lane) < tile_count;
      if (i >= tile_count) i -= tile_count;
      bool can = false;
      if (in_circle && i >= opened) can = i == opened;
      if (in_circle && i < opened && i < kOpenTiles) {
        can = static_cast<std::int32_t>(s.next_step[i] & ~kHasState) < ready;
      }
      const std::uint32_t mask = __ballot_sync(kWholeWarp, can);
      if (mask == 0) continue;
      return __shfl_sync(kWholeWarp, i, __ffs(static_cast<int>(mask)) - 1);
    }
    return -1;
  }
  // Whether an open tile waits for an earlier step than `step`.
  __device__ bool is_overtaken(std::int32_t step) const {
    bool any = false;
    for (std::int32_t i = static_cast<std::int32_t>(lane); i < min(opened, kOpenTiles); i += 32) {
      any = any || static_cast<std::int32_t>(s.next_step[i] & ~kHasState) < step;
    }
    return __any_sync(kWholeWarp, any);
  }
  __device__ void note_step(std::int32_t tile, std::uint32_t value) {
    if (lane == 0 && tile < kOpenTiles) s.next_step[tile] = static_cast<std::uint16_t>(value);
    __syncwarp();
  }

  // --- what a tile sees ---

  // The keys that the query at `position` sees.
  __device__ int2 range_of(std::int32_t position) const {
    if (call.ends_q == nullptr) {
      const std::int32_t beside = position + call.band.shift;
      return {max(beside - call.band.left, 0), min(beside + call.band.right + 1, call.band.keys)};
    }
    // The sequence that it belongs to; those without queries are passed over.
    std::int32_t low = 0;
    std::int32_t high = call.sequences - 1;
    while (low < high) {
      const std::int32_t middle = (low + high) / 2;
      if (position < call.ends_q[middle + 1]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const std::int32_t first_key = call.ends_k[low];
    const std::int32_t last_key = call.ends_k[low + 1];
    const std::int32_t beside = position + last_key - call.ends_q[low + 1];  // the last stand beside each other
    return {max(beside - call.band.left, first_key), min(beside + call.band.right + 1, last_key)};
  }
  __device__ Sight look(const AttentionTile& tile, int2 (&ranges)[kRowsOfLane]) const {
    Sight sight{INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN};
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      // Rows that are not there see what the last one sees.
      const std::int32_t row = min(static_cast<std::int32_t>(lane) + 32 * i, tile.rows - 1);
      ranges[i] = range_of(tile.position + row);
      sight.begin_least = min(sight.begin_least, ranges[i].x);
      sight.begin_most = max(sight.begin_most, ranges[i].x);
      sight.end_least = min(sight.end_least, ranges[i].y);
      sight.end_most = max(sight.end_most, ranges[i].y);
    }
    sight.begin_least = __reduce_min_sync(kWholeWarp, sight.begin_least);
    sight.begin_most = __reduce_max_sync(kWholeWarp, sight.begin_most);
    sight.end_least = __reduce_min_sync(kWholeWarp, sight.end_least);
    sight.end_most = __reduce_max_sync(kWholeWarp, sight.end_most);
    return sight;
  }
  // The first step from `from` on that brings keys which the tile sees; step_count: none.
  __device__ std::int32_t next_step(const Sight& sight, std::int32_t from) const {
    for (; from < call.step_count; from += 32) {
      const std::int32_t i = from + static_cast<std::int32_t>(lane);
      const bool meets = i < call.step_count && sight.meets(call.steps[i].position, call.steps[i].keys);
      const std::uint32_t mask = __ballot_sync(kWholeWarp, meets);
      if (mask != 0) return from + __ffs(static_cast<int>(mask)) - 1;
    }
    return call.step_count;
  }
  // Stages of a step's keys that the tile needs: [x, y), the last one first.
  __device__ static int2 blocks_of(const AttentionStep& step, const Sight& sight) {
    const std::int32_t begin = max(sight.begin_least - step.position, 0);
    const std::int32_t end = min(sight.end_most - step.position, step.keys);
    return {begin / kKeys, (end + kKeys - 1) / kKeys};
  }
  // Whether some row does not see all of a stage's keys.
  __device__ static bool is_masked(const AttentionStep& step, const Sight& sight, std::int32_t block) {
    const std::int32_t begin = step.position + block * kKeys;
    return begin < sight.begin_most || begin + kKeys > min(sight.end_least, step.position + step.keys);
  }

  // --- loading ---

  // Goes on with a tile of this CTA as far as there are keys. True: it is finished.
  __device__ bool run(std::int32_t number) {
    const AttentionTile tile = tiles[number];
    const bool is_new = number == opened;
    int2 ranges[kRowsOfLane];
    const Sight sight = look(tile, ranges);
    std::int32_t at = 0;
    std::uint32_t flags = 0;
    if (is_new) {
      ++opened;
      at = next_step(sight, 0);
      if (at == call.step_count) {
        note_step(number, kFinished);
        publish_empty(kNoKeys, tile);
        return true;
      }
      note_step(number, static_cast<std::uint32_t>(at));
      if (at >= ready) return false;  // its turn comes
    } else {
      const std::uint32_t noted = s.next_step[number];
      at = static_cast<std::int32_t>(noted & ~kHasState);
      if ((noted & kHasState) != 0) flags = kResumeTile;
    }
    load_queries(tile, ranges);
    return load_steps(tile, number, sight, at, flags);
  }

  __device__ void load_queries(const AttentionTile& tile, const int2 (&ranges)[kRowsOfLane]) {
    s.q_empty[q.slot].wait(q.phase);
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) s.ranges[q.slot][lane + 32 * i] = ranges[i];
    __syncwarp();
    if (elect_thread()) {
      Mbarrier& full = s.q_full[q.slot];
      full.arrive_and_expect(Config::kQBytes);
#pragma unroll
      for (int box = 0; box < Config::kBoxes; ++box) {
        tma_load_thread(s.q[q.slot] + box * kAttentionRows * 128, call.q, box * 64, tile.token, tile.head, tile.batch,
                        full);
      }
    }
    __syncwarp();
    q.advance();
  }

  __device__ bool load_steps(const AttentionTile& tile, std::int32_t number, const Sight& sight, std::int32_t at,
                             std::uint32_t flags) {
    AttentionStep step = call.steps[at];
    int2 blocks = blocks_of(step, sight);
    if (is_masked(step, sight, blocks.y - 1)) flags |= kMaskKeys;
    Block before;  // whose values are yet to be loaded
    for (;;) {
      const std::int32_t next = next_step(sight, at + 1);
      const AttentionStep then = next < call.step_count ? call.steps[next] : AttentionStep{};
      const int2 then_blocks = blocks_of(then, sight);
      for (std::int32_t i = blocks.y - 1; i >= blocks.x; --i) {
        if (i > blocks.x) {
          if (is_masked(step, sight, i - 1)) flags |= kMaskNext;
        } else if (next == call.step_count) {
          flags |= kLastKeys;
        } else if (next >= ready && shall_park(number, next)) {
          flags |= kLastKeys | kParkTile;
        } else if (is_masked(then, sight, then_blocks.y - 1)) {
          flags |= kMaskNext;
        }
        load_keys(tile, step, i, flags);
        if (before.keys != 0) load_values(tile, before);
        before = block_of(tile, step, i);
        if ((flags & kLastKeys) != 0) {
          load_values(tile, before);
          if ((flags & kParkTile) != 0) return false;
          note_step(number, kFinished);
          return true;
        }
        flags = 0;
      }
      if (!wait_for(next)) {
        abandon(tile);
        return false;
      }
      at = next;
      step = then;
      blocks = then_blocks;
    }
  }
  // Whether the tile makes way for another, as the keys of its step `next` are late.
  __device__ bool shall_park(std::int32_t number, std::int32_t next) {
    while (advance()) {
      if (next < ready) return false;
    }
    note_step(number, static_cast<std::uint32_t>(next) | kHasState);
    const std::int32_t from = number + 1 == tile_count ? 0 : number + 1;
    return find_runnable(from) >= 0 || is_overtaken(next);
  }

  __device__ Block block_of(const AttentionTile& tile, const AttentionStep& step, std::int32_t block) const {
    const std::int32_t first = block * kKeys;
    const std::int32_t keys = min(step.keys - first, kKeys);
    if (step.own != 0) return {step.row + first, keys, 1, step.row + first};
    // Pieces of a chunk: keys, then values, of each batch and head.
    const std::int32_t row = step.row + 2 * (tile.batch * call.kv_heads + tile.kv_head) * step.keys + first;
    return {row, keys, 0, row + step.keys};
  }

  __device__ void load_keys(const AttentionTile& tile, const AttentionStep& step, std::int32_t block,
                            std::uint32_t flags) {
    const Block at = block_of(tile, step, block);
    s.k_empty[k.slot].wait(k.phase);
    __syncwarp();  // as in publish_empty()
    if (elect_thread()) {
      s.control[k.slot] = {flags,
                           step.position + block * kKeys,
                           step.position + step.keys,
                           tile.number,
                           tile.token,
                           tile.rows,
                           tile.head,
                           tile.batch};
      Mbarrier& full = s.k_full[k.slot];
      full.arrive_and_expect(Config::kKvBytes);
      load_boxes_thread(s.k[k.slot], call.k, at.own, at.row, tile, full);
    }
    __syncwarp();
    k.advance();
  }
  __device__ void load_boxes_thread(std::byte* s_dst, const CUtensorMap& own_map, std::int32_t own, std::int32_t row,
                                    const AttentionTile& tile, Mbarrier& full) const {
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box) {
      std::byte* s_box = s_dst + box * kKeys * 128;
      if (own != 0) {
        tma_load_thread(s_box, own_map, box * 64, row, tile.kv_head, tile.batch, full);
      } else {
        tma_load_thread(s_box, call.kv[epoch.parity], box * 64, row, full);
      }
    }
  }

  __device__ void load_values(const AttentionTile& tile, const Block& at) {
    s.v_empty[v.slot].wait(v.phase);
    // Rows behind the last key meet weights of 0, so they must be finite. Behind a tensor TMA gives zeros.
    const bool whole = at.keys == kKeys || (at.own != 0 && at.value_row + at.keys == call.k_tokens);
    Mbarrier& full = whole ? s.v_full[v.slot] : s.patched;
    __syncwarp();  // as in publish_empty()
    if (elect_thread()) {
      full.arrive_and_expect(Config::kKvBytes);
      load_boxes_thread(s.v[v.slot], call.v, at.own, at.value_row, tile, full);
    }
    __syncwarp();
    if (!whole) {
      s.patched.wait(patched_phase);
      patched_phase ^= 1;
      const std::uint32_t base = shared_address(s.v[v.slot]);
      for (int box = 0; box < Config::kBoxes; ++box) {
        for (std::int32_t i = at.keys * 8 + static_cast<std::int32_t>(lane); i < kKeys * 8; i += 32) {
          st_shared_zero_16(base + box * kKeys * 128 + i * 16);
        }
      }
      fence_shared_to_async();
      __syncwarp();
      if (lane == 0) s.v_full[v.slot].arrive();
      __syncwarp();
    }
    v.advance();
  }

  // A stage without keys that only says something.
  __device__ void publish_empty(std::uint32_t flags, const AttentionTile& tile) {
    s.k_empty[k.slot].wait(k.phase);
    // All threads have seen this phase before the consumers may begin the next: one that came late would find the
    // parity of the phase after that, and wait for ever.
    __syncwarp();
    if (lane == 0) {
      s.control[k.slot] = {flags, 0, 0, tile.number, tile.token, tile.rows, tile.head, tile.batch};
      s.k_full[k.slot].arrive();
    }
    __syncwarp();
    k.advance();
  }
  // Ends a run of which the consumers expect more: with whatever lies in the stages, for nothing of it is kept.
  __device__ void abandon(const AttentionTile& tile) {
    publish_empty(kLastKeys | kDropTile, tile);
    for (int i = 0; i < 2; ++i) {
      s.v_empty[v.slot].wait(v.phase);
      __syncwarp();  // as in publish_empty()
      if (lane == 0) s.v_full[v.slot].arrive();
      __syncwarp();
      v.advance();
    }
  }
};

}  // namespace mkernel
