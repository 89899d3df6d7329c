// Matrices from and to NumPy's .npy files (format versions 1.0, 2.0 and 3.0; little-endian).
//
// bf16 has no type of its own in NumPy. A bf16 matrix is written as '<V2' (two opaque bytes), which is what np.save
// writes for an array of ml_dtypes.bfloat16, byte for byte; np.load(path).view(ml_dtypes.bfloat16) reads it back, and
// without ml_dtypes (np.load(path).view(np.uint16).astype(np.uint32) << 16).view(np.float32) does. '<u2' was not
// chosen because a reader could not tell it from integers; it is accepted when the caller says what it means.
//
// Reading trusts nothing: a file is refused, with one sentence that begins with its name, before anything of the size
// that its header promises is allocated. Content that is not accepted is kBadArgument, more than the caller's limit is
// kOutOfMemory, and what the operating system refuses is kIo.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/result.h"
#include "mkernel/types.h"

namespace mkernel {

// Element types of files.
enum class NpyType : std::uint8_t {
  kF16,   // '<f2'
  kBf16,  // '<V2'; also '|V2' and 'bfloat16', as other writers spell it
  kF32,   // '<f4'
  kF64,   // '<f8'
  kU16,   // '<u2'; see U2Meaning
  kI8,    // '|i1'
  kI32,   // '<i4'
  kI64,   // '<i8'
};

inline constexpr int kNpyTypeCount = 8;

// What the caller knows about a '<u2' file, which the file itself does not say.
enum class U2Meaning : std::uint8_t {
  kUnknown,   // converting it is refused: read as numbers, bit patterns would pass unnoticed
  kBf16Bits,  // each element is the bit pattern of a bf16
};

// The longest preamble and header accepted. A matrix needs 128 bytes; only structured types need more than this.
inline constexpr std::size_t kNpyMaxHeaderBytes = 12 + 65535;

struct NpyHeader {
  NpyType type = NpyType::kF32;
  bool fortran = false;  // the file holds column after column
  int dims = 2;          // 1 or 2; a vector of n elements counts as one row
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::size_t data_offset = 0;  // bytes from the beginning of the file
  std::int64_t data_bytes = 0;  // all that follows data_offset
};

struct NpyMatrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  NpyType type = NpyType::kF32;
  std::vector<std::byte> data;  // (rows, cols) row-major, packed, little-endian; whatever the order in the file
  std::string name;             // where it came from, for messages
};

// Bytes of one element.
std::int64_t npy_type_bytes(NpyType type);

// The spelling in a file's header, as written.
std::string_view npy_descr(NpyType type);

// The type a result of this dtype is written as: '<V2' for bf16, '<f2' for fp16, '<f4' for fp32.
NpyType npy_type_of(Dtype dtype);

// Understands the header of a file of `file_bytes` bytes and checks that the matrix it describes is exactly what the
// rest of the file holds. `first_bytes` must be the first min(file_bytes, kNpyMaxHeaderBytes) bytes, or more.
Result<NpyHeader> parse_npy_header(std::span<const std::byte> first_bytes, std::uint64_t file_bytes,
                                   std::string_view name);

// Reads a matrix from a whole file in memory, or from disk. Data of more than `max_bytes` is refused. Beside the data
// itself, reading takes at most 4 MiB.
Result<NpyMatrix> parse_npy(std::span<const std::byte> file, std::string_view name, std::uint64_t max_bytes);
Result<NpyMatrix> read_npy(const std::filesystem::path& path, std::uint64_t max_bytes);

// The preamble and header of a row-major (rows, cols) matrix: the bytes that np.save writes. Sizes are not negative.
std::string npy_header(NpyType type, std::int64_t rows, std::int64_t cols);

// Writes a (rows, cols) row-major matrix whose rows begin `row_stride_elements` apart; `data` may be null when it is
// empty. The file appears under its name whole or not at all: it is written beside it, flushed to disk and renamed.
// An existing regular file is replaced, a symbolic link is followed, anything else is refused.
Status write_npy(const std::filesystem::path& path, NpyType type, std::int64_t rows, std::int64_t cols,
                 const void* data, std::int64_t row_stride_elements);

// The matrix's elements as `dtype`, row-major and packed; each is rounded once, to nearest even. Same types keep their
// bits. The second form reuses the matrix's memory where it can.
Result<std::vector<std::byte>> npy_to_dtype(const NpyMatrix& matrix, Dtype dtype, U2Meaning u2 = U2Meaning::kUnknown);
Result<std::vector<std::byte>> npy_to_dtype(NpyMatrix&& matrix, Dtype dtype, U2Meaning u2 = U2Meaning::kUnknown);

}  // namespace mkernel
