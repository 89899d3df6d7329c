#include "base/npy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <functional>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "base/npy_detail.h"

namespace mkernel {
namespace {

using npy_detail::file_error;
using npy_detail::matrix_bytes;
using npy_detail::sized;

static_assert(std::endian::native == std::endian::little, "files are little-endian and are read without swapping");

constexpr std::size_t kTransferBytes = std::size_t{1} << 30;  // Linux moves at most 2 GiB - 4 KiB in one call

// Takes views, so that errno can be an argument: nothing allocates before it is read.
Error io_error(std::string_view name, std::string_view what, int error_number) {
  return {ErrorKind::kIo,
          std::string(name) + ": " + std::string(what) + ": " + std::generic_category().message(error_number)};
}

// Reads bytes [offset, offset + out.size()) of a file.
using ReadAt = std::function<Status(std::uint64_t offset, std::span<std::byte> out)>;

// A rectangle of a column-major file, in elements.
struct Block {
  std::int64_t row, col, rows, cols;
};

Status read_block(const NpyHeader& header, const Block& block, const ReadAt& read_at, std::span<std::byte> out) {
  const std::int64_t size = npy_type_bytes(header.type);
  const std::int64_t first = block.col * header.rows + block.row;
  // Whole columns follow one another; of parts of columns each is read for itself.
  const std::int64_t reads = block.rows == header.rows ? 1 : block.cols;
  const std::size_t bytes = static_cast<std::size_t>(block.rows * block.cols / reads * size);
  for (std::int64_t i = 0; i < reads; ++i) {
    const std::uint64_t offset = header.data_offset + static_cast<std::uint64_t>((first + i * header.rows) * size);
    if (Status status = read_at(offset, out.subspan(static_cast<std::size_t>(i) * bytes, bytes)); !status) {
      return status;
    }
  }
  return Ok{};
}

// `size` is a parameter of the template so that each copy is one load and one store.
template <std::int64_t size>
void scatter_block(const Block& block, const std::byte* in, std::byte* out, std::int64_t out_cols) {
  for (std::int64_t row = 0; row < block.rows; ++row) {
    std::byte* to = out + ((block.row + row) * out_cols + block.col) * size;
    for (std::int64_t col = 0; col < block.cols; ++col) {
      std::memcpy(to + col * size, in + (col * block.rows + row) * size, size);
    }
  }
}

// Transposes on the way in, block by block: a row of a block is at least 64 elements, so that neither reads nor writes
// are scattered element by element.
Status read_fortran(const NpyHeader& header, const ReadAt& read_at, std::byte* out) {
  constexpr std::int64_t kBlockElements = std::int64_t{1} << 18;  // at most 2 MiB
  constexpr std::int64_t kBlockRows = std::int64_t{1} << 12;
  const std::int64_t size = npy_type_bytes(header.type);
  const std::int64_t block_rows = std::min(header.rows, kBlockRows);
  const std::int64_t block_cols = std::min(header.cols, kBlockElements / block_rows);
  std::vector<std::byte> buffer(static_cast<std::size_t>(block_rows * block_cols * size));
  for (std::int64_t col = 0; col < header.cols; col += block_cols) {
    for (std::int64_t row = 0; row < header.rows; row += block_rows) {
      const Block block{row, col, std::min(block_rows, header.rows - row), std::min(block_cols, header.cols - col)};
      if (Status status = read_block(header, block, read_at, buffer); !status) return status;
      switch (size) {
        case 1: scatter_block<1>(block, buffer.data(), out, header.cols); break;
        case 2: scatter_block<2>(block, buffer.data(), out, header.cols); break;
        case 4: scatter_block<4>(block, buffer.data(), out, header.cols); break;
        default: scatter_block<8>(block, buffer.data(), out, header.cols); break;
      }
    }
  }
  return Ok{};
}

Result<NpyMatrix> load(const NpyHeader& header, std::string_view name, std::uint64_t max_bytes, const ReadAt& read_at) {
  const std::string size =
      std::to_string(header.data_bytes) + " bytes (" + sized(header.rows, header.cols, header.type) + ")";
  if (static_cast<std::uint64_t>(header.data_bytes) > max_bytes) {
    return Error{ErrorKind::kOutOfMemory, std::string(name) + ": the matrix has " + size + ", accepted are at most " +
                                              std::to_string(max_bytes)};
  }
  NpyMatrix matrix{header.rows, header.cols, header.type, {}, std::string(name)};
  if (header.data_bytes == 0) return matrix;
  try {
    matrix.data.resize(static_cast<std::size_t>(header.data_bytes));
    const bool transpose = header.fortran && header.rows > 1 && header.cols > 1;
    Status status =
        transpose ? read_fortran(header, read_at, matrix.data.data()) : read_at(header.data_offset, matrix.data);
    if (!status) return status.error();
  } catch (const std::bad_alloc&) {
    return Error{ErrorKind::kOutOfMemory, std::string(name) + ": there is no memory for " + size};
  }
  return matrix;
}

// A file descriptor that closes itself.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }

