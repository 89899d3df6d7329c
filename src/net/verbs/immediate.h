// The 32 bits that a write brings to its receiver over verbs: which stamp it is about.
#pragma once
#include <cstdint>

namespace mkernel {

// {operator 6, epoch 4, flag 22 bits}, from the top. The sender is not in it: a stamp has one.
struct ShortImmediate {
  std::uint32_t op = 0;
  std::uint32_t epoch = 0;  // low 4 bits; arrivals are never 8 epochs apart
  std::uint32_t flag = 0;   // index among the receiver's flags, parity included

  bool operator==(const ShortImmediate&) const = default;
};

inline constexpr std::int64_t kShortFlags = std::int64_t{1} << 22;

constexpr std::uint32_t encode(const ShortImmediate& immediate) {
  return (immediate.op & 0x3f) << 26 | (immediate.epoch & 0xf) << 22 | (immediate.flag & 0x3fffff);
}

constexpr ShortImmediate decode_short_immediate(std::uint32_t word) {
  return {word >> 26, word >> 22 & 0xf, word & 0x3fffff};
}

// The epoch nearest to `near` whose low 4 bits are `low`.
constexpr std::uint64_t full_short_epoch(std::uint32_t low, std::uint64_t near) {
  const auto distance = static_cast<std::int64_t>((low - near) & 0xf);
  return near + static_cast<std::uint64_t>(distance < 8 ? distance : distance - 16);
}

}  // namespace mkernel
