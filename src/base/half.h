// bf16 and fp16 as bit patterns, to and from float: exact upwards, round to nearest even downwards.
//
// The functions select instead of branching, so that compilers turn a loop over them into vector code; they need the
// default rounding mode, and nothing else of the floating-point environment (no gradual-underflow flags).
// A NaN keeps its sign and the top bits of its payload, quiet or signalling; only a payload that would vanish, which
// would turn the NaN into an infinity, becomes the quiet bit. So every 16-bit pattern survives the way up and down.
#pragma once
#include <bit>
#include <cstdint>

namespace mkernel {

// `yes` or `no`, by masks. Written with ?:, gcc would move a floating-point operation that only one side needs into a
// branch, and could then no longer turn the loop around it into vector code.
constexpr std::int32_t select_bits(bool condition, std::int32_t yes, std::int32_t no) {
  const std::int32_t mask = -static_cast<std::int32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

constexpr float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::int32_t magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
  // Adding just under half a unit, and the rest of it when the kept part is odd, carries exactly when rounding up;
  // a carry out of the mantissa goes to the exponent, and out of the largest finite value to infinity.
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | ((bits & 0x007f0000u) == 0 ? 0x0040u : 0u);
  return static_cast<std::uint16_t>(magnitude > 0x7f800000 ? nan : rounded);
}

constexpr float fp16_to_float(std::uint16_t bits) {
  const std::int32_t magnitude = bits & 0x7fff;
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  // The mantissa of a subnormal counts units of 2^-24; as an integer it converts without passing a subnormal float.
  const std::int32_t subnormal = std::bit_cast<std::int32_t>(static_cast<float>(magnitude & 0x03ff) * 0x1p-24f);
  const std::int32_t normal = (magnitude << 13) + ((127 - 15) << 23);
  const std::int32_t special = (magnitude << 13) | 0x7f800000;
  const std::int32_t finite = select_bits(magnitude < 0x0400, subnormal, normal);
  const std::int32_t result = select_bits(magnitude >= 0x7c00, special, finite);
  return std::bit_cast<float>(static_cast<std::uint32_t>(result) | sign);
}

constexpr std::uint16_t float_to_fp16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::int32_t magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
  const std::int32_t sign = static_cast<std::int32_t>((bits >> 16) & 0x8000u);
  constexpr std::int32_t kSmallestNormal = (127 - 14) << 23;  // 2^-14
  constexpr std::int32_t kOverflow = 0x477ff000;              // 65520, halfway from 65504 to 65536: even is upwards
  // One unit of 0.5f is 2^-24, the unit of fp16's subnormals: the addition itself rounds, to nearest even.
  const std::int32_t clamped = select_bits(magnitude < kSmallestNormal, magnitude, 0);
  const std::int32_t subnormal =
      std::bit_cast<std::int32_t>(std::bit_cast<float>(clamped) + 0.5f) - std::bit_cast<std::int32_t>(0.5f);
  // Rebiasing before rounding would go negative for small values; these take `subnormal`, and unsigned sums wrap.
  const std::uint32_t magnitude_bits = static_cast<std::uint32_t>(magnitude);
  const std::int32_t normal = static_cast<std::int32_t>(
      (magnitude_bits + 0x0fffu + ((magnitude_bits >> 13) & 1u) - (static_cast<std::uint32_t>(127 - 15) << 23)) >> 13);
  const std::int32_t payload = (magnitude >> 13) & 0x03ff;
  const std::int32_t nan = 0x7c00 | payload | (payload == 0 ? 0x0200 : 0);
  const std::int32_t finite = select_bits(magnitude < kSmallestNormal, subnormal, normal);
  const std::int32_t number = select_bits(magnitude >= kOverflow, 0x7c00, finite);
  return static_cast<std::uint16_t>(select_bits(magnitude > 0x7f800000, nan, number) | sign);
}

// The float next to `value` that still tells every narrower format which way to round: exact where that is possible,
// else the neighbour whose last bit is odd ("round to odd"). Rounding it once more to bf16 or fp16 gives what one
// rounding of the double would have given, since a float has more than two bits more than either, also where they
// are subnormal. Not for results that stay floats: static_cast<float> rounds those to nearest.
constexpr float double_to_float_odd(double value) {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
  const std::uint64_t magnitude = bits & 0x7fffffffffffffffull;
  const std::uint64_t mantissa = magnitude & 0x000fffffffffffffull;
  const int exponent = static_cast<int>(magnitude >> 52) - 1023;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 32) & 0x80000000u;
  std::uint32_t result = 0;
  if (exponent == 1024) {  // infinity or NaN
    const std::uint32_t payload = static_cast<std::uint32_t>(mantissa >> 29);
    result = 0x7f800000u | payload | (mantissa != 0 && payload == 0 ? 0x00400000u : 0u);
  } else if (exponent > 127) {
    result = 0x7f7fffffu;  // the largest float, which is odd
  } else if (exponent >= -126) {
    result = static_cast<std::uint32_t>((magnitude - (static_cast<std::uint64_t>(1023 - 127) << 52)) >> 29);
    result |= (magnitude & 0x1fffffffull) != 0 ? 1u : 0u;
  } else if (magnitude != 0) {
    const int shift = 29 - 126 - exponent;  // one unit of a subnormal float is 2^-149; a subnormal double is below it
    const std::uint64_t significand = mantissa | (1ull << 52);
    result = shift < 53 ? static_cast<std::uint32_t>(significand >> shift) : 0u;
    result |= shift >= 53 || (significand & ((1ull << shift) - 1)) != 0 ? 1u : 0u;
  }
  return std::bit_cast<float>(result | sign);
}

constexpr std::uint16_t double_to_bf16(double value) { return float_to_bf16(double_to_float_odd(value)); }
constexpr std::uint16_t double_to_fp16(double value) { return float_to_fp16(double_to_float_odd(value)); }

}  // namespace mkernel
