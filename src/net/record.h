// The command record: one 64-bit word that names a send task of a plan that both sides know.
#pragma once
#include <cstdint>

#include "base/macros.h"

namespace mkernel {

// {operator 6, epoch 8, task 24, count 18, lap 8 bits}, from the top. One word, so that it can neither tear nor be seen
// half written.
struct Record {
  std::uint32_t op = 0;     // number of the operator in its world, 0..63
  std::uint32_t epoch = 0;  // low 8 bits
  std::uint32_t task = 0;   // send_id() of the task
  std::uint32_t count = 0;  // an amount known at run time only (MoE rows); 0 for GEMM operators
  std::uint32_t lap = 0;    // how often the ring has been round, set by the ring

  bool operator==(const Record&) const = default;
};

inline constexpr std::uint32_t kMaxOperators = 1u << 6;
inline constexpr std::uint32_t kMaxRecordTask = 1u << 24;

MK_HD constexpr std::uint64_t encode(const Record& r) {
  return (std::uint64_t{r.op & 0x3f} << 58) | (std::uint64_t{r.epoch & 0xff} << 50) |
         (std::uint64_t{r.task & 0xffffff} << 26) | (std::uint64_t{r.count & 0x3ffff} << 8) | (r.lap & 0xff);
}

MK_HD constexpr Record decode(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word >> 58) & 0x3f, static_cast<std::uint32_t>(word >> 50) & 0xff,
          static_cast<std::uint32_t>(word >> 26) & 0xffffff, static_cast<std::uint32_t>(word >> 8) & 0x3ffff,
          static_cast<std::uint32_t>(word) & 0xff};
}

// The epoch nearest to `near` whose low 8 bits are `low`; both sides of a ring are never 128 epochs apart.
MK_HD constexpr std::uint64_t full_epoch(std::uint32_t low, std::uint64_t near) {
  const auto distance = static_cast<std::int8_t>(static_cast<std::uint8_t>(low - near));
  return near + static_cast<std::uint64_t>(static_cast<std::int64_t>(distance));
}

}  // namespace mkernel
