// Plan of gemm_all_reduce: every rank gets all of C = sum over ranks of A_r [M, K_r] * B_r [K_r, N].
//
// The tiles of C are cut into chunks; chunk c belongs to GPU c % G of every node, which sums it over its node (intra).
// One node: that sum is the result. Two nodes: rail peers swap node sums (one network step). More nodes, or partial
// sums wider than C: chunk c also has an owner node (c / G) % N, to which node sums are sent and which sends the result
// back along the rail. Whoever makes or receives a finished tile writes it into the C of all GPUs of its node.
#pragma once
#include "plan/spec.h"

namespace mkernel {

struct GemmAllReducePlan {
  PlanSpec spec;
  std::int64_t tiles = 1;   // tiles of C
  std::int64_t groups = 1;  // chunks per GPU, rounded up; "group" g holds chunks g*G .. g*G+G-1, one per GPU
  bool swap = false;        // two nodes, one network step
  bool gather = false;      // owner nodes send results back

  MK_HD static constexpr GemmAllReducePlan make(const PlanSpec& spec) {
    GemmAllReducePlan plan;
    plan.spec = spec;
    plan.tiles = plan.grid().count();
    plan.groups = ceil_div(plan.tiles, static_cast<std::int64_t>(spec.tiling.chunk_tiles) * spec.topo.gpus);
    // A swap moves 2 |C| partial sums, an owner (|C| partial sums + |C| results): fewer bytes when partials are wider.
    plan.swap = spec.topo.nodes == 2 && dtype_bytes(spec.partial) == dtype_bytes(spec.dtype);
    plan.gather = spec.topo.nodes > 1 && !plan.swap;
    return plan;
  }

  MK_HD constexpr std::uint32_t flag_count() const {
    return spec.topo.world() == 1 ? 0 : static_cast<std::uint32_t>(done_flag() + 1);
  }

  MK_HD constexpr std::int64_t buffer_elements(Buffer buffer) const {
    const Topology& topo = spec.topo;
    switch (buffer) {
      case Buffer::kPartial: return topo.gpus > 1 ? spec.m * spec.n : 0;
      case Buffer::kNodePartial: return topo.nodes > 1 ? spec.m * spec.n : 0;
      case Buffer::kArrival:
        if (swap) return spec.m * spec.n;
        return gather ? (topo.nodes - 1) * owned_groups_max() * chunk_stride() : 0;
      case Buffer::kResult: return gather ? spec.m * spec.n : 0;
      default: return 0;
    }
  }

  MK_HD constexpr std::int32_t lanes(Role role) const {
    const Topology& topo = spec.topo;
    switch (role) {
      case Role::kCompute: return 1;
      case Role::kIntra: return topo.gpus > 1 ? 1 : 0;
      // Owner nodes: one lane per other node for node sums, then one per other node for results.
      case Role::kSend: return swap ? 1 : gather ? 2 * (topo.nodes - 1) : 0;
      // Lane 0 sums what arrived; with owner nodes, one more lane per other node hands its results on.
      case Role::kRecv: return swap ? 1 : gather ? topo.nodes : 0;
    }
    return 0;
  }

  MK_HD constexpr std::int64_t count(std::int32_t rank, Role role, std::int32_t lane) const {
    const Topology& topo = spec.topo;
    const std::int64_t chunk = spec.tiling.chunk_tiles;
    const std::int32_t self = topo.node_of(rank);
    switch (role) {
      case Role::kCompute: return groups * topo.gpus * chunk;
      case Role::kIntra: return groups * chunk;
      case Role::kSend: return swap ? groups : owned_groups(lane_is_result(lane) ? self : dest_node(rank, lane));
      case Role::kRecv: return chunk * (swap ? groups : owned_groups(lane == 0 ? self : result_node(rank, lane)));
    }
    return 0;
  }

  MK_HD constexpr Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    switch (role) {
      case Role::kCompute: return compute(rank, index);
      case Role::kIntra: return intra(rank, index);
      case Role::kSend: return swap ? send_swap(rank, index) : send_owner(rank, lane, index);
      case Role::kRecv: return lane == 0 ? recv_sum(rank, index) : recv_result(rank, lane, index);
    }
    return {};
  }

  // Every tile of own C is written, by whichever GPU of the node.
  MK_HD constexpr Wait completion(std::int32_t) const {
    if (spec.topo.world() == 1) return {};
    return {static_cast<std::uint32_t>(done_flag()), 1, static_cast<std::uint32_t>(tiles)};
  }

