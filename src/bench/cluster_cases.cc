#include "bench/cluster_cases.h"

#include <fmt/format.h>

#include "bench/row.h"

namespace mkernel::bench {
namespace {

constexpr Op kOps[] = {Op::kGemmAllReduce, Op::kGemmReduceScatter, Op::kAllGatherGemm};
constexpr LinkRule::Kind kLinks[] = {LinkRule::Kind::kScaled, LinkRule::Kind::kBalanced};

// `n` and `k` are those of one rank's GEMM.
void add(std::vector<ClusterProblem>& cases, Op op, Topology topo, std::int64_t m, std::int64_t n, std::int64_t k) {
  for (const LinkRule::Kind link : kLinks) {
    if (topo.nodes == 1 && link != kLinks[0]) continue;  // there is no network
    ClusterProblem problem;
    problem.topo = topo;
    problem.gemm.op = op;
    problem.gemm.m = m;
    problem.gemm.n = op == Op::kAllGatherGemm ? n * topo.world() : n;
    problem.gemm.k = op == Op::kAllGatherGemm ? k : k * topo.world();
    problem.link.kind = topo.nodes == 1 ? LinkRule::Kind::kNone : link;
    cases.push_back(problem);
  }
}

}  // namespace

std::vector<ClusterProblem> virtual_cluster_cases() {
  std::vector<ClusterProblem> cases;
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{2, 4}, Topology{2, 2}}) {
      if (op == Op::kAllGatherGemm) {
        // The network carries A, so it is N that decides which takes longer.
        for (const std::int64_t n : {512, 1024, 2048}) add(cases, op, topo, 8192, n, 4096);
      } else {
        for (const std::int64_t k : {1024, 2048, 4096}) add(cases, op, topo, 4096, 4096, k);
        add(cases, op, topo, 8192, 8192, 2048);
      }
    }
    for (const Topology topo : {Topology{4, 2}, Topology{1, 8}, Topology{3, 2}}) {
      if (op == Op::kAllGatherGemm) {
        add(cases, op, topo, 8192, 1024, 4096);
      } else {
        add(cases, op, topo, 4096, 4096, 2048);
      }
    }
  }
  return cases;
}

std::vector<ClusterProblem> small_cases() {
  std::vector<ClusterProblem> cases;
  for (const Op op : kOps) {
    for (const std::int64_t m : {1, 16, 128, 512, 2048})
      add(cases, op, {2, 4}, m, op == Op::kAllGatherGemm ? 1024 : 8192, op == Op::kAllGatherGemm ? 8192 : 1024);
  }
  return cases;
}

const ClusterTime* ClusterResult::find(const std::string& name) const {
  for (const ClusterTime& time : times) {
    if (time.name == name) return &time;
  }
  return nullptr;
}

std::string case_name(const ClusterProblem& problem) {
  const GemmOptions& gemm = problem.gemm;
  return fmt::format("{} {} {} {}", op_name(gemm.op), topology_text(problem.topo.nodes, problem.topo.gpus),
                     shape_text(gemm.m, gemm.n, gemm.k), link_text(problem.link));
}

}  // namespace mkernel::bench
