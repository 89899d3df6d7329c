// Plan of gemm_reduce_scatter: rank r gets rows r*M/W.. of C = sum over ranks of A_r [M, K_r] * B_r [K_r, N].
//
// compute makes partial tiles, those for other nodes first; a tile for (d, l) is summed over the node on (n, l) by
// intra, sent chunk by chunk to (d, l), and summed over the nodes there by recv. Every shard has at least one tile
// slot, so ranks without rows still exchange signals with all ranks whose memory they share.
//
// Shards of few rows share tiles (shard_groups.h): compute makes tiles of a group's rows, and raises one flag on all
// GPUs of the node that own some of them. Everything behind goes shard by shard: a tile is packed row by row, so a
// shard's rows in it, which intra reads, are one contiguous piece. Tile t of a group holds rows of tile t of each of
// its shards, since all grids have the same columns, and where they are shared, one row of tiles.
#pragma once
#include "plan/spec.h"

namespace mkernel {

struct GemmReduceScatterPlan {
  PlanSpec spec;
  std::int64_t tiles = 1;           // tile slots per shard, and per group of shards
  std::int64_t chunks = 1;          // chunks per shard
  std::int64_t shard_elements = 0;  // of the largest shard
  std::int64_t group_rows = 0;      // of the largest group of shards

  MK_HD static constexpr GemmReduceScatterPlan make(const PlanSpec& spec) {
    GemmReduceScatterPlan plan;
    plan.spec = spec;
    plan.group_rows = spec.group_rows(spec.groups().group(0, 0));
    plan.tiles = TileGrid::make(plan.group_rows, spec.n, plan.group_rows, spec.tiling).count();
    plan.chunks = ceil_div(plan.tiles, spec.tiling.chunk_tiles);
    plan.shard_elements = spec.row_split().max_size() * spec.n;
    return plan;
  }

  MK_HD constexpr std::uint32_t flag_count() const {
    return static_cast<std::uint32_t>(arrival_base() + (spec.topo.nodes - 1) * chunks);
  }

  MK_HD constexpr std::int64_t buffer_elements(Buffer buffer) const {
    const Topology& topo = spec.topo;
    switch (buffer) {
      case Buffer::kPartial: return has_partials() ? spec.m * spec.n : 0;
      case Buffer::kNodePartial: return topo.nodes > 1 ? topo.nodes * shard_elements : 0;
      case Buffer::kArrival: return (topo.nodes - 1) * shard_elements;
      default: return 0;
    }
  }

  MK_HD constexpr std::int32_t lanes(Role role) const {
    switch (role) {
      case Role::kCompute: return 1;
      case Role::kIntra: return has_partials() ? 1 : 0;
      case Role::kSend: return spec.topo.nodes - 1;
      case Role::kRecv: return spec.topo.nodes > 1 ? 1 : 0;
    }
    return 0;
  }

  MK_HD constexpr std::int64_t count(std::int32_t, Role role, std::int32_t) const {
    switch (role) {
      case Role::kCompute: return spec.groups().runs() * spec.groups().per_run() * tiles;
      case Role::kIntra: return spec.topo.nodes * tiles;
      case Role::kSend: return chunks;
      case Role::kRecv: return tiles;
    }
    return 0;
  }

  MK_HD constexpr Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    switch (role) {
      case Role::kCompute: return compute(rank, index);
      case Role::kIntra: return intra(rank, index);
      case Role::kSend: return send(rank, lane, index);
      case Role::kRecv: return recv(rank, index);
    }
    return {};
  }

  // Whoever reads or writes our memory has signalled one of our lanes, so finished lanes are enough.
  MK_HD constexpr Wait completion(std::int32_t) const { return {}; }

  MK_HD constexpr FlagName flag_name(std::int32_t rank, std::uint32_t flag) const {
    const Topology& topo = spec.topo;
    if (flag < chunk_base()) {
      return {"partial tile, node/tile", flag / tiles * spec.groups().nodes_per_run(), flag % tiles, -1};
    }
    if (flag < arrival_base()) {
      const std::int64_t i = flag - chunk_base();
      return {"node sum, node/chunk", i / chunks, i % chunks, rank};
    }
    const std::int64_t i = flag - arrival_base();
    const std::int32_t node = other_node(rank, static_cast<std::int32_t>(i % (topo.nodes - 1)));
    return {"arrival, node/chunk", node, i / (topo.nodes - 1), topo.rank_of(node, topo.gpu_of(rank))};
  }

