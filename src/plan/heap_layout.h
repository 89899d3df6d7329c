// Where an operator's flags and buffers lie in the symmetric heap: the same on every rank, so that (rank, offset) names
// any byte. Everything stands twice, by epoch parity.
#pragma once
#include "plan/plan.h"

namespace mkernel {

class HeapLayout {
 public:
  HeapLayout() = default;
  MK_HD explicit constexpr HeapLayout(const Plan& plan) {
    std::int64_t at = 0;
    flag_count_ = plan.flag_count();
    at = aligned(2 * std::int64_t{flag_count_} * 4);
    for (int b = 0; b < kBufferCount; ++b) {
      const auto buffer = static_cast<Buffer>(b);
      element_bytes_[b] = dtype_bytes(plan.buffer_dtype(buffer));
      parity_bytes_[b] = aligned(plan.buffer_elements(buffer) * element_bytes_[b]);
      begin_[b] = at;
      at += 2 * parity_bytes_[b];
    }
    bytes_ = at;
  }

  MK_HD constexpr std::int64_t bytes() const { return bytes_; }
  // Index of a flag among all flags of a rank, parity included.
  MK_HD constexpr std::int64_t flag_index(std::uint32_t flag, std::uint64_t epoch) const {
    return static_cast<std::int64_t>(epoch & 1) * flag_count_ + flag;
  }
  // Byte offset of an element of a workspace buffer.
  MK_HD constexpr std::int64_t offset(Buffer buffer, std::int64_t element, std::uint64_t epoch) const {
    const int b = static_cast<int>(buffer);
    return begin_[b] + static_cast<std::int64_t>(epoch & 1) * parity_bytes_[b] + element * element_bytes_[b];
  }

 private:
  static constexpr std::int64_t kAlign = 256;  // a cache line of any level, and what TMA descriptors want
  MK_HD static constexpr std::int64_t aligned(std::int64_t bytes) { return ceil_div(bytes, kAlign) * kAlign; }

  std::uint32_t flag_count_ = 0;
  std::int64_t begin_[kBufferCount] = {};
  std::int64_t parity_bytes_[kBufferCount] = {};
  std::int64_t element_bytes_[kBufferCount] = {};
  std::int64_t bytes_ = 0;
};

}  // namespace mkernel
