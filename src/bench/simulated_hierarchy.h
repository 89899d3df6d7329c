// What the simulator says of hierarchical against flat movement.
#pragma once
#include <string>
#include <vector>

#include "bench/result_rows.h"
#include "bench/virtual_cluster.h"

namespace mkernel::bench {

struct SimulatedCase {
  std::string preset;
  ClusterProblem problem;  // its hierarchical world
  int sms = 0;             // per rank
};

// The cases of the suite hierarchical with the preset h200-virtual and the SMs per rank that an H200 has for them; and
// square ones on two nodes of eight GPUs with h200x8-ib.
std::vector<SimulatedCase> simulated_hierarchy_cases();

// Both worlds, without data.
Result<SimulatedPair> simulate_hierarchy(const SimulatedCase& simulated);

}  // namespace mkernel::bench
