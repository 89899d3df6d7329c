// Plan of ring_attention_backward: gradients of own Q, K and V, from Q, K, V, O, the log-sum-exp and the gradient of O.
//
// Keys and values come as plan/kv_ring.h says; own chunks are rounds like all others. compute takes every pair of a
// tile of keys and a tile of own queries once (an `attend_backward`): S, dP and dS = P * (dP - delta) are made once and
// give dQ, dK and dV. Running sums of both sides are fp32.
//   dQ      of a tile of queries, over all tiles of keys, in kState; with them delta = rowsum(dO * O), which the first
//           task of the tile makes
//   dK, dV  of a tile of keys, over own tiles of queries of all heads of the group, in kKeyState; the last task of the
//           tile rounds them into kPartial
// Then as in gemm_reduce_scatter: intra of the GPU on whose rail the chunk is adds the node's G partial sums, send puts
// node sums of a chunk on its owner, recv adds those of all nodes that see any of the chunk.
//
// Order. The tasks of a step (a chunk) stand phase by phase: in phase (h, j), h of the heads that share keys and j of
// the B tiles of queries of a head, tile t of keys meets tile (t + j) mod B. So tiles of keys meet different tiles of
// queries at the same time, each goes through all of them without a pause, and the sums of a tile of queries run over
// steps and, within a step, over tiles of keys t, t - 1, ... in a circle. A task waits for the one before it on
// either side; a GPU that keeps a tile of keys in registers needs no more of this than the order of dQ's sums.
//
// Slots. kKeyState and kPartial have places beside the slots of kKv: a rank's part of a chunk's gradients lies at the
// same place on all GPUs of the node. The sums of a node raise the credit of the chunk, for who adds the parts knows
// that all have read the chunk.
//
// Flags: those of the ring, then
//   part    (W > 1)  counter per (round, key head, tile of keys), on the GPU of the chunk's rail: G raises
//   sum     (N > 1)  counter per (node, chunk of own rail): own node's sum is ready
//   arrival (N > 1)  stamp per (own chunk, other node): the node sum of that node has arrived
//   done             counter per task of compute that others wait for
#pragma once
#include "plan/kv_ring.h"

namespace mkernel {

struct RingAttentionBackwardPlan : KvRing {
  std::int64_t q_tiles = 1;   // of a head: B
  std::int64_t kv_tiles = 1;  // of a chunk, per key head: T
  std::int64_t kv_heads = 1;  // of all batches
  std::int64_t group = 1;     // query heads per key head

  MK_HD static constexpr RingAttentionBackwardPlan make(const PlanSpec& spec) {
    const AttentionSpec& a = spec.attention;
    RingAttentionBackwardPlan plan;
    plan.make_ring(spec, true);
    plan.q_tiles = plan.segments * plan.segment_tiles();
    const std::int64_t keys = min_of(spec.tiling.chunk_rows, a.k_split(spec.topo).max_size());
    plan.kv_tiles = max_of(1, ceil_div(keys, spec.tiling.bn));
    plan.kv_heads = a.batch * a.kv_heads;
    plan.group = a.heads / a.kv_heads;
    plan.use.copies_raise = false;
    // With one rank there are no sums, and the tasks that end tiles of keys say that the place is free.
    plan.use.raises_within = plan.use.raises_by_rail = spec.topo.world() > 1 ? plan.sums() : plan.tiles();
    return plan;
  }

  // Chunks that a rank's queries meet, and tasks for each.
  MK_HD constexpr std::int64_t steps() const { return spec.topo.world() * chunks; }
  MK_HD constexpr std::int64_t phases() const { return group * q_tiles; }
  MK_HD constexpr std::int64_t tiles() const { return kv_heads * kv_tiles; }  // of keys, in a chunk
  MK_HD constexpr std::int64_t step_tasks() const { return phases() * tiles(); }
  // Elements of the running sums of a tile of queries: (rows, dim), then the rows' deltas.
  MK_HD constexpr std::int64_t state_elements(std::int64_t rows) const { return rows * (spec.attention.dim + 1); }

  MK_HD constexpr std::uint32_t flag_count() const {
    return static_cast<std::uint32_t>(done_base() + steps() * step_tasks());
  }

