// From results to rows.
#pragma once
#include <string>
#include <vector>

#include "bench/command_ring.h"
#include "bench/gemm_core.h"
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

}  // namespace mkernel::bench
