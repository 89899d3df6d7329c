// What the tile maths of attention forward and backward share. Only for attend_*.cc, which see Eigen.
#pragma once
#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/half.h"
#include "exec/tile_math.h"

namespace mkernel::attend_rows {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Panel = Eigen::Map<RowMajor, Eigen::Aligned64>;
using ConstPanel = Eigen::Map<const RowMajor, Eigen::Aligned64>;

// Cephes' expf (S. Moshier): x = n ln 2 + f, a polynomial of f, times 2^n. Written without branches, for vectors.
inline float exp_inline(float x) {
  constexpr float kLowest = -87.0f;  // the result is still a normal number
  const float c = x >= kLowest ? x : kLowest;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float n = (c * 1.44269504088896341f + kMagic) - kMagic;
  const float f = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * (f * f) + f + 1.0f;
  const float power = std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
  return x >= kLowest ? y * power : x < kLowest ? 0.0f : x;
}

// Rows [first, first + rows) of `from` as floats, row-major without gaps.
inline void load_rows(const ConstMatrix& from, std::int64_t first, std::int64_t rows, float* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t offset = (first + r) * from.row_stride;
    float* line = to + r * from.cols;
    switch (from.dtype) {
      case Dtype::kBf16: {
        const auto* at = static_cast<const std::uint16_t*>(from.data) + offset;
        for (std::int64_t c = 0; c < from.cols; ++c) line[c] = bf16_to_float(at[c]);
        break;
      }
      case Dtype::kFp16: {
        const auto* at = static_cast<const std::uint16_t*>(from.data) + offset;
        for (std::int64_t c = 0; c < from.cols; ++c) line[c] = fp16_to_float(at[c]);
        break;
      }
      case Dtype::kFp32: std::copy_n(static_cast<const float*>(from.data) + offset, from.cols, line); break;
    }
  }
}

inline void store_row(const float* from, const OutMatrix& to, std::int64_t row) {
  const std::int64_t offset = row * to.row_stride;
  for (std::int64_t c = 0; c < to.cols; ++c) {
    switch (to.dtype) {
      case Dtype::kBf16: static_cast<std::uint16_t*>(to.data)[offset + c] = float_to_bf16(from[c]); break;
      case Dtype::kFp16: static_cast<std::uint16_t*>(to.data)[offset + c] = float_to_fp16(from[c]); break;
      case Dtype::kFp32: static_cast<float*>(to.data)[offset + c] = from[c]; break;
    }
  }
}

}  // namespace mkernel::attend_rows
