// The 64 bits that a remote write brings to the receiver: which put it is a piece of.
#pragma once
#include <cstdint>

namespace mkernel {

// {operator 6, epoch 8, sender 16, flag 34 bits}, from the top.
struct Immediate {
  std::uint32_t op = 0;
  std::uint32_t epoch = 0;   // low 8 bits
  std::uint32_t sender = 0;  // rank
  std::uint64_t flag = 0;    // index among the receiver's flags, parity included: at most 2 * 2^32

  bool operator==(const Immediate&) const = default;
};

constexpr std::uint64_t encode(const Immediate& immediate) {
  return (std::uint64_t{immediate.op & 0x3f} << 58) | (std::uint64_t{immediate.epoch & 0xff} << 50) |
         (std::uint64_t{immediate.sender & 0xffff} << 34) | (immediate.flag & 0x3ffffffff);
}

constexpr Immediate decode_immediate(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word >> 58) & 0x3f, static_cast<std::uint32_t>(word >> 50) & 0xff,
          static_cast<std::uint32_t>(word >> 34) & 0xffff, word & 0x3ffffffff};
}

}  // namespace mkernel
