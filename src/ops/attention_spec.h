// From what a caller asks for to what decides a ring_attention plan.
#pragma once
#include "mkernel/attention.h"
#include "plan/spec.h"

namespace mkernel {

// A valid spec, with what was asked for and the rest chosen. Errors: kBadArgument.
Result<PlanSpec> make_attention_spec(const Topology& topo, const AttentionOptions& options);
// The same for GPUs, whose kernel has tiles of 128 queries and wants slots for all chunks. Errors: also kUnsupported.
Result<PlanSpec> make_gpu_attention_spec(const Topology& topo, const AttentionOptions& options);

}  // namespace mkernel
