// libFuzzer target: any bytes are a .npy file or are refused, and what is accepted survives being written and read.
// Built from npy.cc, npy_header.cc, npy_convert.cc and this file with clang++ -fsanitize=fuzzer,address,undefined, and
// run as `npy_fuzz -max_len=512 NEW_INPUTS tests/corpus/npy`.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/npy.h"

namespace mkernel {
namespace {

constexpr std::uint64_t kMaxBytes = 1 << 20;

// Element (row, col) of the input, found by the format's own rule, must be what the reader has put there.
void check_elements(std::span<const std::byte> file, const NpyHeader& header, const NpyMatrix& matrix) {
  const std::int64_t size = npy_type_bytes(header.type);
  if (header.data_bytes == 0) return;
  for (std::int64_t row = 0; row < header.rows; ++row) {
    for (std::int64_t col = 0; col < header.cols; ++col) {
      const std::int64_t index = header.fortran ? col * header.rows + row : row * header.cols + col;
      const std::byte* in_file = file.data() + header.data_offset + index * size;
      const std::byte* in_matrix = matrix.data.data() + (row * header.cols + col) * size;
      MK_CHECK_OP(std::memcmp(in_file, in_matrix, static_cast<std::size_t>(size)), ==, 0);
    }
  }
}

void check_round_trip(const NpyMatrix& matrix) {
  const std::string header = npy_header(matrix.type, matrix.rows, matrix.cols);
  std::vector<std::byte> file(header.size() + matrix.data.size());
  std::memcpy(file.data(), header.data(), header.size());
  std::copy(matrix.data.begin(), matrix.data.end(), file.begin() + static_cast<std::ptrdiff_t>(header.size()));
  const Result<NpyMatrix> again = parse_npy(file, "again", kMaxBytes);
  MK_CHECK(again.ok());
  MK_CHECK(again->type == matrix.type && again->rows == matrix.rows && again->cols == matrix.cols);
  MK_CHECK(again->data == matrix.data);
}

void check_conversions(const NpyMatrix& matrix) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    const Result<std::vector<std::byte>> converted = npy_to_dtype(matrix, dtype, U2Meaning::kBf16Bits);
    MK_CHECK(converted.ok());
    MK_CHECK_OP(static_cast<std::int64_t>(converted->size()), ==, matrix.rows * matrix.cols * dtype_bytes(dtype));
    MK_CHECK_OP(npy_to_dtype(matrix, dtype).ok(), ==, matrix.type != NpyType::kU16);
  }
}

void check_refusal(const Error& error) {
  MK_CHECK(error.kind == ErrorKind::kBadArgument || error.kind == ErrorKind::kOutOfMemory);
  MK_CHECK(error.message.rfind("fuzz: ", 0) == 0);
  MK_CHECK_OP(error.message.size(), <, 400);
  MK_CHECK(std::all_of(error.message.begin(), error.message.end(), [](char c) { return c >= ' ' && c <= '~'; }));
}

void check(std::span<const std::byte> file) {
  const Result<NpyHeader> header = parse_npy_header(file, file.size(), "fuzz");
  const Result<NpyMatrix> matrix = parse_npy(file, "fuzz", kMaxBytes);
  if (!header) {
    MK_CHECK(!matrix.ok());
    return check_refusal(header.error());
  }
  if (!matrix) return check_refusal(matrix.error());
  check_elements(file, *header, *matrix);
  check_round_trip(*matrix);
  check_conversions(*matrix);
}

}  // namespace
}  // namespace mkernel

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mkernel::check({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
