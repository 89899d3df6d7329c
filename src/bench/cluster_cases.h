// What the suites `virtual_cluster`, `small` and `hierarchical` measure.
#pragma once
#include <string>
#include <vector>

#include "bench/virtual_cluster.h"

namespace mkernel::bench {

// All operators on 2x4 and 2x2, larger shapes, scaled and balanced links; one shape on 4x2, 1x8 and 3x2.
std::vector<ClusterProblem> virtual_cluster_cases();
// Decode: M = 1 to 2048 on 2x4 with scaled and balanced links, 16 to 2048 on 2x2, 4x2, 3x2 and 1x8 with scaled ones.
std::vector<ClusterProblem> small_cases();
// Worlds of several nodes with several GPUs, scaled links; those of a topology together.
std::vector<ClusterProblem> hierarchical_cases();

// "gemm_all_reduce 2x4 4096x4096x16384 scaled": what --filter looks at.
std::string case_name(const ClusterProblem& problem);

}  // namespace mkernel::bench
