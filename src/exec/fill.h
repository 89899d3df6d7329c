// Inputs made from a seed: the same on every machine, for every strides and whoever fills which part.
#pragma once
#include <cstdint>

#include "exec/tile_math.h"

namespace mkernel {

enum class Fill : std::uint8_t {
  kUniform,  // evenly from [-1, 1), cut towards zero to the type
  kInteger,  // -2, -1, 0, 1 or 2: sums of products stay exact for as long as the result type holds them
  kBits,     // every bit pattern of the type alike, also infinities and NaNs; for copies
  kZero,
};

// Sets element (i, j) to a value that depends on `seed`, i * cols + j, the type and `kind` only.
void fill_random(const OutMatrix& out, std::uint64_t seed, Fill kind);

}  // namespace mkernel
