// Which shards share one grid of tiles. Where shards have few rows, a tile of one shard is mostly empty, and every
// shard reads all of B again; so consecutive shards form groups, as many as fit into the rows of a tile. A group is a
// run of GPUs of one node, or all GPUs of a run of nodes; one shard is the plain case.
#pragma once
#include <cstdint>

#include "base/macros.h"
#include "plan/topology.h"

namespace mkernel {

// The ranks whose shards a group holds.
struct ShardGroup {
  std::int32_t first = 0;
  std::int32_t end = 0;

  MK_HD constexpr std::int32_t count() const { return end - first; }
  MK_HD constexpr bool contains(std::int32_t rank) const { return rank >= first && rank < end; }
  bool operator==(const ShardGroup&) const = default;
};

// Groups are numbered by runs of nodes, and within a run by GPUs: either a run has one node, or it has one group.
struct ShardGroups {
  Topology topo;
  std::int32_t shards = 1;  // of a group: up to `gpus`, or a multiple of them (the last groups may have fewer)

  MK_HD constexpr std::int32_t nodes_per_run() const { return shards < topo.gpus ? 1 : shards / topo.gpus; }
  MK_HD constexpr std::int32_t runs() const { return div_up(topo.nodes, nodes_per_run()); }
  MK_HD constexpr std::int32_t run_of(std::int32_t node) const { return node / nodes_per_run(); }
  MK_HD constexpr std::int32_t per_run() const { return div_up(topo.gpus, shards); }
  MK_HD constexpr std::int32_t index_of(std::int32_t gpu) const { return shards < topo.gpus ? gpu / shards : 0; }

  MK_HD constexpr ShardGroup group(std::int32_t run, std::int32_t index) const {
    const std::int32_t begin = run * nodes_per_run();
    const std::int32_t first = topo.rank_of(begin, index * shards);
    const std::int64_t end_of_run = topo.gpus * min_of(begin + nodes_per_run(), topo.nodes);
    return {first, static_cast<std::int32_t>(min_of(first + shards, end_of_run))};
  }
  MK_HD constexpr ShardGroup holding(std::int32_t rank) const {
    return group(run_of(topo.node_of(rank)), index_of(topo.gpu_of(rank)));
  }

 private:
  MK_HD static constexpr std::int32_t div_up(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }
};

}  // namespace mkernel