  MK_HD constexpr std::int64_t buffer_elements(Buffer buffer) const {
    const Topology& topo = spec.topo;
    switch (buffer) {
      case Buffer::kKv: return topo.world() > 1 ? ring_elements() : 0;
      case Buffer::kState:
        return steps() * kv_tiles > 1 ? kv_heads * group * q_tiles * state_elements(spec.tiling.bm) : 0;
      case Buffer::kKeyState: return phases() > 1 ? slots() * chunk_room : 0;
      case Buffer::kPartial: return topo.world() > 1 ? slots() * chunk_room : 0;
      case Buffer::kNodePartial: return topo.nodes > 1 ? topo.nodes * chunks * chunk_room : 0;
      case Buffer::kArrival: return (topo.nodes - 1) * chunks * chunk_room;
      default: return 0;
    }
  }

  MK_HD constexpr std::int32_t lanes(Role role) const {
    const bool alone = spec.topo.world() == 1;
    switch (role) {
      case Role::kCompute: return 1;
      case Role::kIntra: return alone ? 0 : ring_lanes(role) + 1;
      case Role::kSend: return ring_lanes(role) + spec.topo.nodes - 1;
      case Role::kRecv: return ring_lanes(role) + (spec.topo.nodes > 1 ? 1 : 0);
    }
    return 0;
  }
  MK_HD constexpr std::int64_t count(std::int32_t, Role role, std::int32_t lane) const {
    if (role == Role::kCompute) return steps() * step_tasks();
    if (lane < ring_lanes(role)) return ring_count(role, lane);
    return role == Role::kIntra ? rounds * sums() : role == Role::kSend ? chunks : chunks * sums();
  }
  MK_HD constexpr Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    if (role == Role::kCompute) return meet(rank, index);
    if (lane < ring_lanes(role)) return ring_task(rank, role, lane, index);
    if (role == Role::kIntra) return add_node(rank, index);
    return role == Role::kSend ? send_sum(rank, lane - ring_lanes(role) + 1, index) : add_rail(rank, index);
  }
  // Whether a lane brings keys (0), computes (1) or brings gradients home (2).
  MK_HD constexpr int phase(Role role, std::int32_t lane) const {
    return role == Role::kCompute ? 1 : lane < ring_lanes(role) ? 0 : 2;
  }

  // Own tasks wait for all that comes.
  MK_HD constexpr Wait completion(std::int32_t) const { return {}; }