  MK_HD constexpr FlagName flag_name(std::int32_t rank, std::uint32_t flag) const {
    const Topology& topo = spec.topo;
    const std::int64_t chunk = spec.tiling.chunk_tiles;
    const std::int32_t gpu = topo.gpu_of(rank);
    if (flag < sum_base()) {
      const std::int64_t t = ((flag / chunk) * topo.gpus + gpu) * chunk + flag % chunk;
      return {"partial tile, chunk/tile", t / chunk, t, -1};
    }
    if (flag < arrival_base()) return {"node sum, chunk/gpu", (flag - sum_base()) * topo.gpus + gpu, gpu, rank};
    if (flag < result_base()) {
      const std::int64_t i = flag - arrival_base();
      const std::int64_t senders = swap ? 1 : topo.nodes - 1;
      const std::int64_t group = swap ? i : i / senders * topo.nodes + topo.node_of(rank);
      const auto index = static_cast<std::int32_t>(i % senders);
      const std::int32_t node = index < topo.node_of(rank) ? index : index + 1;
      return {"arrival, chunk/node", group * topo.gpus + gpu, node, topo.rank_of(node, gpu)};
    }
    if (flag < done_flag()) {
      const std::int64_t group = flag - result_base();
      const auto node = static_cast<std::int32_t>(group % topo.nodes);
      return {"result, chunk/node", group * topo.gpus + gpu, node, topo.rank_of(node, gpu)};
    }
    return {"finished tiles of C, of", tiles, tiles, -1};
  }