  int fd() const { return fd_; }

  // 0, or the error number. The descriptor is gone either way, also after EINTR.
  int close() {
    const int fd = std::exchange(fd_, -1);
    return fd < 0 || ::close(fd) == 0 ? 0 : errno;
  }

 private:
  int fd_;
};

Status read_fully(int fd, std::string_view name, std::uint64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd, out.data(), std::min(out.size(), kTransferBytes), static_cast<off_t>(offset));
    const int error = errno;
    if (got < 0 && error == EINTR) continue;
    if (got < 0) return io_error(name, "reading failed at byte " + std::to_string(offset), error);
    if (got == 0) {
      return Error{ErrorKind::kIo, std::string(name) + ": the file became shorter while it was read and now ends at " +
                                       "byte " + std::to_string(offset)};
    }
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return Ok{};
}

Status write_fully(int fd, std::string_view name, const std::byte* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t put = ::write(fd, data, std::min(bytes, kTransferBytes));
    const int error = errno;
    if (put < 0 && error == EINTR) continue;
    if (put < 0) return io_error(name, "writing failed", error);
    data += put;
    bytes -= static_cast<std::size_t>(put);
  }
  return Ok{};
}

Status write_rows(int fd, std::string_view name, const std::byte* data, std::int64_t rows, std::int64_t row_bytes,
                  std::int64_t stride_bytes) {
  if (rows == 0 || row_bytes == 0) return Ok{};
  if (row_bytes == stride_bytes || rows == 1) {
    return write_fully(fd, name, data, static_cast<std::size_t>(rows) * static_cast<std::size_t>(row_bytes));
  }
  // Short rows are gathered first: one call each would cost more than the copy.
  constexpr std::int64_t kBufferBytes = std::int64_t{1} << 20;
  const std::int64_t batch = std::clamp(kBufferBytes / row_bytes, std::int64_t{1}, rows);
  std::vector<std::byte> buffer(batch > 1 ? static_cast<std::size_t>(batch * row_bytes) : 0);
  for (std::int64_t row = 0; row < rows; row += batch) {
    const std::int64_t count = std::min(batch, rows - row);
    const std::byte* from = data + row * stride_bytes;
    if (batch > 1) {
      for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(buffer.data() + i * row_bytes, from + i * stride_bytes, static_cast<std::size_t>(row_bytes));
      }
      from = buffer.data();
    }
    if (Status status = write_fully(fd, name, from, static_cast<std::size_t>(count * row_bytes)); !status) {
      return status;
    }
  }
  return Ok{};
}

// A file beside the one to be written, which disappears unless it has been renamed.
class TemporaryFile {
 public:
  TemporaryFile(std::filesystem::path path, int fd) : path_(std::move(path)), file_(fd) {}
  TemporaryFile(TemporaryFile&&) = delete;
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }

  int fd() const { return file_.fd(); }

  Status commit(const std::filesystem::path& target, std::string_view name) {
    // Only after a flush does a full disk or a failing device show on every file system. EINVAL: it has no flush.
    if (::fsync(file_.fd()) != 0 && errno != EINVAL) return io_error(name, "writing failed", errno);
    if (const int error = file_.close(); error != 0) return io_error(name, "closing failed", error);
    if (::rename(path_.c_str(), target.c_str()) != 0) {
      return io_error(name, "the finished file could not be given its name", errno);
    }
    path_.clear();
    return Ok{};
  }

 private:
  std::filesystem::path path_;
  File file_;
};

// The path to write to, with symbolic links followed, since a rename would replace the link itself.
Result<std::filesystem::path> resolve_target(const std::filesystem::path& path) {
  std::error_code error;
  if (path.empty()) return bad_argument("the path of a .npy file to write is empty");
  if (!path.has_filename()) return file_error(path.string(), "this names a directory, accepted is a file");
  const std::filesystem::file_status link = std::filesystem::symlink_status(path, error);
  if (!std::filesystem::exists(link)) return path;
  std::filesystem::path target = path;
  if (std::filesystem::is_symlink(link)) {
    target = std::filesystem::canonical(path, error);
    if (error) return io_error(path.string(), "this symbolic link cannot be followed", error.value());
  }
  if (!std::filesystem::is_regular_file(target, error)) {
    return file_error(path.string(), "something that is not a regular file has this name, and is not replaced");
  }
  return target;
}