  MK_HD constexpr FlagName flag_name(std::int32_t rank, std::uint32_t flag) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    if (flag < ring_flags()) return ring_flag_name(rank, flag);
    if (flag < sum_base()) {
      const std::int64_t i = (flag - part_base()) / tiles();
      const std::int32_t owner = topo.rank_of(node_at(self, step_of(i)), topo.gpu_of(rank));
      return {"parts of the gradients of keys, rank/chunk", owner, chunk_of(i), -1};
    }
    if (flag < arrival_base()) {
      const std::int64_t i = flag - sum_base();
      return {"own node's gradients of keys, rank/chunk",
              topo.rank_of(static_cast<std::int32_t>(i / chunks), topo.gpu_of(rank)), i % chunks, rank};
    }
    if (flag < done_base()) {
      const std::int64_t i = flag - arrival_base();
      const auto other = static_cast<std::int32_t>(i % (topo.nodes - 1));
      const std::int32_t node = other < self ? other : other + 1;
      return {"arrival of gradients, node/chunk", node, i / (topo.nodes - 1), topo.rank_of(node, topo.gpu_of(rank))};
    }
    const std::int64_t i = flag - done_base();
    return {"tiles that have met, step/task", i / step_tasks(), i % step_tasks(), rank};
  }

  // Bytes that `rank` must send: its chunks into each other node that needs them, and one sum of own node for each
  // chunk of its rail that the node has needed.
  MK_HD constexpr std::int64_t network_bytes(std::int32_t rank) const {
    std::int64_t bytes = ring_bytes(rank);
    for (std::int32_t step = 1; step < spec.topo.nodes; ++step) {
      for (std::int64_t c = 0; c < chunks; ++c) bytes += send_sum(rank, step, c).length * dtype_bytes(spec.partial);
    }
    return bytes;
  }

  // Whether a sum over the node or the rail that writes the caller's gradients takes in what `node` has: nothing comes
  // from nodes that see none of the chunk, and nothing is added where nobody sees it.
  MK_HD constexpr bool adds(std::int32_t rank, const Task& task, std::int32_t node) const {
    if (is_workspace(task.dst) || task.block.empty()) return true;
    return chunk_for(rank, task.arrival_offset / chunk_room, node).size > 0;
  }

 private:
  MK_HD constexpr std::int64_t segment_tiles() const {
    return max_of(1, ceil_div(spec.attention.q_split(spec.topo).max_size(), spec.tiling.bm));
  }
  // Additions per chunk: dK and dV of each tile of keys.
  MK_HD constexpr std::int64_t sums() const { return 2 * tiles(); }

  MK_HD constexpr std::int64_t part_base() const { return ring_flags(); }
  MK_HD constexpr std::int64_t sum_base() const { return part_base() + (spec.topo.world() > 1 ? rounds * tiles() : 0); }
  MK_HD constexpr std::int64_t arrival_base() const {
    return sum_base() + (spec.topo.nodes > 1 ? spec.topo.nodes * chunks : 0);
  }
  MK_HD constexpr std::int64_t done_base() const { return arrival_base() + (spec.topo.nodes - 1) * chunks; }
  // `tile` counts key heads, then tiles.
  MK_HD constexpr std::uint32_t part_flag(std::int64_t round, std::int64_t tile) const {
    return static_cast<std::uint32_t>(part_base() + round * tiles() + tile);
  }
  MK_HD constexpr std::uint32_t sum_flag(std::int32_t node, std::int64_t c) const {
    return static_cast<std::uint32_t>(sum_base() + node * chunks + c);
  }
  MK_HD constexpr std::uint32_t arrival_flag(std::int64_t c) const {
    return static_cast<std::uint32_t>(arrival_base() + c * (spec.topo.nodes - 1));
  }
  MK_HD constexpr std::uint32_t done_flag(std::int64_t step, std::int64_t phase, std::int64_t head,
                                          std::int64_t t) const {
    return static_cast<std::uint32_t>(done_base() + step * step_tasks() + phase * tiles() + head * kv_tiles + t);
  }

  // In a step, tile b of queries meets tiles of keys in the order of (b - t) mod B, then t: this is the first of them,
  // the last, and the one before `t`, which is not the first.
  MK_HD constexpr std::int64_t circle() const { return min_of(kv_tiles, q_tiles); }
  MK_HD constexpr std::int64_t last_like(std::int64_t t) const { return t + (kv_tiles - 1 - t) / q_tiles * q_tiles; }
  MK_HD constexpr std::int64_t first_tile(std::int64_t b) const { return min_of(b, kv_tiles - 1); }
  MK_HD constexpr std::int64_t last_tile(std::int64_t b) const { return last_like((first_tile(b) + 1) % circle()); }
  MK_HD constexpr std::int64_t tile_before(std::int64_t t) const {
    return t >= q_tiles ? t - q_tiles : last_like((t + 1) % circle());
  }
  // In which phase of its head tile t of keys meets tile b of queries.
  MK_HD constexpr std::int64_t turn_of(std::int64_t t, std::int64_t b) const {
    return (b + q_tiles - t % q_tiles) % q_tiles;
  }

  // Which chunk a rank's queries meet at `step`.
  struct Visit {
    std::int64_t round = 0;
    std::int32_t gpu = 0;
  };
  MK_HD constexpr Visit visit(std::int32_t rank, std::int64_t step) const {
    const std::int32_t gpus = spec.topo.gpus;
    return {step / gpus, static_cast<std::int32_t>((spec.topo.gpu_of(rank) + step % gpus) % gpus)};
  }

  // Keys t * bn and so on of a chunk.
  MK_HD constexpr Run key_tile(const Run& chunk, std::int64_t t) const {
    const std::int64_t begin = min_of(t * spec.tiling.bn, chunk.size);
    return {chunk.position + begin, chunk.local + begin, min_of(chunk.size - begin, spec.tiling.bn)};
  }
  // Where a tile's keys, or with `value` its values, stand in a chunk of `size` tokens.
  MK_HD constexpr std::int64_t in_chunk(std::int64_t size, std::int64_t head, std::int64_t value,
                                        std::int64_t first) const {
    return ((2 * head + value) * size + first) * spec.attention.dim;
  }

  MK_HD constexpr Task meet(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const AttentionSpec& a = spec.attention;
    const std::int64_t step = index / step_tasks();
    const std::int64_t phase = index / tiles() % phases();
    const std::int64_t kv_head = index / kv_tiles % kv_heads;
    const std::int64_t t = index % kv_tiles;
    const std::int64_t b = (t + phase % q_tiles) % q_tiles;
    const std::int64_t head = kv_head * group + phase / q_tiles;
    const Run rows =
        cut(a.q_split(topo), rank, static_cast<std::int32_t>(b / segment_tiles()), b % segment_tiles(), spec.tiling.bm);
    const Visit from = visit(rank, step);
    const std::int32_t self = topo.node_of(rank);
    const std::int32_t node_step = step_of(from.round);
    const std::int32_t owner = topo.rank_of(node_at(self, node_step), from.gpu);
    const std::int64_t c = chunk_of(from.round);
    const Run chunk = topo.world() == 1 ? chunk_run(owner, c) : chunk_for(owner, c, self);
    const Run keys = key_tile(chunk, t);

    Task task;
    task.action = Action::kAttendBackward;
    task.source = Source::kOwn;
    task.dst = Buffer::kDq;
    task.dst_reach = Reach::kSelf;
    task.peer = topo.rank_of(self, from.gpu);
    task.block = {head * a.q_split(topo).tokens(rank) + rows.local, 0, rows.size, a.dim};
    task.dst_offset = (head * q_tiles + b) * state_elements(spec.tiling.bm);
    task.kv_position = keys.position;
    task.key_rows = keys.size;
    task.value_distance = chunk.size * a.dim;
    task.key_place = slot_number(from.round, from.gpu) * chunk_room +
                     in_chunk(chunk.size, kv_head, 0, keys.position - chunk.position);
    if (owner == rank) {
      task.src = Buffer::kK;
      task.src_offset = kv_head * a.k_split(topo).tokens(rank) + keys.local;
    } else {
      task.src = Buffer::kKv;
      task.src_offset = own_places() * chunk_room + task.key_place;
    }
    if (a.meet(rows.position, rows.size, keys.position, keys.size)) task.length = keys.size * a.dim;

    const bool first = t == first_tile(b);
    task.resume = step > 0 || !first;
    task.park = step + 1 < steps() || t != last_tile(b);
    task.resume_keys = phase > 0;
    task.park_keys = phase + 1 < phases();
    if (task.resume_keys) {
      task.waits[0] = {done_flag(step, phase - 1, kv_head, t), 1, 1};
    } else if (owner != rank) {
      task.waits[0] = from.gpu == topo.gpu_of(rank)
                          ? Wait{rail_flag(node_step, c), 1, 1}  // no need to wait for own copies
                          : Wait{here_flag(from.round, from.gpu), 1, static_cast<std::uint32_t>(pieces)};
    } else if (from.round >= depth) {
      task.waits[0] = credit_wait(from.round - depth);
    }
    if (task.resume) {
      const std::int64_t other = first ? last_tile(b) : tile_before(t);
      const std::int64_t other_phase = phase / q_tiles * q_tiles + turn_of(other, b);
      task.waits[1] = {done_flag(first ? step - 1 : step, other_phase, kv_head, other), 1, 1};
    }
    if (task.park || task.park_keys) task.signals[0] = {done_flag(step, phase, kv_head, t), Reach::kSelf, false};
    if (!task.park_keys && topo.world() > 1) {
      task.signals[1] = {part_flag(from.round, kv_head * kv_tiles + t), Reach::kRank, false};
    } else if (!task.park_keys && gives_credit(from.round)) {
      task.signals[1] = {credit_flag(from.round), Reach::kSelf, false};
    }
    return task;
  }

  // The place of node sums of a chunk that (node, own rail) owns.
  MK_HD constexpr std::int64_t node_place(std::int32_t node, std::int64_t c) const {
    return (node * chunks + c) * chunk_room;
  }
  // Writes the sum of a tile of own keys (or values) into the caller's gradients.
  MK_HD constexpr void finish(std::int32_t rank, std::int64_t c, std::int64_t tile, std::int64_t value,
                              Task& task) const {
    const Run keys = key_tile(chunk_run(rank, c), tile % kv_tiles);
    const std::int64_t row = tile / kv_tiles * spec.attention.k_split(spec.topo).tokens(rank) + keys.local;
    task.block = {row, 0, keys.size, spec.attention.dim};
    task.dst = value == 0 ? Buffer::kDk : Buffer::kDv;
    task.dst_offset = 0;
  }

  // The sum of the node's parts: for each chunk of own rail, tile by tile, dK and dV.
  MK_HD constexpr Task add_node(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int64_t round = index / sums();
    const std::int64_t tile = index / 2 % tiles();
    const std::int64_t value = index % 2;
    const std::int32_t node = node_at(self, step_of(round));
    const std::int64_t c = chunk_of(round);
    const Run chunk = chunk_for(topo.rank_of(node, topo.gpu_of(rank)), c, self);
    const Run keys = key_tile(chunk, tile % kv_tiles);
    const std::int64_t within = in_chunk(chunk.size, tile / kv_tiles, value, keys.position - chunk.position);
    Task task;
    task.action = Action::kReduce;
    task.source = Source::kNode;
    task.src = Buffer::kPartial;
    task.src_offset = slot_number(round, topo.gpu_of(rank)) * chunk_room + within;
    task.arrival_offset = c * chunk_room;
    task.dst_reach = Reach::kSelf;
    task.waits[0] = {part_flag(round, tile), 1, static_cast<std::uint32_t>(topo.gpus)};
    if (gives_credit(round)) task.signals[1] = {credit_flag(round), Reach::kSelf, false};
    if (topo.nodes == 1) {
      finish(rank, c, tile, value, task);
      return task;
    }
    task.block = {keys.position, 0, keys.size, spec.attention.dim};
    task.dst = Buffer::kNodePartial;
    task.dst_offset = node_place(node, c) + within;
    task.signals[0] = {sum_flag(node, c), Reach::kSelf, false};
    return task;
  }

  // Home to the node that is `step` nodes back: the keys came from there.
  MK_HD constexpr Task send_sum(std::int32_t rank, std::int32_t step, std::int64_t c) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int32_t node = node_at(self, step);
    const std::int32_t slot_there = self < node ? self : self - 1;
    const Run chunk = chunk_for(topo.rank_of(node, topo.gpu_of(rank)), c, self);
    Task task;
    task.action = Action::kPut;
    task.source = Source::kOwn;
    task.peer = topo.rank_of(node, topo.gpu_of(rank));
    task.block = {chunk.position, 0, chunk.size, spec.attention.dim};
    task.src = Buffer::kNodePartial;
    task.src_offset = node_place(node, c);
    task.dst = Buffer::kArrival;
    task.dst_reach = Reach::kRank;
    task.dst_offset = (slot_there * chunks + c) * chunk_room;
    task.length = pieces * chunk.size * spec.attention.dim;
    task.waits[0] = {sum_flag(node, c), 1, static_cast<std::uint32_t>(sums())};
    task.signals[0] = {arrival_flag(c) + static_cast<std::uint32_t>(slot_there), Reach::kRank, true};
    return task;
  }

  // The sum of all nodes' sums of an own chunk.
  MK_HD constexpr Task add_rail(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int64_t c = index / sums();
    const std::int64_t tile = index / 2 % tiles();
    const std::int64_t value = index % 2;
    const Run chunk = chunk_run(rank, c);
    const std::int64_t first = key_tile(chunk, tile % kv_tiles).position - chunk.position;
    const std::int64_t within = in_chunk(chunk.size, tile / kv_tiles, value, first);
    Task task;
    task.action = Action::kReduce;
    task.source = Source::kRail;
    task.src = Buffer::kNodePartial;
    task.src_offset = node_place(self, c) + within;
    task.arrival_offset = c * chunk_room + within;
    task.arrival_stride = chunks * chunk_room;
    task.dst_reach = Reach::kSelf;
    task.waits[0] = {sum_flag(self, c), 1, static_cast<std::uint32_t>(sums())};
    task.waits[1] = {arrival_flag(c), static_cast<std::uint32_t>(topo.nodes - 1), 1};
    finish(rank, c, tile, value, task);
    return task;
  }
};

}  // namespace mkernel
