// How every rank of ring_attention and its backward gets the keys and values of all others.
//
// Keys and values travel in chunks. send puts own chunks on the rail peer of every other node, once each; intra copies
// own chunks to the other GPUs of the node, recv hands on what came by rail. What no query of a node can see is not
// moved; the signals are given all the same, so that counts never depend on the mask.
//
// Slots. All GPUs of a node take in chunks in one order of rounds: own node first, then chunk by chunk in turn from all
// other nodes, as they arrive; a round is one chunk of each GPU index. Round i uses slot i mod depth of its GPU index.
// With fewer slots than rounds, whoever fills round i waits for the credits of round i - depth: a counter of the GPU on
// whose rail the chunk came, raised when the node is done with it. This GPU lets its own copies go on, and tells the
// sender on the other node by a put without bytes. Own chunks that the network reads have a place of their own each, by
// epoch parity, which is never used twice in an epoch.
//
// Flags (rounds as above; steps count nodes backwards from the waiting rank's own):
//   here   (G > 1)       counter per (round, gpu): the chunk is in its slot; `pieces` raises
//   rail   (N > 1)       stamp per (step >= 1, chunk): the network has written it
//   staged (N > 1)       counter per own chunk: the network may read it; `pieces` raises
//   credit (few slots)   counter per round: the chunk of own rail has been read on the whole node
//   grant  (few slots)   stamp per (destination, own chunk): its slot there is free
#pragma once
#include "plan/spec.h"

namespace mkernel {

// What a plan says beside its spec.
struct KvRingUse {
  bool own_rounds = false;         // a rank's own chunks have slots too, for what its tasks leave there
  bool copies_raise = true;        // copies to the node's other GPUs raise the credit of what they read
  std::int64_t raises_within = 0;  // of a credit: of a chunk of the own node, and of one that came by rail
  std::int64_t raises_by_rail = 0;
};

struct KvRing {
  PlanSpec spec;
  KvRingUse use;
  std::int32_t segments = 1;    // of a rank
  std::int64_t chunks = 1;      // per rank, alike in each segment
  std::int64_t pieces = 2;      // copies per chunk: keys, then values, of each batch and key head
  std::int64_t rounds = 0;      // of chunks
  std::int64_t depth = 0;       // slots per GPU index
  std::int64_t chunk_room = 0;  // elements

  MK_HD constexpr void make_ring(const PlanSpec& of, bool own_rounds) {
    const AttentionSpec& a = of.attention;
    spec = of;
    use.own_rounds = own_rounds;
    segments = a.q_split(spec.topo).segments();
    const std::int64_t keys = a.k_split(spec.topo).max_size();
    chunks = segments * max_of(1, ceil_div(keys, spec.tiling.chunk_rows));
    pieces = 2 * a.batch * a.kv_heads;
    rounds = (spec.topo.nodes - first_step()) * chunks;
    depth = a.slot_rounds == 0 ? rounds : min_of(a.slot_rounds, rounds);
    chunk_room = pieces * min_of(spec.tiling.chunk_rows, keys) * a.dim;
  }

  MK_HD constexpr std::int64_t ring_elements() const { return (own_places() + slots()) * chunk_room; }
  MK_HD constexpr std::int64_t slots() const { return depth * spec.topo.gpus; }

