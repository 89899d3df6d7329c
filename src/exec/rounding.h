// How far floating-point arithmetic may be off: what the fp64 references share.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/half.h"
#include "exec/tile_math.h"

namespace mkernel {

inline constexpr double kUnit32 = 0x1p-24;  // unit roundoff of fp32 and fp64
inline constexpr double kUnit64 = 0x1p-53;

// n roundings in a row (Higham, Accuracy and Stability of Numerical Algorithms, Lemma 3.1).
inline double gamma(std::int64_t n, double unit) {
  const double nu = static_cast<double>(n) * unit;
  return nu < 1 ? nu / (1 - nu) : std::numeric_limits<double>::infinity();
}

// How a type rounds a sum.
struct Rounding {
  double unit = 0;                                            // unit roundoff
  double eta = 0;                                             // half the smallest subnormal number
  double overflow = std::numeric_limits<double>::infinity();  // the smallest magnitude that becomes infinite
};

inline Rounding rounding_to(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16: return {0x1p-8, 0x1p-134, 0x1.FFp127};  // half a unit (2^119) above the maximum 0x1.FEp127
    case Dtype::kFp16: return {0x1p-11, 0x1p-25, 65520};       // half a unit (16) above the maximum 65504
    case Dtype::kFp32: return {};                              // sums are fp32 already: no rounding
  }
  return {};
}

// How far it moves any sum of magnitude up to `limit`.
inline double rounding_error(double limit, const Rounding& to) {
  return std::max(to.unit * limit, std::min(limit, to.eta));
}

inline double load_element(const ConstMatrix& m, std::int64_t row, std::int64_t col) {
  const std::int64_t offset = row * m.row_stride + col * m.col_stride;
  switch (m.dtype) {
    case Dtype::kBf16: return bf16_to_float(static_cast<const std::uint16_t*>(m.data)[offset]);
    case Dtype::kFp16: return fp16_to_float(static_cast<const std::uint16_t*>(m.data)[offset]);
    case Dtype::kFp32: return static_cast<const float*>(m.data)[offset];
  }
  return 0;
}

}  // namespace mkernel