  // Bytes that `rank` must send: one node sum of every other node's shard of its rail.
  MK_HD constexpr std::int64_t network_bytes(std::int32_t rank) const {
    const Topology& topo = spec.topo;
    std::int64_t rows = 0;
    for (std::int32_t d = 0; d < topo.nodes; ++d) {
      if (d != topo.node_of(rank)) rows += spec.row_split().size(topo.rank_of(d, topo.gpu_of(rank)));
    }
    return rows * spec.n * dtype_bytes(spec.partial);
  }

 private:
  // Otherwise products are node sums already: one GPU per node, whose tiles are one shard's.
  MK_HD constexpr bool has_partials() const { return spec.topo.gpus > 1 || spec.tiling.grid_shards > 1; }

  MK_HD constexpr std::int64_t chunk_base() const { return has_partials() ? spec.groups().runs() * tiles : 0; }
  MK_HD constexpr std::int64_t arrival_base() const {
    return chunk_base() + (spec.topo.nodes > 1 ? spec.topo.nodes * chunks : 0);
  }
  // Tile `t` of the group that holds the shard of own GPU index on `node`.
  MK_HD constexpr std::uint32_t tile_flag(std::int32_t node, std::int64_t t) const {
    return static_cast<std::uint32_t>(spec.groups().run_of(node) * tiles + t);
  }
  MK_HD constexpr std::uint32_t chunk_flag(std::int32_t node, std::int64_t c) const {
    return static_cast<std::uint32_t>(chunk_base() + node * chunks + c);
  }
  MK_HD constexpr std::uint32_t arrival_flag(std::int64_t c) const {
    return static_cast<std::uint32_t>(arrival_base() + c * (spec.topo.nodes - 1));
  }
  // The index of `node` among the nodes other than `self`, and back.
  MK_HD static constexpr std::int32_t index_among_others(std::int32_t self, std::int32_t node) {
    return node < self ? node : node - 1;
  }
  MK_HD constexpr std::int32_t other_node(std::int32_t rank, std::int32_t index) const {
    return index < spec.topo.node_of(rank) ? index : index + 1;
  }
  MK_HD constexpr std::int64_t chunk_size(std::int64_t c) const {
    return min_of(spec.tiling.chunk_tiles, tiles - c * spec.tiling.chunk_tiles);
  }
  MK_HD constexpr TileGrid grid(std::int32_t shard) const {
    return TileGrid::make(spec.row_split().size(shard), spec.n, spec.row_split().max_size(), spec.tiling);
  }
  // Tile `t` of `shard` in the coordinates of the whole C.
  MK_HD constexpr Block block_of(std::int32_t shard, std::int64_t t) const {
    Block block = grid(shard).tile(t);
    block.row += spec.row_split().begin(shard);
    return block;
  }
  MK_HD constexpr TileGrid group_grid(const ShardGroup& group) const {
    return TileGrid::make(spec.group_rows(group), spec.n, group_rows, spec.tiling);
  }
  // Where the rows of `shard`, one of the group's, begin in the group's tile `t` in kPartial.
  MK_HD constexpr std::int64_t partial_offset(const ShardGroup& group, std::int32_t shard, std::int64_t t) const {
    const TileGrid tiles_of_group = group_grid(group);
    const std::int64_t rows_before = spec.row_split().begin(shard) - spec.group_row(group);
    return spec.group_row(group) * spec.n + tiles_of_group.packed(t) + rows_before * tiles_of_group.tile(t).cols;
  }
  // Where a tile of the shard that (node, own gpu) owns lies in kNodePartial.
  MK_HD constexpr std::int64_t node_partial_offset(std::int32_t node, std::int32_t shard, std::int64_t t) const {
    return node * shard_elements + grid(shard).packed(t);
  }
  // The caller's C holds own rows only.
  MK_HD constexpr Block own_rows(std::int32_t rank, Block block) const {
    block.row -= spec.row_split().begin(rank);
    return block;
  }

