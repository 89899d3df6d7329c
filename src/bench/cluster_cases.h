// What the suites `virtual_cluster` and `small` measure.
#pragma once
#include <string>
#include <vector>

#include "bench/virtual_cluster.h"

namespace mkernel::bench {

// All operators on 2x4 and 2x2, larger shapes, scaled and balanced links; one shape on 4x2, 1x8 and 3x2.
std::vector<ClusterProblem> virtual_cluster_cases();
// Decode: M = 1 to 2048.
std::vector<ClusterProblem> small_cases();

// "gemm_all_reduce 2x4 4096x4096x16384 scaled": what --filter looks at.
std::string case_name(const ClusterProblem& problem);

}  // namespace mkernel::bench
