#include "verify/network.h"

#include <fmt/format.h>

#include <optional>

namespace mkernel {
namespace {

std::int64_t gather_pitch(const PlanSpec& spec) {
  return ceil_div(spec.k, spec.tiling.pitch_align) * spec.tiling.pitch_align;
}

// Keys and values of the chunks of `owner` of which some query of `node` sees something, in elements of so many bytes.
std::int64_t seen_bytes(const PlanSpec& spec, std::int32_t owner, std::int32_t node, std::int64_t element_bytes) {
  const AttentionSpec& a = spec.attention;
  const SequenceSplit split = a.k_split(spec.topo);
  std::int64_t tokens = 0;
  for (std::int32_t segment = 0; segment < split.segments(); ++segment) {
    const std::int64_t end = split.begin(owner, segment) + split.size(owner, segment);
    for (std::int64_t key = split.begin(owner, segment); key < end; key += spec.tiling.chunk_rows) {
      const std::int64_t keys = min_of(spec.tiling.chunk_rows, end - key);
      if (node_sees(spec, node, key, keys)) tokens += keys;
    }
  }
  return tokens * 2 * a.batch * a.kv_heads * a.dim * element_bytes;
}

// Each chunk of own keys and values into each other node that sees any of it, once.
std::int64_t attention_bound(const PlanSpec& spec, std::int32_t rank) {
  std::int64_t bytes = 0;
  for (std::int32_t node = 0; node < spec.topo.nodes; ++node) {
    if (node != spec.topo.node_of(rank)) bytes += seen_bytes(spec, rank, node, dtype_bytes(spec.dtype));
  }
  return bytes;
}

// What one rank must send, where the pattern leaves no choice.
std::optional<std::int64_t> bound_of_rank(const PlanSpec& spec, std::int32_t rank) {
  const Topology& topo = spec.topo;
  if (topo.nodes == 1) return 0;
  switch (spec.op) {
    case Op::kAllGatherGemm:
      // Own shard into each other node, once.
      return (topo.nodes - 1) * spec.row_split().size(rank) * gather_pitch(spec) * dtype_bytes(spec.dtype);
    case Op::kGemmReduceScatter: {
      // One sum of own node for every other node of the rail.
      std::int64_t rows = 0;
      for (std::int32_t node = 0; node < topo.nodes; ++node) {
        if (node != topo.node_of(rank)) rows += spec.row_split().size(topo.rank_of(node, topo.gpu_of(rank)));
      }
      return rows * spec.n * dtype_bytes(spec.partial);
    }
    case Op::kRingAttention: return attention_bound(spec, rank);
    case Op::kRingAttentionBackward: {
      std::int64_t bytes = attention_bound(spec, rank);
      // One sum of own node for every chunk of its rail on other nodes that own node has seen any of.
      for (std::int32_t node = 0; node < topo.nodes; ++node) {
        if (node == topo.node_of(rank)) continue;
        bytes += seen_bytes(spec, topo.rank_of(node, topo.gpu_of(rank)), topo.node_of(rank), dtype_bytes(spec.partial));
      }
      return bytes;
    }
    case Op::kGemmAllReduce: break;
  }
  return std::nullopt;
}

// Sums travel to an owner and results back, each element over N-1 hops each way. (Two nodes that swap do the same work
// with partial sums in both directions, which is as much as long as both types are equally wide.)
std::int64_t all_reduce_bound(const PlanSpec& spec) {
  return (spec.topo.nodes - 1) * spec.m * spec.n * (dtype_bytes(spec.partial) + dtype_bytes(spec.dtype));
}

// Where all tiles are whole, ranks differ by their last chunk and by one chunk that they own or not.
bool share_is_even(const PlanSpec& spec, std::int64_t sent) {
  const Tiling& tiling = spec.tiling;
  if (spec.m % tiling.bm != 0 || spec.n % tiling.bn != 0) return true;
  const std::int64_t chunk = std::int64_t{tiling.chunk_tiles} * tiling.bm * tiling.bn;
  const std::int64_t slack = chunk * (dtype_bytes(spec.partial) + (spec.topo.nodes - 1) * dtype_bytes(spec.dtype));
  const std::int64_t mean = all_reduce_bound(spec) / spec.topo.world();
  return sent <= mean + slack && sent >= mean - slack;
}

}  // namespace

bool node_sees(const PlanSpec& spec, std::int32_t node, std::int64_t key, std::int64_t keys) {
  const AttentionSpec& a = spec.attention;
  const SequenceSplit split = a.q_split(spec.topo);
  for (std::int32_t gpu = 0; gpu < spec.topo.gpus; ++gpu) {
    const std::int32_t rank = spec.topo.rank_of(node, gpu);
    for (std::int64_t t = 0; t < split.tokens(rank); ++t) {
      if (a.packed) return true;
      const KeyRange seen = a.mask.sees(split.position(rank, t), 1, a.seq_q, a.seq_k);
      if (!seen.empty() && seen.begin < key + keys && seen.end > key) return true;
    }
  }
  return false;
}

std::int64_t sent_bytes(const Enumeration& all, std::int32_t rank) {
  std::int64_t bytes = 0;
  for (TaskId id = all.first_task(rank); id < all.end_task(rank); ++id) {
    const Task& task = all.tasks()[id];
    if (task.action == Action::kPut) bytes += task.length * dtype_bytes(all.plan().buffer_dtype(task.src));
  }
  return bytes;
}

std::int64_t network_bound(const PlanSpec& spec) {
  if (spec.op == Op::kGemmAllReduce) return all_reduce_bound(spec);
  std::int64_t bytes = 0;
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) bytes += bound_of_rank(spec, rank).value_or(0);
  return bytes;
}

void check_network(const Enumeration& all, Findings& findings) {
  const PlanSpec& spec = all.plan().spec();
  std::int64_t total = 0;
  for (std::int32_t rank = 0; rank < all.world(); ++rank) {
    const std::int64_t sent = sent_bytes(all, rank);
    total += sent;
    const std::int64_t announced = all.plan().network_bytes(rank);
    const std::int64_t bound = bound_of_rank(spec, rank).value_or(announced);
    if (sent != announced || sent != bound) {
      findings.add(ViolationKind::kNetwork, {rank, Role::kSend}, [&] {
        return fmt::format("rank {} sends {} bytes, the plan announces {}, the lower bound is {}", rank, sent,
                           announced, bound);
      });
    }
    if (spec.op == Op::kGemmAllReduce && spec.topo.nodes > 1 && !share_is_even(spec, sent)) {
      findings.add(ViolationKind::kNetwork, {rank, Role::kSend}, [&] {
        return fmt::format("rank {} sends {} bytes, more than a chunk away from the mean {}", rank, sent,
                           all_reduce_bound(spec) / all.world());
      });
    }
  }
  if (total != network_bound(spec)) {
    findings.add(ViolationKind::kNetwork, {0, Role::kSend}, [&] {
      return fmt::format("all ranks together send {} bytes, the lower bound is {}", total, network_bound(spec));
    });
  }
}

}  // namespace mkernel
