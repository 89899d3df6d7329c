#include "cli/problem.h"

#include <fmt/format.h>

#include <algorithm>

#include "ops/attention_spec.h"
#include "ops/gemm_spec.h"
#include "plan/plan.h"
#include "plan/print.h"

namespace mkernel::cli {

Result<PlanSpec> make_problem_spec(const ProblemArgs& problem) {
  if (!problem.is_attention()) return make_gemm_spec(problem.topo, problem.gemm);
  AttentionBackwardOptions options = problem.attention;
  options.fused = problem.gemm.fused;
  return problem.is_backward() ? make_backward_spec(problem.topo, options) : make_attention_spec(problem.topo, options);
}

std::string describe_world(const Topology& topo) {
  return fmt::format("{} node{} x {} GPU{}", topo.nodes, topo.nodes == 1 ? "" : "s", topo.gpus,
                     topo.gpus == 1 ? "" : "s");
}

std::string describe_problem(const PlanSpec& spec) {
  if (attends(spec.op)) {
    const bool backward = spec.op == Op::kRingAttentionBackward;
    KvRing ring;
    ring.make_ring(spec, backward);
    return fmt::format("{}, tiles of {}{}, chunks of {}, slots for {} of {} rounds", attention_text(spec),
                       spec.tiling.bm, backward ? fmt::format(" x {}", spec.tiling.bn) : "", spec.tiling.chunk_rows,
                       ring.depth, ring.rounds);
  }
  std::string text =
      fmt::format("C ({0} x {1}) = A ({0} x {2}) * B ({2} x {1}), {3}", spec.m, spec.n, spec.k, dtype_name(spec.dtype));
  if (spec.op != Op::kAllGatherGemm) text += fmt::format(", sums between GPUs in {}", dtype_name(spec.partial));
  return text + fmt::format(", tiles of {} x {}", spec.tiling.bm, spec.tiling.bn);
}

NetworkBound network_bound(const PlanSpec& spec) {
  const Plan plan(spec);
  NetworkBound bound;
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const std::int64_t bytes = plan.network_bytes(rank);
    bound.total += bytes;
    bound.busiest = std::max(bound.busiest, bytes);
  }
  return bound;
}

}  // namespace mkernel::cli
