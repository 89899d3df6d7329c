// From results to rows.
#pragma once
#include <string>
#include <vector>

#include "bench/command_ring.h"
#include "bench/gemm_core.h"
#include "bench/hierarchy.h"
#include "bench/row.h"
#include "bench/virtual_cluster.h"

namespace mkernel::bench {

// The suite command_ring; the baselines are bars, not contestants.
std::vector<Row> ring_rows(const RingResult& result);
// One row per baseline.
std::vector<Row> core_rows(const std::string& suite, const CoreProblem& problem, const CoreResult& result,
                           const std::string& cublas_version);
std::vector<Row> cluster_rows(const std::string& suite, const ClusterProblem& problem, const ClusterResult& result,
                              const std::string& cublas_version);
// The suite hierarchical: a row in us, and one in bytes per GPU that the network carried.
std::vector<Row> hierarchy_rows(const std::string& suite, const ClusterProblem& problem, const HierarchyResult& result);
// The same pair in the simulator, as the suite sim_hierarchical.
struct SimulatedPair {
  std::string preset;
  int sms = 0;
  LinkRate link;
  double hierarchical_us = 0;
  double flat_us = 0;
  double hierarchical_bytes = 0;  // per GPU
  double flat_bytes = 0;
};
std::vector<Row> simulated_hierarchy_rows(const ClusterProblem& problem, const SimulatedPair& pair);

}  // namespace mkernel::bench
