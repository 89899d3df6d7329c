// From what a caller asks for to what decides a plan of ring_attention or its backward.
#pragma once
#include "mkernel/attention.h"
#include "plan/spec.h"

namespace mkernel {

// A valid spec, with what was asked for and the rest chosen. Errors: kBadArgument.
Result<PlanSpec> make_attention_spec(const Topology& topo, const AttentionOptions& options);
// The same for the backward.
Result<PlanSpec> make_backward_spec(const Topology& topo, const AttentionBackwardOptions& options);
// As make_attention_spec(), for GPUs, whose kernel has tiles of 128 queries and wants slots for all chunks. Errors:
// also kUnsupported.
Result<PlanSpec> make_gpu_attention_spec(const Topology& topo, const AttentionOptions& options);

}  // namespace mkernel
