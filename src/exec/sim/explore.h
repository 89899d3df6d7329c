// Random worlds, shapes, schedules and faults from a seed, run in the simulator with real data and race checks.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/result.h"
#include "mkernel/types.h"

namespace mkernel {

struct ExploreResult {
  std::string scenario;          // one line that says what was run
  std::optional<Error> failure;  // kCheckFailed for a wrong result or a race
};

// The names that explore_seed() takes: what may go wrong, each by chance of the seed.
std::vector<std::string_view> injection_names();

// Runs the scenario of `seed`: with `op` or an operator of the seed's choice, with those of `injections` that the seed
// draws ("all" names every one). Same arguments, same run. Where a rank dies, the run must end in an error that names
// it; everywhere else it must end well.
ExploreResult explore_seed(std::optional<Op> op, std::uint64_t seed, const std::vector<std::string>& injections);

}  // namespace mkernel