  // Bytes that `rank` sends; over all ranks they add up to the lower bound 2 (N-1) |C| of an all-reduce over N nodes
  // (with partial sums wider than C: (N-1) (|partial| + |C|)).
  MK_HD constexpr std::int64_t network_bytes(std::int32_t rank) const {
    const Topology& topo = spec.topo;
    if (topo.nodes == 1) return 0;
    std::int64_t bytes = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t elements = chunk_elements(g, topo.gpu_of(rank));
      if (swap || g % topo.nodes != topo.node_of(rank)) {
        bytes += elements * dtype_bytes(spec.partial);
      } else {
        bytes += (topo.nodes - 1) * elements * dtype_bytes(spec.dtype);
      }
    }
    return bytes;
  }

 private:
  MK_HD constexpr TileGrid grid() const { return TileGrid::make(spec.m, spec.n, spec.m, spec.tiling); }
  MK_HD constexpr std::int64_t chunk_stride() const {
    return static_cast<std::int64_t>(spec.tiling.chunk_tiles) * spec.tiling.bm * spec.tiling.bn;
  }

  // Flags: partial tiles of own chunks | node sum per group | arrivals | results per group | tiles done.
  MK_HD constexpr std::int64_t sum_base() const { return spec.topo.gpus > 1 ? groups * spec.tiling.chunk_tiles : 0; }
  MK_HD constexpr std::int64_t arrival_base() const { return sum_base() + (spec.topo.nodes > 1 ? groups : 0); }
  MK_HD constexpr std::int64_t result_base() const {
    return arrival_base() + (swap ? groups : gather ? owned_groups_max() * (spec.topo.nodes - 1) : 0);
  }
  MK_HD constexpr std::int64_t done_flag() const { return result_base() + (gather ? groups : 0); }

  MK_HD constexpr std::int64_t owned_groups_max() const { return ceil_div(groups, spec.topo.nodes); }
  // Groups that `node` owns: node, node + N, ...
  MK_HD constexpr std::int64_t owned_groups(std::int32_t node) const {
    return (groups - node + spec.topo.nodes - 1) / spec.topo.nodes;
  }
  MK_HD constexpr bool lane_is_result(std::int32_t lane) const { return lane >= spec.topo.nodes - 1; }
  MK_HD constexpr std::int32_t dest_node(std::int32_t rank, std::int32_t lane) const {
    const std::int32_t step = lane % (spec.topo.nodes - 1);
    return (spec.topo.node_of(rank) + 1 + step) % spec.topo.nodes;
  }
  MK_HD constexpr std::int32_t result_node(std::int32_t rank, std::int32_t lane) const {
    return (spec.topo.node_of(rank) - lane + spec.topo.nodes) % spec.topo.nodes;
  }

  MK_HD constexpr std::int64_t chunk_first(std::int64_t group, std::int32_t gpu) const {
    return min_of((group * spec.topo.gpus + gpu) * spec.tiling.chunk_tiles, tiles);
  }
  MK_HD constexpr std::int64_t chunk_end(std::int64_t group, std::int32_t gpu) const {
    return min_of((group * spec.topo.gpus + gpu + 1) * spec.tiling.chunk_tiles, tiles);
  }
  MK_HD constexpr std::uint32_t chunk_size(std::int64_t group, std::int32_t gpu) const {
    return static_cast<std::uint32_t>(chunk_end(group, gpu) - chunk_first(group, gpu));
  }
  MK_HD constexpr std::int64_t chunk_elements(std::int64_t group, std::int32_t gpu) const {
    return grid().packed(chunk_end(group, gpu)) - grid().packed(chunk_first(group, gpu));
  }

  // The order in which `rank` makes groups. With owner nodes: among every N consecutive ones that of the next node
  // first, own node's last, so that nodes do not all send to the same owner at once. A swap wants the same order on
  // both nodes, as each waits for what the other sends.
  MK_HD constexpr std::int64_t group_at(std::int32_t rank, std::int64_t position) const {
    if (!gather) return position;
    const std::int64_t nodes = spec.topo.nodes;
    const std::int64_t first = position / nodes * nodes;
    const std::int64_t size = min_of(nodes, groups - first);
    return first + (position - first + spec.topo.node_of(rank) + 1) % size;
  }

  MK_HD constexpr std::uint32_t tile_flag(std::int64_t group, std::int64_t in_chunk) const {
    return static_cast<std::uint32_t>(group * spec.tiling.chunk_tiles + in_chunk);
  }
  MK_HD constexpr std::uint32_t sum_flag(std::int64_t group) const {
    return static_cast<std::uint32_t>(sum_base() + group);
  }
  // The first of the stamps of the other nodes for an own group.
  MK_HD constexpr std::uint32_t arrival_flag(std::int64_t group) const {
    if (swap) return static_cast<std::uint32_t>(arrival_base() + group);
    return static_cast<std::uint32_t>(arrival_base() + group / spec.topo.nodes * (spec.topo.nodes - 1));
  }
  MK_HD constexpr std::uint32_t result_flag(std::int64_t group) const {
    return static_cast<std::uint32_t>(result_base() + group);
  }
  // Where node sums of an own group lie in kArrival: the slot of the first other node, and the distance to the next.
  MK_HD constexpr std::int64_t arrival_offset(std::int64_t group, std::int32_t gpu) const {
    if (swap) return grid().packed(chunk_first(group, gpu));
    return group / spec.topo.nodes * (spec.topo.nodes - 1) * chunk_stride();
  }

  MK_HD constexpr Task tile_task(Action action, std::int64_t t) const {
    Task task;
    task.action = action;
    task.block = grid().tile(t);
    task.src_offset = grid().packed(t);
    task.dst_offset = task.src_offset;
    return task;
  }
  // A finished tile goes into the C of all GPUs of the node.
  MK_HD constexpr void finish_tile(Task& task, int signal) const {
    task.dst = Buffer::kC;
    task.dst_reach = Reach::kNode;
    task.signals[signal] = {static_cast<std::uint32_t>(done_flag()), Reach::kNode, false};
  }

  MK_HD constexpr Task compute(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int64_t chunk = spec.tiling.chunk_tiles;
    const std::int64_t group = group_at(rank, index / (topo.gpus * chunk));
    const auto gpu = static_cast<std::int32_t>(index / chunk % topo.gpus);
    const std::int64_t in_chunk = index % chunk;
    const std::int64_t t = chunk_first(group, gpu) + in_chunk;
    if (t >= chunk_end(group, gpu)) return {};
    Task task = tile_task(Action::kGemm, t);
    task.source = Source::kOwn;
    task.src = Buffer::kA;
    task.src_offset = task.block.row;
    task.dst_reach = Reach::kSelf;
    if (topo.world() == 1) {
      task.dst = Buffer::kC;
    } else if (topo.gpus == 1) {
      task.dst = Buffer::kNodePartial;
      task.signals[0] = {sum_flag(group), Reach::kSelf, false};
    } else {
      task.dst = Buffer::kPartial;
      task.peer = topo.rank_of(topo.node_of(rank), gpu);
      task.signals[0] = {tile_flag(group, in_chunk), Reach::kRank, false};
    }
    return task;
  }

  MK_HD constexpr Task intra(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int64_t chunk = spec.tiling.chunk_tiles;
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int64_t group = group_at(rank, index / chunk);
    const std::int64_t t = chunk_first(group, gpu) + index % chunk;
    if (t >= chunk_end(group, gpu)) return {};
    Task task = tile_task(Action::kReduce, t);
    task.source = Source::kNode;
    task.src = Buffer::kPartial;
    task.waits[0] = {tile_flag(group, index % chunk), 1, static_cast<std::uint32_t>(topo.gpus)};
    if (topo.nodes == 1) {
      finish_tile(task, 0);
    } else {
      task.dst = Buffer::kNodePartial;
      task.dst_reach = Reach::kSelf;
      task.signals[0] = {sum_flag(group), Reach::kSelf, false};
    }
    return task;
  }

  // The node sum (or the result) of a chunk, as a network write; `dst_offset` and the stamp are the caller's to set.
  MK_HD constexpr Task chunk_put(std::int32_t rank, std::int64_t group, Buffer src, std::int32_t peer) const {
    const std::int32_t gpu = spec.topo.gpu_of(rank);
    Task task;
    if (chunk_size(group, gpu) == 0) return task;
    task.action = Action::kPut;
    task.peer = peer;
    task.source = Source::kOwn;
    task.src = src;
    task.src_offset = grid().packed(chunk_first(group, gpu));
    task.dst_offset = task.src_offset;
    task.dst_reach = Reach::kRank;
    task.length = chunk_elements(group, gpu);
    return task;
  }

  MK_HD constexpr Task send_swap(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int64_t group = group_at(rank, index);
    Task task = chunk_put(rank, group, Buffer::kNodePartial, topo.rank_of(1 - topo.node_of(rank), gpu));
    if (task.action == Action::kNone) return task;
    task.dst = Buffer::kArrival;
    task.waits[0] = {sum_flag(group), 1, chunk_size(group, gpu)};
    task.signals[0] = {arrival_flag(group), Reach::kRank, true};
    return task;
  }

  MK_HD constexpr Task send_owner(std::int32_t rank, std::int32_t lane, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int32_t node = dest_node(rank, lane);
    const std::int32_t peer = topo.rank_of(node, gpu);
    if (lane_is_result(lane)) {
      const std::int64_t group = index * topo.nodes + self;
      Task task = chunk_put(rank, group, Buffer::kResult, peer);
      if (task.action == Action::kNone) return task;
      task.dst = Buffer::kResult;
      task.waits[0] = {result_flag(group), 1, chunk_size(group, gpu)};
      task.signals[0] = {result_flag(group), Reach::kRank, true};
      return task;
    }
    const std::int64_t group = index * topo.nodes + node;
    Task task = chunk_put(rank, group, Buffer::kNodePartial, peer);
    if (task.action == Action::kNone) return task;
    const std::int32_t slot = self < node ? self : self - 1;
    task.dst = Buffer::kArrival;
    task.dst_offset = arrival_offset(group, gpu) + slot * chunk_stride();
    task.waits[0] = {sum_flag(group), 1, chunk_size(group, gpu)};
    task.signals[0] = {arrival_flag(group) + static_cast<std::uint32_t>(slot), Reach::kRank, true};
    return task;
  }

  MK_HD constexpr Task recv_sum(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int64_t chunk = spec.tiling.chunk_tiles;
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int64_t turn = index / chunk;
    const std::int64_t group = swap ? group_at(rank, turn) : turn * topo.nodes + topo.node_of(rank);
    const std::int64_t t = chunk_first(group, gpu) + index % chunk;
    if (t >= chunk_end(group, gpu)) return {};
    Task task = tile_task(Action::kReduce, t);
    task.source = Source::kRail;
    task.src = Buffer::kNodePartial;
    task.arrival_offset = arrival_offset(group, gpu) + task.src_offset - grid().packed(chunk_first(group, gpu));
    task.arrival_stride = chunk_stride();
    task.waits[0] = {sum_flag(group), 1, chunk_size(group, gpu)};
    task.waits[1] = {arrival_flag(group), static_cast<std::uint32_t>(topo.nodes - 1), 1};
    finish_tile(task, 0);
    if (gather) {
      task.keep_result = true;
      task.signals[1] = {result_flag(group), Reach::kSelf, false};
    }
    return task;
  }

  MK_HD constexpr Task recv_result(std::int32_t rank, std::int32_t lane, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int64_t chunk = spec.tiling.chunk_tiles;
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int32_t node = result_node(rank, lane);
    const std::int64_t group = index / chunk * topo.nodes + node;
    const std::int64_t t = chunk_first(group, gpu) + index % chunk;
    if (t >= chunk_end(group, gpu)) return {};
    Task task = tile_task(Action::kCopy, t);
    task.source = Source::kOwn;
    task.src = Buffer::kResult;
    task.length = task.block.elements();
    task.peer = topo.rank_of(node, gpu);
    task.waits[0] = {result_flag(group), 1, 1};
    finish_tile(task, 0);
    return task;
  }
};

}  // namespace mkernel
