#include "bench/simulated_hierarchy.h"

#include <gtest/gtest.h>

#include "bench/cluster_cases.h"

namespace mkernel::bench {
namespace {

// A shard enters a node once, or every other GPU once: W - 1 copies for N - 1. Partial sums likewise.
TEST(SimulatedHierarchy, FlatMovementCarriesTheWorldWhereHierarchicalCarriesNodes) {
  for (const SimulatedCase& simulated : simulated_hierarchy_cases()) {
    const Topology& topo = simulated.problem.topo;
    const Result<SimulatedPair> pair = simulate_hierarchy(simulated);
    ASSERT_TRUE(pair.ok()) << pair.error().message;
    // Both of AllReduce's steps: 2 (N - 1) / N of what one GPU of a node is responsible for, 1 / G.
    const double expected = static_cast<double>(topo.world() - 1) / (topo.nodes - 1);
    EXPECT_NEAR(pair->flat_bytes / pair->hierarchical_bytes, expected, 1e-6) << case_name(simulated.problem);
    EXPECT_GT(pair->flat_us, pair->hierarchical_us) << case_name(simulated.problem);
  }
}

TEST(SimulatedHierarchy, TheSuiteMeasuresOnlyWorldsInWhichBothDiffer) {
  EXPECT_FALSE(hierarchical_cases().empty());
  for (const ClusterProblem& problem : hierarchical_cases()) {
    EXPECT_GT(problem.topo.nodes, 1);
    EXPECT_GT(problem.topo.gpus, 1);
    EXPECT_EQ(flat_topology(problem.topo).world(), problem.topo.world());
  }
}

}  // namespace
}  // namespace mkernel::bench
