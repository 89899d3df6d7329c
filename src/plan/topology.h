// Ranks, nodes and rails, and how a length is divided over ranks. Pure integer arithmetic for host and device.
#pragma once
#include <cstdint>

#include "base/macros.h"

namespace mkernel {

// N nodes of G GPUs; rank = node * gpus + gpu. A rail is the set of GPUs with the same index on every node.
struct Topology {
  std::int32_t nodes = 1;
  std::int32_t gpus = 1;

  MK_HD constexpr std::int32_t world() const { return nodes * gpus; }
  MK_HD constexpr std::int32_t node_of(std::int32_t rank) const { return rank / gpus; }
  MK_HD constexpr std::int32_t gpu_of(std::int32_t rank) const { return rank % gpus; }
  MK_HD constexpr std::int32_t rank_of(std::int32_t node, std::int32_t gpu) const { return node * gpus + gpu; }
};

// `total` items over `parts` owners, the first `total % parts` owners get one more (as numpy.array_split does).
// Owners beyond `total` get none.
struct Split {
  std::int64_t total = 0;
  std::int32_t parts = 1;

  MK_HD constexpr std::int64_t begin(std::int32_t i) const {
    const std::int64_t quotient = total / parts;
    const std::int64_t rest = total % parts;
    return i * quotient + (i < rest ? i : rest);
  }
  MK_HD constexpr std::int64_t size(std::int32_t i) const { return total / parts + (i < total % parts ? 1 : 0); }
  // The largest part; part 0 has it.
  MK_HD constexpr std::int64_t max_size() const { return size(0); }
};

MK_HD constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
MK_HD constexpr std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
MK_HD constexpr std::int64_t max_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

}  // namespace mkernel
