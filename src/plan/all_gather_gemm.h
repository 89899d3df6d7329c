// Plan of all_gather_gemm: C_r [M, N_r] = gather(A) [M, K] * B_r [K, N_r], A_r [M/W, K].
//
// intra copies own chunks of A into the own gather buffer, where the network reads them, then into those of the node's
// other GPUs; send puts them on the rail peer of every other node, recv hands arrived chunks on to the node, compute
// takes tiles in the order in which their rows are expected. A chunk is one network write but several copies
// ("pieces"), so that several SMs carry it. Every chunk is signalled on every rank, also when it holds no rows.
//
// Shards of few rows share tiles (shard_groups.h). Such a tile reads all its rows from the gather buffer, own ones too:
// its shards have one chunk each, whose flags follow each other, so it waits for one range of them. With one GPU per
// node, where only the network writes, that range is all other nodes: the group is the whole world.
//
// Flags number nodes relative to the waiting rank: step j is the node whose chunks arrive j-th, 0 the own node. Only
// `here`, where tiles are shared, numbers them as they are, so that those of a group follow each other.
//   here   (G > 1)  counter per (step, gpu, chunk): the chunk is in the gather buffer; `pieces` raises
//   rail   (N > 1)  stamp per (step >= 1, chunk) of own rail: the network has written it
//   staged (N > 1)  counter per own chunk: the network may read it; `pieces` raises
#pragma once
#include "plan/spec.h"

namespace mkernel {

struct AllGatherGemmPlan {
  PlanSpec spec;
  std::int64_t chunks = 1;     // chunks per shard
  std::int64_t pieces = 1;     // copies per chunk
  std::int64_t tile_rows = 1;  // tile rows per chunk
  std::int64_t tile_cols = 1;  // tile columns, of the rank with the most columns
  std::int64_t pitch = 0;      // elements per row of the gather buffer

  MK_HD static constexpr AllGatherGemmPlan make(const PlanSpec& spec) {
    AllGatherGemmPlan plan;
    plan.spec = spec;
    const std::int64_t max_rows = spec.row_split().max_size();
    plan.chunks = max_of(1, ceil_div(max_rows, spec.tiling.chunk_rows));
    // A shared tile, and so a chunk, is taller than a shard.
    const std::int64_t piece_rows = plan.is_shared() ? max_of(1, max_rows) : spec.tiling.chunk_rows;
    plan.pieces = ceil_div(piece_rows, spec.tiling.copy_rows);
    plan.tile_rows = min_of(spec.tiling.chunk_rows / spec.tiling.bm, max_of(1, ceil_div(max_rows, spec.tiling.bm)));
    plan.tile_cols = max_of(1, ceil_div(spec.col_split().max_size(), spec.tiling.bn));
    plan.pitch = ceil_div(spec.k, spec.tiling.pitch_align) * spec.tiling.pitch_align;
    return plan;
  }

  MK_HD constexpr std::uint32_t flag_count() const {
    const Topology& topo = spec.topo;
    if (topo.world() == 1) return 0;
    return static_cast<std::uint32_t>(staged_base() + (topo.nodes > 1 ? chunks : 0));
  }

  MK_HD constexpr std::int64_t buffer_elements(Buffer buffer) const {
    return buffer == Buffer::kGather && spec.topo.world() > 1 ? spec.m * pitch : 0;
  }

  MK_HD constexpr std::int32_t lanes(Role role) const {
    switch (role) {
      case Role::kCompute: return 1;
      case Role::kIntra: return spec.topo.world() > 1 ? 1 : 0;
      case Role::kSend: return spec.topo.nodes - 1;
      case Role::kRecv: return spec.topo.gpus > 1 ? spec.topo.nodes - 1 : 0;
    }
    return 0;
  }

  MK_HD constexpr std::int64_t count(std::int32_t, Role role, std::int32_t) const {
    switch (role) {
      case Role::kCompute: return spec.groups().runs() * spec.groups().per_run() * chunks * tile_rows * tile_cols;
      case Role::kIntra: return stagings() + (spec.topo.gpus > 1 ? chunks * pieces : 0);
      case Role::kSend: return chunks;
      case Role::kRecv: return chunks * pieces;
    }
    return 0;
  }