  // Lanes, tasks and flags of the ring; those of the whole plan stand behind them.
  MK_HD constexpr std::int32_t ring_lanes(Role role) const {
    const Topology& topo = spec.topo;
    switch (role) {
      case Role::kCompute: return 0;
      case Role::kIntra: return topo.world() > 1 ? 1 : 0;
      // One per destination node for chunks; with few slots, one more per source node for what frees its slots.
      case Role::kSend: return (topo.nodes - 1) * (credits() ? 2 : 1);
      case Role::kRecv: return topo.gpus > 1 ? topo.nodes - 1 : 0;
    }
    return 0;
  }
  MK_HD constexpr std::int64_t ring_count(Role role, std::int32_t lane) const {
    switch (role) {
      case Role::kCompute: return 0;
      case Role::kIntra: return stagings() + (spec.topo.gpus > 1 ? chunks * pieces : 0);
      case Role::kSend: return is_grant(lane) ? chunks - first_granted(grant_step(lane)) : chunks;
      case Role::kRecv: return chunks * pieces;
    }
    return 0;
  }
  MK_HD constexpr Task ring_task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    switch (role) {
      case Role::kCompute: return {};
      case Role::kIntra: return index < stagings() ? stage(rank, index) : share(rank, index - stagings());
      case Role::kSend: return is_grant(lane) ? grant(rank, grant_step(lane), index) : send(rank, lane + 1, index);
      case Role::kRecv: return recv(rank, lane + 1, index / pieces, index % pieces);
    }
    return {};
  }
  MK_HD constexpr std::int64_t ring_flags() const {
    return grant_base() + (credits() ? (spec.topo.nodes - 1) * chunks : 0);
  }
  MK_HD constexpr FlagName ring_flag_name(std::int32_t rank, std::uint32_t flag) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int32_t gpu = topo.gpu_of(rank);
    if (flag < rail_base()) {
      const std::int64_t round = flag / topo.gpus;
      const auto from = static_cast<std::int32_t>(flag % topo.gpus);
      return {"chunk of keys, rank/chunk", topo.rank_of(node_at(self, step_of(round)), from), chunk_of(round),
              topo.rank_of(self, from)};
    }
    if (flag < staged_base()) {
      const std::int64_t i = flag - rail_base();
      const std::int32_t owner = topo.rank_of(node_at(self, static_cast<std::int32_t>(i / chunks) + 1), gpu);
      return {"arrival of keys, rank/chunk", owner, i % chunks, owner};
    }
    if (flag < credit_base()) return {"staged chunk of keys, rank/chunk", rank, flag - staged_base(), rank};
    if (flag < grant_base()) {
      const std::int64_t round = flag - credit_base();
      return {"credit, rank/chunk", topo.rank_of(node_at(self, step_of(round)), gpu), chunk_of(round), -1};
    }
    const std::int64_t i = flag - grant_base();
    const auto step = static_cast<std::int32_t>(i / chunks) + 1;
    return {"free slot, node/chunk", (self + step) % topo.nodes, i % chunks,
            topo.rank_of((self + step) % topo.nodes, gpu)};
  }
  // Bytes of keys and values that `rank` must send so that each of its chunks enters each node that needs it once.
  MK_HD constexpr std::int64_t ring_bytes(std::int32_t rank) const {
    std::int64_t bytes = 0;
    for (std::int32_t step = 1; step < spec.topo.nodes; ++step) {
      for (std::int64_t c = 0; c < chunks; ++c) bytes += send(rank, step, c).length * dtype_bytes(spec.dtype);
    }
    return bytes;
  }

  // A run of a rank's tokens.
  struct Run {
    std::int64_t position = 0;  // in the whole sequence
    std::int64_t local = 0;     // on its rank
    std::int64_t size = 0;
  };

  MK_HD static constexpr Run cut(const SequenceSplit& split, std::int32_t rank, std::int32_t segment,
                                 std::int64_t index, std::int64_t rows) {
    const std::int64_t begin = min_of(index * rows, split.size(rank, segment));
    const std::int64_t end = min_of(begin + rows, split.size(rank, segment));
    return {split.begin(rank, segment) + begin, split.local(rank, segment) + begin, end - begin};
  }
  MK_HD constexpr Run chunk_run(std::int32_t owner, std::int64_t c) const {
    const std::int64_t per_segment = chunks / segments;
    return cut(spec.attention.k_split(spec.topo), owner, static_cast<std::int32_t>(c / per_segment), c % per_segment,
               spec.tiling.chunk_rows);
  }
  // The same, without tokens where no query of `node` sees any of them.
  MK_HD constexpr Run chunk_for(std::int32_t owner, std::int64_t c, std::int32_t node) const {
    Run run = chunk_run(owner, c);
    const SequenceSplit q = spec.attention.q_split(spec.topo);
    const std::int32_t first = spec.topo.rank_of(node, 0);
    const std::int32_t last = first + spec.topo.gpus - 1;
    // The ranks of a node are neighbours, so that their tokens are one run in each segment.
    const std::int64_t early = q.begin(first, 0);
    bool needed = spec.attention.meet(early, q.begin(last, 0) + q.size(last, 0) - early, run.position, run.size);
    if (segments > 1 && !needed) {
      const std::int64_t late = q.begin(last, 1);
      needed = spec.attention.meet(late, q.begin(first, 1) + q.size(first, 1) - late, run.position, run.size);
    }
    if (!needed) run.size = 0;
    return run;
  }

  // The node whose chunks reach node `self` at `step`.
  MK_HD constexpr std::int32_t node_at(std::int32_t self, std::int32_t step) const {
    return (self - step + spec.topo.nodes) % spec.topo.nodes;
  }
  // Without own rounds, and with one GPU per node, nothing comes from the own node.
  MK_HD constexpr std::int32_t first_step() const { return use.own_rounds || spec.topo.gpus > 1 ? 0 : 1; }
  MK_HD constexpr std::int64_t rounds_within_node() const { return first_step() == 0 ? chunks : 0; }
  MK_HD constexpr std::int64_t round_of(std::int32_t step, std::int64_t c) const {
    return step == 0 ? c : rounds_within_node() + c * (spec.topo.nodes - 1) + step - 1;
  }
  MK_HD constexpr std::int32_t step_of(std::int64_t round) const {
    if (round < rounds_within_node()) return 0;
    return static_cast<std::int32_t>((round - rounds_within_node()) % (spec.topo.nodes - 1)) + 1;
  }
  MK_HD constexpr std::int64_t chunk_of(std::int64_t round) const {
    if (round < rounds_within_node()) return round;
    return (round - rounds_within_node()) / (spec.topo.nodes - 1);
  }

  MK_HD constexpr bool credits() const { return depth < rounds; }
  MK_HD constexpr bool gives_credit(std::int64_t round) const { return round + depth < rounds; }
  MK_HD constexpr Wait credit_wait(std::int64_t round) const {
    const std::int64_t raises = step_of(round) > 0 ? use.raises_by_rail : use.raises_within;
    return {credit_flag(round), 1, static_cast<std::uint32_t>(raises)};
  }

  MK_HD constexpr bool is_grant(std::int32_t lane) const { return lane >= spec.topo.nodes - 1; }
  MK_HD constexpr std::int32_t grant_step(std::int32_t lane) const { return lane - (spec.topo.nodes - 1) + 1; }
  // Rounds that the network fills a slot in without asking: those of the first use of each slot. A GPU's own chunk
  // leaves its slot empty, unless its own tasks use it.
  MK_HD constexpr std::int64_t free_rounds() const { return depth + (use.own_rounds ? 0 : rounds_within_node()); }
  MK_HD constexpr bool is_granted(std::int64_t round) const { return round >= free_rounds(); }
  // The first such chunk of a step.
  MK_HD constexpr std::int64_t first_granted(std::int32_t step) const {
    const std::int64_t before = free_rounds() - rounds_within_node() - (step - 1);
    return min_of(chunks, ceil_div(max_of(0, before), spec.topo.nodes - 1));
  }

  // Places in kKv.
  MK_HD constexpr std::int64_t own_places() const { return spec.topo.nodes > 1 ? chunks : 0; }
  MK_HD constexpr std::int64_t own_place(std::int64_t c) const { return c * chunk_room; }
  MK_HD constexpr std::int64_t slot(std::int64_t round, std::int32_t gpu) const {
    return (own_places() + slot_number(round, gpu)) * chunk_room;
  }
  // The same slot among the slots.
  MK_HD constexpr std::int64_t slot_number(std::int64_t round, std::int32_t gpu) const {
    return round % depth * spec.topo.gpus + gpu;
  }

  MK_HD constexpr std::int64_t rail_base() const { return spec.topo.gpus > 1 ? rounds * spec.topo.gpus : 0; }
  MK_HD constexpr std::int64_t staged_base() const { return rail_base() + (spec.topo.nodes - 1) * chunks; }
  MK_HD constexpr std::int64_t credit_base() const { return staged_base() + own_places(); }
  MK_HD constexpr std::int64_t grant_base() const { return credit_base() + (credits() ? rounds : 0); }
  MK_HD constexpr std::uint32_t here_flag(std::int64_t round, std::int32_t gpu) const {
    return static_cast<std::uint32_t>(round * spec.topo.gpus + gpu);
  }
  MK_HD constexpr std::uint32_t rail_flag(std::int32_t step, std::int64_t c) const {
    return static_cast<std::uint32_t>(rail_base() + (step - 1) * chunks + c);
  }
  MK_HD constexpr std::uint32_t staged_flag(std::int64_t c) const {
    return static_cast<std::uint32_t>(staged_base() + c);
  }
  MK_HD constexpr std::uint32_t credit_flag(std::int64_t round) const {
    return static_cast<std::uint32_t>(credit_base() + round);
  }
  MK_HD constexpr std::uint32_t grant_flag(std::int32_t step, std::int64_t c) const {
    return static_cast<std::uint32_t>(grant_base() + (step - 1) * chunks + c);
  }

  MK_HD constexpr std::int64_t stagings() const { return own_places() * pieces; }

  // Piece `piece` of a chunk on its way into the slot or place `to`.
  MK_HD constexpr Task move_piece(const Run& run, std::int64_t to, std::int64_t piece) const {
    const std::int64_t dim = spec.attention.dim;
    Task task;
    task.action = Action::kCopy;
    task.block = {run.position, 0, run.size, dim};
    task.source = Source::kOwn;
    task.src = Buffer::kKv;
    task.dst = Buffer::kKv;
    task.length = run.size * dim;
    task.dst_offset = to + piece * task.length;
    task.src_offset = task.dst_offset;
    return task;
  }
  // The same from the caller's keys or values.
  MK_HD constexpr Task own_piece(std::int32_t rank, const Run& run, std::int64_t to, std::int64_t piece) const {
    Task task = move_piece(run, to, piece);
    task.src = piece % 2 == 0 ? Buffer::kK : Buffer::kV;
    task.src_offset = piece / 2 * spec.attention.k_split(spec.topo).tokens(rank) + run.local;
    return task;
  }

  MK_HD constexpr Task stage(std::int32_t rank, std::int64_t i) const {
    const std::int64_t c = i / pieces;
    Task task = own_piece(rank, chunk_run(rank, c), own_place(c), i % pieces);
    task.dst_reach = Reach::kSelf;
    task.signals[0] = {staged_flag(c), Reach::kSelf, false};
    return task;
  }

  MK_HD constexpr Task share(std::int32_t rank, std::int64_t i) const {
    const std::int64_t c = i / pieces;  // also the round
    const std::int32_t gpu = spec.topo.gpu_of(rank);
    Task task = own_piece(rank, chunk_for(rank, c, spec.topo.node_of(rank)), slot(c, gpu), i % pieces);
    task.dst_reach = Reach::kPeers;
    if (c >= depth) task.waits[0] = credit_wait(c - depth);
    task.signals[0] = {here_flag(c, gpu), Reach::kPeers, false};
    return task;
  }

  // To the node that is `step` nodes further on.
  MK_HD constexpr Task send(std::int32_t rank, std::int32_t step, std::int64_t c) const {
    const Topology& topo = spec.topo;
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int32_t node = (topo.node_of(rank) + step) % topo.nodes;
    const std::int64_t round = round_of(step, c);
    const Run run = chunk_for(rank, c, node);
    Task task = move_piece(run, slot(round, gpu), 0);
    task.action = Action::kPut;
    task.length *= pieces;
    task.src_offset = own_place(c);
    task.peer = topo.rank_of(node, gpu);
    task.dst_reach = Reach::kRank;
    task.waits[0] = {staged_flag(c), 1, static_cast<std::uint32_t>(pieces)};
    if (is_granted(round)) task.waits[1] = {grant_flag(step, c), 1, 1};
    task.signals[0] = {rail_flag(step, c), Reach::kRank, true};
    return task;
  }

  // Tells the sender at `step` that it may fill a slot again.
  MK_HD constexpr Task grant(std::int32_t rank, std::int32_t step, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int64_t c = first_granted(step) + index;
    Task task = move_piece({}, 0, 0);
    task.action = Action::kPut;
    task.peer = topo.rank_of(node_at(topo.node_of(rank), step), topo.gpu_of(rank));
    task.dst_reach = Reach::kRank;
    task.waits[0] = credit_wait(round_of(step, c) - depth);
    task.signals[0] = {grant_flag(step, c), Reach::kRank, true};
    return task;
  }

  MK_HD constexpr Task recv(std::int32_t rank, std::int32_t step, std::int64_t c, std::int64_t piece) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int32_t owner = topo.rank_of(node_at(self, step), gpu);
    const std::int64_t round = round_of(step, c);
    Task task = move_piece(chunk_for(owner, c, self), slot(round, gpu), piece);
    task.peer = owner;
    task.dst_reach = Reach::kPeers;
    task.waits[0] = {rail_flag(step, c), 1, 1};
    if (round >= depth) task.waits[1] = credit_wait(round - depth);
    task.signals[0] = {here_flag(round, gpu), Reach::kPeers, false};
    if (use.copies_raise && gives_credit(round)) task.signals[1] = {credit_flag(round), Reach::kSelf, false};
    return task;
  }
};

}  // namespace mkernel
