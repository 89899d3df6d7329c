// What the parts of npy.h's implementation share: the beginnings of messages, and sizes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/npy.h"

namespace mkernel::npy_detail {

inline Error file_error(std::string_view name, const std::string& what) {
  return bad_argument(std::string(name) + ": " + what);
}

inline std::string sized(std::int64_t rows, std::int64_t cols, NpyType type) {
  return std::to_string(rows) + " x " + std::to_string(cols) + " of '" + std::string(npy_descr(type)) + "'";
}

// rows * cols * element bytes, or nothing when that does not fit 63 bits.
inline std::optional<std::int64_t> matrix_bytes(std::int64_t rows, std::int64_t cols, NpyType type) {
  std::int64_t elements = 0;
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(rows, cols, &elements)) return std::nullopt;
  if (__builtin_mul_overflow(elements, npy_type_bytes(type), &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace mkernel::npy_detail
