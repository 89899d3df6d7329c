// Compiles every plan for the device: the same headers as on the host, evaluated by a kernel. The persistent kernel
// takes its tasks the same way.
#include <cstdint>

#include "plan/operands.h"

namespace mkernel {

// tasks[i] = task `i` of the lane, for i < count; one thread per task.
__global__ void evaluate_plan(Plan plan, std::int32_t rank, Role role, std::int32_t lane, std::int64_t count,
                              Task* tasks) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) tasks[i] = plan.task(rank, role, lane, i);
}

}  // namespace mkernel
