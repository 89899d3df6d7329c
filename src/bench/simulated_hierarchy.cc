#include "bench/simulated_hierarchy.h"

#include <cmath>

#include "bench/cluster_cases.h"
#include "bench/hierarchy.h"
#include "exec/sim/simulator.h"
#include "ops/gemm_spec.h"

namespace mkernel::bench {
namespace {

constexpr int kGpuSms = 132;  // of an H200
constexpr int kSpareSms = 4;  // that no rank gets, for the network's copies
constexpr int kSmStep = 8;    // green contexts are multiples of it

// As the CUDA executor divides a GPU.
int virtual_sms(const Topology& topo) { return (kGpuSms - kSpareSms) / topo.world() / kSmStep * kSmStep; }

struct Moved {
  double us = 0;
  double bytes_per_gpu = 0;
};

Result<Moved> simulate_world(const SimulatedCase& simulated, const Topology& topo, const CostModel& cost) {
  Result<PlanSpec> spec = make_gpu_gemm_spec(topo, simulated.problem.gemm, simulated.sms);
  if (!spec.ok()) return spec.error();
  const PlanSource source{Plan(*spec)};
  SimOptions options;
  options.topo = topo;
  options.sms = simulated.sms;
  options.cost = cost;
  options.data = false;
  const PlanSource* const operators[] = {&source};
  const SimCall calls[] = {{}};
  const SimReport report = simulate(options, operators, calls);
  if (report.error) return *report.error;
  return Moved{static_cast<double>(report.time_ns) * 1e-3, static_cast<double>(report.network_bytes) / topo.world()};
}

}  // namespace

std::vector<SimulatedCase> simulated_hierarchy_cases() {
  std::vector<SimulatedCase> cases;
  for (const ClusterProblem& problem : hierarchical_cases()) {
    cases.push_back({"h200-virtual", problem, virtual_sms(problem.topo)});
  }
  for (const Op op : {Op::kGemmAllReduce, Op::kGemmReduceScatter, Op::kAllGatherGemm}) {
    for (const std::int64_t size : {4096, 16384}) {
      ClusterProblem problem;
      problem.topo = {2, 8};
      problem.gemm.op = op;
      problem.link = {LinkRule::Kind::kFixed, 50, 2};  // what the preset has
      problem.gemm.m = problem.gemm.n = problem.gemm.k = size;
      cases.push_back({"h200x8-ib", problem, kGpuSms});
    }
  }
  return cases;
}

Result<SimulatedPair> simulate_hierarchy(const SimulatedCase& simulated) {
  Result<CostModel> cost = find_preset(simulated.preset);
  if (!cost.ok()) return cost.error();
  SimulatedPair pair;
  pair.preset = simulated.preset;
  pair.sms = simulated.sms;
  if (simulated.preset == "h200-virtual") {
    const LinkRate link = resolve_link(simulated.problem.link, simulated.sms, kGpuSms, 0, 0);
    cost->net_bytes_per_ns = link.gigabytes_per_s;
    cost->net_ns = std::llround(link.latency_us * 1e3);
  }
  pair.link = {cost->net_bytes_per_ns, static_cast<double>(cost->net_ns) * 1e-3};
  const Topology& topo = simulated.problem.topo;
  const Result<Moved> hierarchical = simulate_world(simulated, topo, *cost);
  if (!hierarchical.ok()) return hierarchical.error();
  const Result<Moved> flat = simulate_world(simulated, flat_topology(topo), *cost);
  if (!flat.ok()) return flat.error();
  pair.hierarchical_us = hierarchical->us;
  pair.hierarchical_bytes = hierarchical->bytes_per_gpu;
  pair.flat_us = flat->us;
  pair.flat_bytes = flat->bytes_per_gpu;
  return pair;
}

}  // namespace mkernel::bench
