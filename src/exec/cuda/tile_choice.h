// The pure configuration step for GPUs: which sizes a plan is cut by, of those that have a kernel. A function of facts
// that all ranks share.
#pragma once
#include "plan/spec.h"

namespace mkernel {

// The tiling for `spec` (whose own tiling is ignored) on ranks of `sms` SMs each. Always valid for a valid spec.
Tiling choose_gpu_tiling(const PlanSpec& spec, int sms);

}  // namespace mkernel
