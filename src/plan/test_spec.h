// Specs whose tiles are so small that a small matrix has many of them. For tests only.
#pragma once
#include <cstdint>

#include "plan/spec.h"

namespace mkernel::test {

inline constexpr Tiling kTinyTiles = {
    .bm = 8, .bn = 8, .band = 2, .chunk_tiles = 2, .chunk_rows = 8, .copy_rows = 3, .pitch_align = 1};

inline PlanSpec make_spec(Op op, Topology topo, std::int64_t m, std::int64_t n, std::int64_t k,
                          const Tiling& tiling = kTinyTiles) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = topo;
  spec.m = m;
  spec.n = n;
  spec.k = k;
  spec.tiling = tiling;
  return spec;
}

}  // namespace mkernel::test
