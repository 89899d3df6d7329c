#include "exec/sim/simulator.h"

#include "exec/sim/simulation.h"

namespace mkernel {

SimReport simulate(const SimOptions& options, std::span<const PlanSource* const> operators,
                   std::span<const SimCall> calls) {
  Simulation simulation(options, operators, calls);
  return simulation.run();
}

}  // namespace mkernel
