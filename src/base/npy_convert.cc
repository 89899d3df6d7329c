// The elements of .npy files as the types that operators take.
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/half.h"
#include "base/npy.h"
#include "base/npy_detail.h"

namespace mkernel {
namespace {

using npy_detail::file_error;
using npy_detail::matrix_bytes;
using npy_detail::sized;

// One element of a file as a number that holds it exactly, or, for doubles that stand for a longer integer, one that
// every further rounding takes to the same result.
struct ReadF16 {
  using Raw = std::uint16_t;
  static float widen(Raw raw) { return fp16_to_float(raw); }
};
struct ReadBf16 {
  using Raw = std::uint16_t;
  static float widen(Raw raw) { return bf16_to_float(raw); }
};
struct ReadF32 {
  using Raw = float;
  static float widen(Raw raw) { return raw; }
};
struct ReadF64 {
  using Raw = double;
  static double widen(Raw raw) { return raw; }
};
struct ReadI8 {
  using Raw = std::int8_t;
  static float widen(Raw raw) { return raw; }
};
struct ReadI32 {
  using Raw = std::int32_t;
  static double widen(Raw raw) { return raw; }
};
struct ReadI64 {
  using Raw = std::int64_t;
  // Above 2^53 the low 11 bits become one sticky bit ("round to odd", as in double_to_float_odd): what is left fits
  // a double, and at 42 bits it is still longer than any result.
  static double widen(Raw raw) {
    constexpr std::int64_t kExact = std::int64_t{1} << 53;
    if (raw >= -kExact && raw <= kExact) return static_cast<double>(raw);
    return static_cast<double>((raw & ~std::int64_t{0x7ff}) | ((raw & 0x7ff) != 0 ? 0x800 : 0));
  }
};

std::uint16_t to_bf16(float value) { return float_to_bf16(value); }
std::uint16_t to_bf16(double value) { return double_to_bf16(value); }
std::uint16_t to_fp16(float value) { return float_to_fp16(value); }
std::uint16_t to_fp16(double value) { return double_to_fp16(value); }

template <class Reader, class Encode>
void convert_each(const std::byte* in, std::byte* out, std::size_t count, Encode encode) {
  using Raw = typename Reader::Raw;
  for (std::size_t i = 0; i < count; ++i) {
    Raw raw;
    std::memcpy(&raw, in + i * sizeof(Raw), sizeof(Raw));
    const auto encoded = encode(Reader::widen(raw));
    std::memcpy(out + i * sizeof(encoded), &encoded, sizeof(encoded));
  }
}

template <class Reader>
void convert(const NpyMatrix& matrix, Dtype dtype, std::vector<std::byte>& out) {
  const std::byte* in = matrix.data.data();
  const std::size_t count = matrix.data.size() / sizeof(typename Reader::Raw);
  switch (dtype) {
    case Dtype::kBf16: return convert_each<Reader>(in, out.data(), count, [](auto value) { return to_bf16(value); });
    case Dtype::kFp16: return convert_each<Reader>(in, out.data(), count, [](auto value) { return to_fp16(value); });
    case Dtype::kFp32:
      return convert_each<Reader>(in, out.data(), count, [](auto value) { return static_cast<float>(value); });
  }
}

// The type that the elements have once the caller's word about '<u2' is taken.
Result<NpyType> meant_type(const NpyMatrix& matrix, U2Meaning u2) {
  MK_CHECK_OP(static_cast<std::int64_t>(matrix.data.size()), ==,
              matrix_bytes(matrix.rows, matrix.cols, matrix.type).value_or(-1));
  if (matrix.type != NpyType::kU16) return matrix.type;
  if (u2 == U2Meaning::kBf16Bits) return NpyType::kBf16;
  return file_error(matrix.name,
                    "the element type is '<u2', which is accepted only as bf16 bit patterns and when asked for");
}

}  // namespace

Result<std::vector<std::byte>> npy_to_dtype(const NpyMatrix& matrix, Dtype dtype, U2Meaning u2) {
  const Result<NpyType> type = meant_type(matrix, u2);
  if (!type) return type.error();
  std::vector<std::byte> out;
  try {
    if (*type == npy_type_of(dtype)) return std::vector<std::byte>(matrix.data);
    const std::size_t count = matrix.data.size() / static_cast<std::size_t>(npy_type_bytes(*type));
    out.resize(count * static_cast<std::size_t>(dtype_bytes(dtype)));
  } catch (const std::bad_alloc&) {
    return Error{ErrorKind::kOutOfMemory,
                 matrix.name + ": there is no memory to convert " + sized(matrix.rows, matrix.cols, matrix.type)};
  }
  switch (*type) {
    case NpyType::kF16: convert<ReadF16>(matrix, dtype, out); break;
    case NpyType::kBf16: convert<ReadBf16>(matrix, dtype, out); break;
    case NpyType::kF32: convert<ReadF32>(matrix, dtype, out); break;
    case NpyType::kF64: convert<ReadF64>(matrix, dtype, out); break;
    case NpyType::kI8: convert<ReadI8>(matrix, dtype, out); break;
    case NpyType::kI32: convert<ReadI32>(matrix, dtype, out); break;
    case NpyType::kI64: convert<ReadI64>(matrix, dtype, out); break;
    case NpyType::kU16: MK_CHECK(false); break;
  }
  return out;
}

Result<std::vector<std::byte>> npy_to_dtype(NpyMatrix&& matrix, Dtype dtype, U2Meaning u2) {
  const Result<NpyType> type = meant_type(matrix, u2);
  if (!type) return type.error();
  if (*type == npy_type_of(dtype)) return std::move(matrix.data);
  return npy_to_dtype(std::as_const(matrix), dtype, u2);
}

}  // namespace mkernel
