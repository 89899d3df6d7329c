// The plans that `mkernel verify all` proves: the shapes that the field reports, and small ones of every kind.
#pragma once
#include <vector>

#include "plan/spec.h"

namespace mkernel {

// Shapes of published benchmarks at 2 x 8 and 4 x 8, tiled by choose_tiling().
std::vector<PlanSpec> field_cases();

// Worlds 1-9, 12, 15 and 24 in every nodes x gpus, all operators (attention with every mask and division), sizes around
// powers of two and 0, all types, fp32 partial sums, and tilings small and odd enough that few elements make many tiles
// and chunks.
std::vector<PlanSpec> small_cases();

// Both, at least 300. Every spec is valid.
std::vector<PlanSpec> standard_cases();

}  // namespace mkernel