  MK_HD constexpr Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    switch (role) {
      case Role::kCompute: return compute(rank, index);
      case Role::kIntra: return index < stagings() ? stage(rank, index) : share(rank, index - stagings());
      case Role::kSend: return send(rank, lane, index);
      case Role::kRecv: return recv(rank, lane + 1, index / pieces, index % pieces);
    }
    return {};
  }

  // All chunks of all ranks are here, also those that an idle rank computes nothing from. (Own lanes see to the rest.)
  MK_HD constexpr Wait completion(std::int32_t) const {
    const Topology& topo = spec.topo;
    if (topo.world() == 1) return {};
    if (topo.gpus == 1) {
      return {static_cast<std::uint32_t>(rail_base()), static_cast<std::uint32_t>((topo.nodes - 1) * chunks), 1};
    }
    return {0, static_cast<std::uint32_t>(rail_base()), static_cast<std::uint32_t>(pieces)};
  }

  MK_HD constexpr FlagName flag_name(std::int32_t rank, std::uint32_t flag) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    if (flag < rail_base()) {
      const auto source = static_cast<std::int32_t>(flag / chunks);
      const std::int32_t gpu = source % topo.gpus;
      // Whoever owns the rail hands the chunk on, its owner where that is a GPU of this node.
      return {"chunk of A, shard/chunk", topo.rank_of(here_node(self, source / topo.gpus), gpu), flag % chunks,
              topo.rank_of(self, gpu)};
    }
    if (flag < staged_base()) {
      const std::int64_t i = flag - rail_base();
      const std::int32_t owner =
          topo.rank_of(node_at(self, static_cast<std::int32_t>(i / chunks) + 1), topo.gpu_of(rank));
      return {"arrival of A, shard/chunk", owner, i % chunks, owner};
    }
    return {"staged chunk of A, shard/chunk", rank, flag - staged_base(), rank};
  }

  // Bytes that `rank` must send so that its shard enters every other node once.
  MK_HD constexpr std::int64_t network_bytes(std::int32_t rank) const {
    return (spec.topo.nodes - 1) * spec.row_split().size(rank) * pitch * dtype_bytes(spec.dtype);
  }

 private:
  // First row of chunk `c` of `owner`, counted in that shard, and its rows.
  MK_HD constexpr std::int64_t chunk_row(std::int32_t owner, std::int64_t c) const {
    return min_of(c * spec.tiling.chunk_rows, spec.row_split().size(owner));
  }
  MK_HD constexpr std::int64_t chunk_rows(std::int32_t owner, std::int64_t c) const {
    return chunk_row(owner, c + 1) - chunk_row(owner, c);
  }
  // The node whose chunks reach node `self` at step `step`, and the step at which those of node `from` reach `self`.
  MK_HD constexpr std::int32_t node_at(std::int32_t self, std::int32_t step) const {
    return (self - step + spec.topo.nodes) % spec.topo.nodes;
  }
  MK_HD constexpr std::int32_t step_of(std::int32_t self, std::int32_t from) const { return node_at(self, from); }

  MK_HD constexpr bool is_shared() const { return spec.tiling.grid_shards > 1; }
  MK_HD constexpr std::int64_t rail_base() const { return spec.topo.gpus > 1 ? spec.topo.world() * chunks : 0; }
  MK_HD constexpr std::int64_t staged_base() const { return rail_base() + (spec.topo.nodes - 1) * chunks; }
  // The number of `node` in the `here` flags of node `self`, and back.
  MK_HD constexpr std::int32_t here_node(std::int32_t self, std::int32_t node) const {
    return is_shared() ? node : node_at(self, node);
  }
  MK_HD constexpr std::uint32_t here_flag(std::int32_t rank, std::int32_t owner, std::int64_t c) const {
    const Topology& topo = spec.topo;
    const std::int64_t node = here_node(topo.node_of(rank), topo.node_of(owner));
    return static_cast<std::uint32_t>((node * topo.gpus + topo.gpu_of(owner)) * chunks + c);
  }
  MK_HD constexpr std::uint32_t rail_flag(std::int32_t step, std::int64_t c) const {
    return static_cast<std::uint32_t>(rail_base() + (step - 1) * chunks + c);
  }
  MK_HD constexpr std::uint32_t staged_flag(std::int64_t c) const {
    return static_cast<std::uint32_t>(staged_base() + c);
  }
  // Copies into the own gather buffer; they come first, so that the network starts at once.
  MK_HD constexpr std::int64_t stagings() const { return spec.topo.nodes > 1 ? chunks * pieces : 0; }

  // The operands that all moves of a chunk, or of some of its rows, share: their place in the gather buffer.
  MK_HD constexpr Task move_rows(Action action, std::int32_t owner, std::int64_t first, std::int64_t rows) const {
    Task task;
    task.action = action;
    task.block = {spec.row_split().begin(owner) + first, 0, rows, spec.k};
    task.source = Source::kOwn;
    task.src = Buffer::kGather;
    task.dst = Buffer::kGather;
    task.src_offset = task.block.row * pitch;
    task.dst_offset = task.src_offset;
    task.length = rows * pitch;
    return task;
  }
  MK_HD constexpr Task move_piece(std::int32_t owner, std::int64_t c, std::int64_t piece) const {
    const std::int64_t rows = chunk_rows(owner, c);
    const std::int64_t begin = min_of(piece * spec.tiling.copy_rows, rows);
    const std::int64_t end = min_of(begin + spec.tiling.copy_rows, rows);
    return move_rows(Action::kCopy, owner, chunk_row(owner, c) + begin, end - begin);
  }

  // Piece `i` of the own shard, read from the caller's A.
  MK_HD constexpr Task own_piece(std::int32_t rank, std::int64_t i) const {
    Task task = move_piece(rank, i / pieces, i % pieces);
    task.src = Buffer::kA;
    task.src_offset = task.block.row - spec.row_split().begin(rank);
    return task;
  }

  MK_HD constexpr Task stage(std::int32_t rank, std::int64_t i) const {
    Task task = own_piece(rank, i);
    task.dst_reach = Reach::kSelf;
    task.signals[0] = {staged_flag(i / pieces), Reach::kSelf, false};
    return task;
  }

  MK_HD constexpr Task share(std::int32_t rank, std::int64_t i) const {
    Task task = own_piece(rank, i);
    // Shared tiles read own rows from the gather buffer too; one node does not stage them.
    task.dst_reach = is_shared() && stagings() == 0 ? Reach::kNode : Reach::kPeers;
    task.signals[0] = {here_flag(rank, rank, i / pieces), Reach::kNode, false};
    return task;
  }

  MK_HD constexpr Task send(std::int32_t rank, std::int32_t lane, std::int64_t c) const {
    const Topology& topo = spec.topo;
    const std::int32_t self = topo.node_of(rank);
    const std::int32_t node = (self + lane + 1) % topo.nodes;
    Task task = move_rows(Action::kPut, rank, chunk_row(rank, c), chunk_rows(rank, c));
    task.peer = topo.rank_of(node, topo.gpu_of(rank));
    task.dst_reach = Reach::kRank;
    task.waits[0] = {staged_flag(c), 1, static_cast<std::uint32_t>(pieces)};
    task.signals[0] = {rail_flag(step_of(node, self), c), Reach::kRank, true};
    return task;
  }

  MK_HD constexpr Task recv(std::int32_t rank, std::int32_t step, std::int64_t c, std::int64_t piece) const {
    const Topology& topo = spec.topo;
    const std::int32_t gpu = topo.gpu_of(rank);
    const std::int32_t owner = topo.rank_of(node_at(topo.node_of(rank), step), gpu);
    Task task = move_piece(owner, c, piece);
    task.peer = owner;
    task.dst_reach = Reach::kPeers;
    task.waits[0] = {rail_flag(step, c), 1, 1};
    task.signals[0] = {here_flag(rank, owner, c), Reach::kNode, false};
    return task;
  }

  // A group's chunk of rows, as the compute lane meets them: all own chunks first, which need no wait unless shards
  // share tiles, then chunk by chunk in turn from each group of the node, as they arrive; then chunk by chunk in turn
  // from all further nodes (or runs of nodes), which all send at the same time, the rail peer's rows of each first.
  struct Visit {
    ShardGroup group;
    std::int64_t chunk;
  };
  MK_HD constexpr Visit visit(std::int32_t rank, std::int64_t i) const {
    const ShardGroups groups = spec.groups();
    const std::int64_t per_run = groups.per_run();
    std::int64_t step = 0;
    std::int64_t chunk = i;
    std::int64_t turn = 0;
    if (i >= per_run * chunks) {
      const std::int64_t foreign = i - per_run * chunks;
      const std::int64_t per_chunk = per_run * (groups.runs() - 1);
      step = 1 + foreign % per_chunk / per_run;
      chunk = foreign / per_chunk;
      turn = foreign % per_run;
    } else if (i >= chunks) {
      chunk = (i - chunks) / (per_run - 1);
      turn = 1 + (i - chunks) % (per_run - 1);
    }
    const std::int64_t run = groups.run_of(spec.topo.node_of(rank)) - step + groups.runs();
    const std::int64_t index = groups.index_of(spec.topo.gpu_of(rank)) + turn;
    return {groups.group(static_cast<std::int32_t>(run % groups.runs()), static_cast<std::int32_t>(index % per_run)),
            chunk};
  }

  MK_HD constexpr Task compute(std::int32_t rank, std::int64_t index) const {
    const std::int64_t per_chunk = tile_rows * tile_cols;
    const auto [group, c] = visit(rank, index / per_chunk);
    const std::int64_t begin = min_of(c * spec.tiling.chunk_rows, spec.group_rows(group));
    const std::int64_t end = min_of((c + 1) * spec.tiling.chunk_rows, spec.group_rows(group));
    TileGrid grid = TileGrid::make(end - begin, spec.col_split().size(rank), 0, spec.tiling);
    grid.grid_rows = tile_rows;
    grid.grid_cols = tile_cols;
    Task task;
    task.block = grid.tile(index % per_chunk);
    if (task.block.empty()) return {};
    task.block.row += spec.group_row(group) + begin;
    task.action = Action::kGemm;
    task.source = Source::kOwn;
    task.dst = Buffer::kC;
    task.dst_reach = Reach::kSelf;
    if (!is_shared() && group.first == rank) {
      task.src = Buffer::kA;
      task.src_offset = task.block.row - spec.group_row(group);
      return task;
    }
    task.src = Buffer::kGather;
    task.src_offset = task.block.row * pitch;
    task.peer = group.first;
    wait_for_rows(rank, group, c, task);
    return task;
  }

  // Until chunk `c` of all shards of the group, not only the own one, is in the gather buffer.
  MK_HD constexpr void wait_for_rows(std::int32_t rank, const ShardGroup& group, std::int64_t c, Task& task) const {
    const Topology& topo = spec.topo;
    const auto raises = static_cast<std::uint32_t>(pieces);
    if (is_shared() && topo.gpus == 1) {
      task.waits[0] = {rail_flag(1, 0), static_cast<std::uint32_t>(topo.nodes - 1), 1};
    } else if (is_shared()) {
      task.waits[0] = {here_flag(rank, group.first, 0), static_cast<std::uint32_t>(group.count()), raises};
    } else if (topo.gpu_of(group.first) == topo.gpu_of(rank)) {
      // The network has written it here; no need to wait for own copies.
      task.waits[0] = {rail_flag(step_of(topo.node_of(rank), topo.node_of(group.first)), c), 1, 1};
    } else {
      task.waits[0] = {here_flag(rank, group.first, c), 1, raises};
    }
    if (is_shared() && group.contains(rank) && stagings() > 0) task.waits[1] = {staged_flag(0), 1, raises};
  }
};

}  // namespace mkernel
