#include "exec/fill.h"

#include <bit>

#include "base/half.h"

namespace mkernel {
namespace {

// The output function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;  // the increment of splitmix64: 2^64 / golden ratio

// Bits of a float that the type keeps, for numbers in its normal range.
std::uint32_t kept_bits(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16: return 0xffff0000u;
    case Dtype::kFp16: return 0xffffe000u;
    case Dtype::kFp32: return 0xffffffffu;
  }
  return 0;
}

float value_of(std::uint64_t random, Fill kind, Dtype dtype) {
  switch (kind) {
    case Fill::kUniform: {
      const float value = static_cast<float>(random >> 40) * 0x1p-23f - 1.0f;  // 24 bits: exact
      // Rounded to nearest, the largest values would become 1.
      return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & kept_bits(dtype));
    }
    case Fill::kInteger: return static_cast<float>((random >> 32) * 5 >> 32) - 2.0f;
    case Fill::kBits:  // has no value, store() takes the bits
    case Fill::kZero: return 0.0f;
  }
  return 0.0f;
}

void store(const OutMatrix& out, std::int64_t offset, std::uint64_t random, Fill kind) {
  const float value = value_of(random, kind, out.dtype);
  if (out.dtype == Dtype::kFp32) {
    static_cast<float*>(out.data)[offset] =
        kind == Fill::kBits ? std::bit_cast<float>(static_cast<std::uint32_t>(random >> 32)) : value;
    return;
  }
  const std::uint16_t bits = out.dtype == Dtype::kBf16 ? float_to_bf16(value) : float_to_fp16(value);
  static_cast<std::uint16_t*>(out.data)[offset] = kind == Fill::kBits ? static_cast<std::uint16_t>(random >> 48) : bits;
}

}  // namespace

void fill_random(const OutMatrix& out, std::uint64_t seed, Fill kind) {
  const std::uint64_t start = mix(seed + kGolden);  // so that neighbouring seeds do not give shifted sequences
  for (std::int64_t r = 0; r < out.rows; ++r) {
    for (std::int64_t c = 0; c < out.cols; ++c) {
      const auto index = static_cast<std::uint64_t>(r * out.cols + c);
      store(out, r * out.row_stride + c * out.col_stride, mix(start + kGolden * (index + 1)), kind);
    }
  }
}

}  // namespace mkernel
