// From what a caller asks for to what decides a plan.
#pragma once
#include "mkernel/mkernel.h"
#include "plan/spec.h"

namespace mkernel {

// A valid spec, with the tiling that was asked for and the rest chosen. Errors: kBadArgument.
Result<PlanSpec> make_gemm_spec(const Topology& topo, const GemmOptions& options);
// The same for GPUs with `gpu_sms` SMs per rank.
Result<PlanSpec> make_gpu_gemm_spec(const Topology& topo, const GemmOptions& options, int gpu_sms);

}  // namespace mkernel
