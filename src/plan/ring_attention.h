// Plan of ring_attention: O_r = attention of own queries Q_r over the keys and values of all ranks, which come as
// plan/kv_ring.h says. compute folds chunk after chunk into the running state of each tile of queries.
//
// Credits: every task of the node that reads a chunk raises that of the GPU on whose rail it came.
//
// Order of accumulation, of every tile: own segments, then round after round; within a round the own GPU's rail first,
// then the following GPUs in turn. The state's flag of step s lets step s + 1 begin, on whatever SM.
//
// Flags: those of the ring, then
//   state                counter per (tile, step): folded in
#pragma once
#include "plan/kv_ring.h"

namespace mkernel {

struct RingAttentionPlan : KvRing {
  std::int64_t tiles = 1;  // of queries, over batch and heads

  MK_HD static constexpr RingAttentionPlan make(const PlanSpec& spec) {
    const AttentionSpec& a = spec.attention;
    RingAttentionPlan plan;
    plan.make_ring(spec, false);
    plan.tiles = a.batch * a.heads * plan.segments * plan.segment_tiles();
    // The tiles of those GPUs whose own it is not, and the copies to the others of what came by rail.
    const std::int32_t gpus = spec.topo.gpus;
    plan.use.raises_within = plan.tiles * (gpus - 1);
    plan.use.raises_by_rail = plan.tiles * gpus + (gpus > 1 ? plan.pieces : 0);
    return plan;
  }

  // How many tasks fold into one tile.
  MK_HD constexpr std::int64_t steps() const { return segments + (spec.topo.world() - 1) * chunks; }
  // Elements of a tile's state: (rows, dim) sums, then the rows' maxima and their sums of weights.
  MK_HD constexpr std::int64_t state_elements(std::int64_t rows) const { return rows * (spec.attention.dim + 2); }

  MK_HD constexpr std::uint32_t flag_count() const {
    return static_cast<std::uint32_t>(ring_flags() + tiles * (steps() - 1));
  }

  MK_HD constexpr std::int64_t buffer_elements(Buffer buffer) const {
    switch (buffer) {
      case Buffer::kKv: return ring_elements();
      case Buffer::kState: return steps() > 1 ? tiles * state_elements(spec.tiling.bm) : 0;
      default: return 0;
    }
  }

  MK_HD constexpr std::int32_t lanes(Role role) const { return role == Role::kCompute ? 1 : ring_lanes(role); }
  MK_HD constexpr std::int64_t count(std::int32_t, Role role, std::int32_t lane) const {
    return role == Role::kCompute ? steps() * tiles : ring_count(role, lane);
  }
  MK_HD constexpr Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    return role == Role::kCompute ? attend(rank, index / tiles, index % tiles) : ring_task(rank, role, lane, index);
  }

  // Own tasks wait for all that comes.
  MK_HD constexpr Wait completion(std::int32_t) const { return {}; }

  MK_HD constexpr FlagName flag_name(std::int32_t rank, std::uint32_t flag) const {
    if (flag < ring_flags()) return ring_flag_name(rank, flag);
    const std::int64_t i = flag - ring_flags();
    return {"state, tile/step", i / (steps() - 1), i % (steps() - 1), rank};
  }

  MK_HD constexpr std::int64_t network_bytes(std::int32_t rank) const { return ring_bytes(rank); }

 private:
  MK_HD constexpr std::int64_t segment_tiles() const {
    return max_of(1, ceil_div(spec.attention.q_split(spec.topo).max_size(), spec.tiling.bm));
  }
  MK_HD constexpr std::uint32_t state_flag(std::int64_t tile, std::int64_t step) const {
    return static_cast<std::uint32_t>(ring_flags() + tile * (steps() - 1) + step);
  }

  // Which foreign chunk a rank folds `i`-th.
  struct Visit {
    std::int64_t round = 0;
    std::int32_t gpu = 0;
  };
  MK_HD constexpr Visit visit(std::int32_t rank, std::int64_t i) const {
    const std::int64_t gpus = spec.topo.gpus;
    const std::int64_t within_node = rounds_within_node() * (gpus - 1);
    Visit visit;
    std::int64_t turn = 0;
    if (i < within_node) {
      visit.round = i / (gpus - 1);
      turn = 1 + i % (gpus - 1);
    } else {
      visit.round = rounds_within_node() + (i - within_node) / gpus;
      turn = (i - within_node) % gpus;
    }
    visit.gpu = static_cast<std::int32_t>((spec.topo.gpu_of(rank) + turn) % gpus);
    return visit;
  }

  // Folds what comes `step`-th into tile `tile`: batch and head, then segment, then rows.
  MK_HD constexpr Task attend(std::int32_t rank, std::int64_t step, std::int64_t tile) const {
    const Topology& topo = spec.topo;
    const AttentionSpec& a = spec.attention;
    const std::int64_t head = tile / (segments * segment_tiles());
    const auto segment = static_cast<std::int32_t>(tile / segment_tiles() % segments);
    const Run rows = cut(a.q_split(topo), rank, segment, tile % segment_tiles(), spec.tiling.bm);
    const std::int64_t kv_head = head / (a.heads / a.kv_heads);  // the batch comes along: its heads divide alike
    Task task;
    task.action = Action::kAttend;
    task.source = Source::kOwn;
    task.dst = Buffer::kO;
    task.dst_reach = Reach::kSelf;
    task.resume = step > 0;
    task.park = step + 1 < steps();
    task.block = {head * a.q_split(topo).tokens(rank) + rows.local, 0, rows.size, a.dim};
    task.dst_offset = steps() > 1 ? tile * state_elements(spec.tiling.bm) : 0;
    if (task.resume) task.waits[1] = {state_flag(tile, step - 1), 1, 1};
    if (task.park) task.signals[0] = {state_flag(tile, step), Reach::kSelf, false};
    Run keys;
    if (step < segments) {
      const SequenceSplit k = a.k_split(topo);
      const auto own = static_cast<std::int32_t>(step);
      keys = {k.begin(rank, own), k.local(rank, own), k.size(rank, own)};
      task.src = Buffer::kK;
      task.src_offset = kv_head * k.tokens(rank) + keys.local;
    } else {
      const Visit chunk = visit(rank, step - segments);
      const std::int32_t from = step_of(chunk.round);
      keys = chunk_run(topo.rank_of(node_at(topo.node_of(rank), from), chunk.gpu), chunk_of(chunk.round));
      task.src = Buffer::kKv;
      task.src_offset = slot(chunk.round, chunk.gpu) + 2 * kv_head * keys.size * a.dim;
      task.peer = topo.rank_of(topo.node_of(rank), chunk.gpu);
      task.waits[0] = chunk.gpu == topo.gpu_of(rank)
                          ? Wait{rail_flag(from, chunk_of(chunk.round)), 1, 1}  // no need to wait for own copies
                          : Wait{here_flag(chunk.round, chunk.gpu), 1, static_cast<std::uint32_t>(pieces)};
      if (gives_credit(chunk.round)) task.signals[1] = {credit_flag(chunk.round), Reach::kRank, false};
    }
    task.kv_position = keys.position;
    if (a.meet(rows.position, rows.size, keys.position, keys.size)) task.length = keys.size * a.dim;
    return task;
  }
};

}  // namespace mkernel