Status check_matrix(std::string_view name, NpyType type, std::int64_t rows, std::int64_t cols, const void* data,
                    std::int64_t row_stride_elements) {
  if (rows < 0 || cols < 0) {
    return file_error(name, "the matrix to write is " + sized(rows, cols, type) + ", accepted are sizes from 0 up");
  }
  const std::optional<std::int64_t> bytes = matrix_bytes(rows, cols, type);
  if (!bytes) {
    return file_error(name, "the matrix to write is " + sized(rows, cols, type) + ", which does not fit 63 bits");
  }
  if (*bytes == 0) return Ok{};
  if (data == nullptr) return file_error(name, "the data to write is null, accepted is null only for no elements");
  // A single row has no stride, whatever is said.
  if (rows > 1 && row_stride_elements < cols) {
    return file_error(name, "the row stride to write is " + std::to_string(row_stride_elements) +
                                " elements, accepted is at least the row length " + std::to_string(cols));
  }
  if (rows > 1 && !matrix_bytes(rows, row_stride_elements, type)) {
    return file_error(name, "the row stride to write is " + std::to_string(row_stride_elements) +
                                " elements, which times " + std::to_string(rows) + " rows does not fit 63 bits");
  }
  return Ok{};
}

}  // namespace

Result<NpyMatrix> parse_npy(std::span<const std::byte> file, std::string_view name, std::uint64_t max_bytes) {
  const Result<NpyHeader> header = parse_npy_header(file, file.size(), name);
  if (!header) return header.error();
  return load(*header, name, max_bytes, [&](std::uint64_t offset, std::span<std::byte> out) -> Status {
    const std::span<const std::byte> from = file.subspan(offset, out.size());
    std::copy(from.begin(), from.end(), out.begin());
    return Ok{};
  });
}

Result<NpyMatrix> read_npy(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const std::string name = path.string();
  // Without O_NONBLOCK, opening a pipe would wait for its writer before we can see that it is none of ours.
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd() < 0) return io_error(name, "the file cannot be opened", errno);
  struct stat info = {};
  if (::fstat(file.fd(), &info) != 0) return io_error(name, "the file cannot be examined", errno);
  if (!S_ISREG(info.st_mode)) return file_error(name, "this is not a regular file");
  const std::uint64_t file_bytes = static_cast<std::uint64_t>(info.st_size);
  std::vector<std::byte> first(std::min<std::uint64_t>(file_bytes, kNpyMaxHeaderBytes));
  const ReadAt read_at = [&](std::uint64_t offset, std::span<std::byte> out) {
    return read_fully(file.fd(), name, offset, out);
  };
  if (Status status = read_at(0, first); !status) return status.error();
  const Result<NpyHeader> header = parse_npy_header(first, file_bytes, name);
  if (!header) return header.error();
  return load(*header, name, max_bytes, read_at);
}

Status write_npy(const std::filesystem::path& path, NpyType type, std::int64_t rows, std::int64_t cols,
                 const void* data, std::int64_t row_stride_elements) {
  const std::string name = path.string();
  const Result<std::filesystem::path> target = resolve_target(path);
  if (!target) return target.error();
  if (Status status = check_matrix(name, type, rows, cols, data, row_stride_elements); !status) return status;

  // A name of its own per process and try: two writers never share one, and what a killed process has left is passed.
  constexpr int kMaxTries = 1000;
  std::filesystem::path temporary;
  int fd = -1;
  for (int i = 0; i < kMaxTries && fd < 0; ++i) {
    temporary = target->parent_path() / (".mkernel-" + std::to_string(::getpid()) + "-" + std::to_string(i) + ".tmp");
    fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno != EEXIST && errno != EINTR) break;
  }
  if (fd < 0) return io_error(name, "no file can be created in this directory", errno);
  TemporaryFile file(temporary, fd);

  const std::string header = npy_header(type, rows, cols);
  const std::int64_t size = npy_type_bytes(type);
  Status status = write_fully(file.fd(), name, reinterpret_cast<const std::byte*>(header.data()), header.size());
  if (!status) return status;
  if (rows > 0 && cols > 0) {
    const std::int64_t stride_bytes = rows > 1 ? row_stride_elements * size : 0;
    status = write_rows(file.fd(), name, static_cast<const std::byte*>(data), rows, cols * size, stride_bytes);
    if (!status) return status;
  }
  return file.commit(*target, name);
}

}  // namespace mkernel
