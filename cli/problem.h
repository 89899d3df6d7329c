// What a spec is, in words and in bytes.
#pragma once
#include <cstdint>
#include <string>

#include "cli/args.h"
#include "plan/spec.h"

namespace mkernel::cli {

// A valid spec for what was asked for, on CPU threads or in the simulator.
Result<PlanSpec> make_problem_spec(const ProblemArgs& problem);

// "2 nodes x 4 GPUs".
std::string describe_world(const Topology& topo);

// "C (512 x 512) = A (512 x 512) * B (512 x 512), bf16, sums between GPUs in bf16, tiles of 128 x 64".
std::string describe_problem(const PlanSpec& spec);

// The bytes that all ranks together must send, and the most that one of them must.
struct NetworkBound {
  std::int64_t total = 0;
  std::int64_t busiest = 0;
};
NetworkBound network_bound(const PlanSpec& spec);

}  // namespace mkernel::cli
