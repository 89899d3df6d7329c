// Refuses matrices that an operator cannot work on, before anything starts.
#pragma once
#include <span>

#include "mkernel/mkernel.h"
#include "plan/plan.h"

namespace mkernel {

// One rank's matrices: shapes, strides, data, and that C overlaps neither itself nor A nor B.
Status check_rank_arguments(const Plan& plan, std::int32_t rank, const GemmArguments& arguments);

// All ranks' matrices, and that no rank's C overlaps any other matrix.
Status check_arguments(const Plan& plan, std::span<const GemmArguments> arguments);

}  // namespace mkernel
