// The shapes that suites measure, named before anything was measured.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace mkernel::bench {

struct Shape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  bool operator==(const Shape&) const = default;
};

// Large cubes, and the per-rank shapes of 16 ranks: M x M/16 x M and M x M x M/16.
std::vector<Shape> core_shapes();
// 30 shapes none of which is a multiple of a tile in all sizes.
std::span<const Shape> odd_shapes();

}  // namespace mkernel::bench
