#include "bench/cluster_cases.h"

#include <fmt/format.h>

#include <span>

#include "bench/row.h"

namespace mkernel::bench {
namespace {

constexpr Op kOps[] = {Op::kGemmAllReduce, Op::kGemmReduceScatter, Op::kAllGatherGemm};
constexpr LinkRule::Kind kBothLinks[] = {LinkRule::Kind::kScaled, LinkRule::Kind::kBalanced};
constexpr LinkRule::Kind kScaledLink[] = {LinkRule::Kind::kScaled};

// `n` and `k` are those of one rank's GEMM.
void add(std::vector<ClusterProblem>& cases, Op op, Topology topo, std::int64_t m, std::int64_t n, std::int64_t k,
         std::span<const LinkRule::Kind> links = kBothLinks) {
  for (const LinkRule::Kind link : links) {
    if (topo.nodes == 1 && link != links[0]) continue;  // there is no network
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
  const auto add_small = [&](Op op, Topology topo, std::int64_t m, std::span<const LinkRule::Kind> links) {
    add(cases, op, topo, m, op == Op::kAllGatherGemm ? 1024 : 8192, op == Op::kAllGatherGemm ? 8192 : 1024, links);
  };
  for (const Op op : kOps) {
    for (const std::int64_t m : {1, 16, 128, 512, 2048}) add_small(op, {2, 4}, m, kBothLinks);
  }
  // Topology by topology, as each needs a division of the GPU of its own.
  for (const Topology topo : {Topology{2, 2}, Topology{4, 2}, Topology{3, 2}, Topology{1, 8}}) {
    for (const Op op : kOps) {
      for (const std::int64_t m : {16, 128, 512, 2048}) add_small(op, topo, m, kScaledLink);
    }
  }
  return cases;
}

std::vector<ClusterProblem> hierarchical_cases() {
  std::vector<ClusterProblem> cases;
  for (const Topology topo : {Topology{2, 4}, Topology{2, 2}, Topology{3, 2}, Topology{4, 2}}) {
    for (const Op op : kOps) {
      if (op == Op::kAllGatherGemm) {
        add(cases, op, topo, 8192, 1024, 4096, kScaledLink);
      } else {
        add(cases, op, topo, 4096, 4096, 2048, kScaledLink);
      }
      // Decode sizes: latencies and the number of writes count, not bytes.
      add(cases, op, topo, 128, op == Op::kAllGatherGemm ? 1024 : 8192, op == Op::kAllGatherGemm ? 8192 : 1024,
          kScaledLink);
    }
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