  MK_HD constexpr Task compute(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const ShardGroups groups = spec.groups();
    const std::int64_t run_tiles = groups.per_run() * tiles;
    const std::int32_t run = (groups.run_of(topo.node_of(rank)) + 1 + static_cast<std::int32_t>(index / run_tiles)) %
                             groups.runs();  // that of own node last
    // Within a run: chunk by chunk, each chunk for all groups in turn, that of own GPU last.
    const std::int64_t within = index % run_tiles;
    const std::int64_t chunk_slots = static_cast<std::int64_t>(groups.per_run()) * spec.tiling.chunk_tiles;
    const std::int64_t c = within / chunk_slots;
    const std::int64_t in_chunk = within - c * chunk_slots;
    const std::int64_t size = chunk_size(c);
    const auto turn = static_cast<std::int32_t>(in_chunk / size);
    const std::int64_t t = c * spec.tiling.chunk_tiles + in_chunk % size;
    const ShardGroup group = groups.group(run, (groups.index_of(topo.gpu_of(rank)) + 1 + turn) % groups.per_run());

    Task task;
    task.action = Action::kGemm;
    task.block = group_grid(group).tile(t);
    task.block.row += spec.group_row(group);
    task.source = Source::kOwn;
    task.src = Buffer::kA;
    task.src_offset = task.block.row;
    task.dst_reach = Reach::kSelf;
    if (topo.world() == 1) {
      task.dst = Buffer::kC;
      return task;
    }
    const std::int32_t node = topo.node_of(group.first);
    if (!has_partials()) {
      task.dst = Buffer::kNodePartial;
      task.dst_offset = node_partial_offset(node, group.first, t);
      task.signals[0] = {chunk_flag(node, c), Reach::kSelf, false};
      return task;
    }
    task.dst = Buffer::kPartial;
    task.dst_offset = partial_offset(group, group.first, t);
    task.peer = topo.rank_of(topo.node_of(rank), topo.gpu_of(group.first));
    const bool all_gpus = group.count() >= topo.gpus;
    task.signals[0] = {tile_flag(node, t), all_gpus ? Reach::kNode : Reach::kRank, false,
                       static_cast<std::uint16_t>(all_gpus ? 1 : group.count())};
    return task;
  }

  MK_HD constexpr Task intra(std::int32_t rank, std::int64_t index) const {
    const Topology& topo = spec.topo;
    const std::int32_t node = (topo.node_of(rank) + 1 + static_cast<std::int32_t>(index / tiles)) % topo.nodes;
    const std::int64_t t = index % tiles;
    const std::int32_t shard = topo.rank_of(node, topo.gpu_of(rank));
    Task task;
    task.action = Action::kReduce;
    task.block = block_of(shard, t);
    task.source = Source::kNode;
    task.src = Buffer::kPartial;
    task.src_offset = partial_offset(spec.groups().holding(shard), shard, t);
    task.dst_reach = Reach::kSelf;
    task.waits[0] = {tile_flag(node, t), 1, static_cast<std::uint32_t>(topo.gpus)};
    if (topo.nodes == 1) {
      task.dst = Buffer::kC;
      task.block = own_rows(rank, task.block);
      return task;
    }
    task.dst = Buffer::kNodePartial;
    task.dst_offset = node_partial_offset(node, shard, t);
    task.signals[0] = {chunk_flag(node, t / spec.tiling.chunk_tiles), Reach::kSelf, false};
    return task;
  }

  MK_HD constexpr Task send(std::int32_t rank, std::int32_t lane, std::int64_t c) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int32_t node = (self + 1 + lane) % topo.nodes;
    const std::int32_t shard = topo.rank_of(node, topo.gpu_of(rank));
    const std::int64_t first = c * spec.tiling.chunk_tiles;
    const std::int64_t begin = grid(shard).packed(first);
    Task task;
    task.action = Action::kPut;
    task.peer = shard;
    task.source = Source::kOwn;
    task.src = Buffer::kNodePartial;
    task.dst = Buffer::kArrival;
    task.dst_reach = Reach::kRank;
    task.src_offset = node * shard_elements + begin;
    const std::int32_t slot = index_among_others(node, self);
    task.dst_offset = slot * shard_elements + begin;
    task.length = grid(shard).packed(first + chunk_size(c)) - begin;
    task.waits[0] = {chunk_flag(node, c), 1, static_cast<std::uint32_t>(chunk_size(c))};
    task.signals[0] = {arrival_flag(c) + static_cast<std::uint32_t>(slot), Reach::kRank, true};
    return task;
  }

  MK_HD constexpr Task recv(std::int32_t rank, std::int64_t t) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int64_t c = t / spec.tiling.chunk_tiles;
    Task task;
    task.action = Action::kReduce;
    task.block = own_rows(rank, block_of(rank, t));
    task.source = Source::kRail;
    task.src = Buffer::kNodePartial;
    task.src_offset = node_partial_offset(self, rank, t);
    task.arrival_offset = grid(rank).packed(t);
    task.arrival_stride = shard_elements;
    task.dst = Buffer::kC;
    task.dst_reach = Reach::kSelf;
    task.waits[0] = {chunk_flag(self, c), 1, static_cast<std::uint32_t>(chunk_size(c))};
    task.waits[1] = {arrival_flag(c), static_cast<std::uint32_t>(topo.nodes - 1), 1};
    return task;
  }
};

}  // namespace mkernel
