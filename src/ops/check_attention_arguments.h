// Refuses tensors that ring_attention or its backward cannot work on, before anything starts.
#pragma once
#include <span>

#include "mkernel/attention.h"
#include "plan/plan.h"

namespace mkernel {

// One rank's tensors: shapes, strides, data, the ends of packed sequences, and that outputs overlap nothing.
Status check_rank_arguments(const Plan& plan, std::int32_t rank, const AttentionArguments& arguments);
Status check_rank_arguments(const Plan& plan, std::int32_t rank, const AttentionBackwardArguments& arguments);

// All ranks' tensors, that no output overlaps any other tensor, and that all ranks have the same packed sequences.
Status check_arguments(const Plan& plan, std::span<const AttentionArguments> arguments);
Status check_arguments(const Plan& plan, std::span<const AttentionBackwardArguments> arguments);

}  // namespace mkernel
