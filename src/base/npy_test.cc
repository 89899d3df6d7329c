// Whole files: from memory, from disk, and onto disk.
#include "base/npy.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/half.h"

namespace mkernel {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kLimit = std::uint64_t{1} << 26;

fs::path corpus() { return fs::path(__FILE__).parent_path() / "../../tests/corpus/npy"; }

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void spill(const fs::path& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

std::span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Every test has a directory of its own, which must hold no temporary file at the end.
class Npy : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "mkernel-npy-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override {
    for (const fs::directory_entry& entry : fs::directory_iterator(dir_)) {
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
    fs::remove_all(dir_);
  }

  fs::path dir_;
};

template <class T>
std::vector<T> elements(const NpyMatrix& matrix) {
  std::vector<T> values(matrix.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), matrix.data.data(), matrix.data.size());
  return values;
}

struct CorpusFile {
  const char* name;
  NpyType type;
  std::int64_t rows, cols;
};

// What NumPy 2.4 with ml_dtypes 0.6 wrote: element i, counted row by row, is i * 1.5 - 4 in the files of floats and
// i - 4 in those of integers; u2 holds the bit patterns of bf16.
constexpr CorpusFile kCorpus[] = {
    {"numpy_f2.npy", NpyType::kF16, 3, 4},         {"numpy_f2_fortran.npy", NpyType::kF16, 3, 4},
    {"numpy_f4.npy", NpyType::kF32, 3, 4},         {"numpy_f4_fortran.npy", NpyType::kF32, 3, 4},
    {"numpy_f8.npy", NpyType::kF64, 3, 4},         {"numpy_f8_fortran.npy", NpyType::kF64, 3, 4},
    {"numpy_bf16.npy", NpyType::kBf16, 3, 4},      {"numpy_bf16_fortran.npy", NpyType::kBf16, 3, 4},
    {"numpy_u2.npy", NpyType::kU16, 3, 4},         {"numpy_i1.npy", NpyType::kI8, 3, 4},
    {"numpy_i1_fortran.npy", NpyType::kI8, 3, 4},  {"numpy_i4.npy", NpyType::kI32, 3, 4},
    {"numpy_i4_fortran.npy", NpyType::kI32, 3, 4}, {"numpy_i8.npy", NpyType::kI64, 3, 4},
    {"numpy_i8_fortran.npy", NpyType::kI64, 3, 4}, {"numpy_vector.npy", NpyType::kF32, 1, 7},
    {"numpy_version2.npy", NpyType::kF32, 3, 4},   {"numpy_version3.npy", NpyType::kF32, 3, 4},
    {"numpy_no_rows.npy", NpyType::kF32, 0, 5},    {"numpy_no_cols.npy", NpyType::kF32, 5, 0},
    {"numpy_one.npy", NpyType::kF32, 1, 1},        {"numpy_wide.npy", NpyType::kF16, 2, 40},
};

bool is_integer(NpyType type) { return type == NpyType::kI8 || type == NpyType::kI32 || type == NpyType::kI64; }

TEST(NpyCorpus, FilesMadeByNumPyAreReadElementForElement) {
  for (const CorpusFile& expected : kCorpus) {
    SCOPED_TRACE(expected.name);
    const Result<NpyMatrix> matrix = read_npy(corpus() / expected.name, kLimit);
    ASSERT_TRUE(matrix) << matrix.error().message;
    EXPECT_EQ(matrix->type, expected.type);
    ASSERT_EQ(matrix->rows, expected.rows);
    ASSERT_EQ(matrix->cols, expected.cols);
    const Result<std::vector<std::byte>> floats = npy_to_dtype(*matrix, Dtype::kFp32, U2Meaning::kBf16Bits);
    ASSERT_TRUE(floats);
    ASSERT_EQ(floats->size(), static_cast<std::size_t>(expected.rows * expected.cols * 4));
    for (std::int64_t i = 0; i < expected.rows * expected.cols; ++i) {
      float value = 0;
      std::memcpy(&value, floats->data() + i * 4, sizeof(value));
      const double index = static_cast<double>(i);
      ASSERT_EQ(value, is_integer(expected.type) ? index - 4 : index * 1.5 - 4) << i;
    }
  }
}

TEST_F(Npy, WhatIsWrittenIsByteForByteWhatNumPyWrites) {
  for (const CorpusFile& file : kCorpus) {
    const std::string name = file.name;
    if (name.find("fortran") != name.npos || name.find("version") != name.npos || name == "numpy_vector.npy") continue;
    SCOPED_TRACE(name);
    const Result<NpyMatrix> matrix = read_npy(corpus() / name, kLimit);
    ASSERT_TRUE(matrix);
    const Status status =
        write_npy(dir_ / name, matrix->type, matrix->rows, matrix->cols, matrix->data.data(), matrix->cols);
    ASSERT_TRUE(status) << status.error().message;
    EXPECT_EQ(slurp(dir_ / name), slurp(corpus() / name));
  }
}

TEST(NpyCorpus, EveryFileOfTheFuzzersCorpusIsReadOrRefusedAlikeFromDiskAndFromMemory) {
  int count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(corpus())) {
    SCOPED_TRACE(entry.path());
    ++count;
    const std::string content = slurp(entry.path());
    const Result<NpyMatrix> from_disk = read_npy(entry.path(), kLimit);
    const Result<NpyMatrix> from_memory = parse_npy(bytes_of(content), entry.path().string(), kLimit);
    ASSERT_EQ(from_disk.ok(), from_memory.ok());
    if (from_disk) {
      EXPECT_EQ(from_disk->data, from_memory->data);
    } else {
      EXPECT_EQ(from_disk.error().message, from_memory.error().message);
    }
  }
  EXPECT_GE(count, static_cast<int>(std::size(kCorpus)));
}

// A column-major file whose element (row, col) is row * cols + col, so that reading must give 0, 1, 2, ...
template <class T>
std::string fortran_file(NpyType type, std::int64_t rows, std::int64_t cols) {
  std::string file = npy_header(type, rows, cols);
  file.replace(file.find("False"), 5, "True ");
  const std::size_t header_bytes = file.size();
  file.resize(header_bytes + static_cast<std::size_t>(rows * cols) * sizeof(T));
  char* out = file.data() + header_bytes;
  for (std::int64_t col = 0; col < cols; ++col) {
    for (std::int64_t row = 0; row < rows; ++row, out += sizeof(T)) {
      const T value = static_cast<T>(row * cols + col);
      std::memcpy(out, &value, sizeof(T));
    }
  }
  return file;
}

template <class T>
void expect_transposed(const fs::path& path, NpyType type, std::int64_t rows, std::int64_t cols) {
  SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
  const std::string file = fortran_file<T>(type, rows, cols);
  spill(path, file);
  const Result<NpyMatrix> from_disk = read_npy(path, kLimit);
  ASSERT_TRUE(from_disk) << from_disk.error().message;
  std::vector<T> expected(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<T>(i);
  EXPECT_EQ(elements<T>(*from_disk), expected);
  const Result<NpyMatrix> from_memory = parse_npy(bytes_of(file), "a.npy", kLimit);
  ASSERT_TRUE(from_memory) << from_memory.error().message;
  EXPECT_EQ(elements<T>(*from_memory), expected);
}

TEST_F(Npy, FortranOrderIsTurnedAroundWithinAndAcrossBlocks) {
  const fs::path path = dir_ / "a.npy";
  // Blocks have at most 4096 rows and 2^18 elements: one and several, whole and cut, each way.
  for (const auto& [rows, cols] : std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1},
                                                                                     {1, 9},
                                                                                     {9, 1},
                                                                                     {2, 3},
                                                                                     {4096, 64},
                                                                                     {4097, 65},
                                                                                     {8192, 3},
                                                                                     {8193, 130},
                                                                                     {3, 100000},
                                                                                     {5, 52429},
                                                                                     {100000, 3},
                                                                                     {0, 4},
                                                                                     {4, 0}}) {
    expect_transposed<std::int32_t>(path, NpyType::kI32, rows, cols);
  }
  for (const auto& [rows, cols] : std::vector<std::pair<std::int64_t, std::int64_t>>{{7, 5}, {4099, 67}}) {
    expect_transposed<std::int8_t>(path, NpyType::kI8, rows, cols);
    expect_transposed<std::uint16_t>(path, NpyType::kU16, rows, cols);
    expect_transposed<std::int64_t>(path, NpyType::kI64, rows, cols);
  }
}

TEST_F(Npy, WhatIsWrittenIsReadBackWithAnyStride) {
  const fs::path path = dir_ / "a.npy";
  struct Case {
    std::int64_t rows, cols, stride;
  };
  for (const Case& c : {Case{3, 4, 4}, Case{3, 4, 7}, Case{1, 4, 4}, Case{1, 4, 0}, Case{1, 4, -3}, Case{3, 1, 1},
                        Case{3, 1, 2}, Case{0, 4, 4}, Case{4, 0, 0}, Case{0, 0, 0}, Case{1000, 301, 301},
                        Case{1000, 301, 302}, Case{3, 300000, 300001}, Case{700, 1000, 1024}}) {
    SCOPED_TRACE(std::to_string(c.rows) + " x " + std::to_string(c.cols) + " stride " + std::to_string(c.stride));
    std::vector<std::int32_t> source(static_cast<std::size_t>(c.rows * std::max(c.stride, c.cols)));
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::int32_t>(i);
    const void* data = source.empty() ? nullptr : source.data();
    const Status status = write_npy(path, NpyType::kI32, c.rows, c.cols, data, c.stride);
    ASSERT_TRUE(status) << status.error().message;
    const Result<NpyMatrix> matrix = read_npy(path, kLimit);
    ASSERT_TRUE(matrix) << matrix.error().message;
    ASSERT_EQ(matrix->rows, c.rows);
    ASSERT_EQ(matrix->cols, c.cols);
    const std::vector<std::int32_t> values = elements<std::int32_t>(*matrix);
    for (std::int64_t i = 0; i < c.rows * c.cols; ++i) ASSERT_EQ(values[i], i / c.cols * c.stride + i % c.cols);
  }
}

TEST_F(Npy, EveryTypeSurvivesTheWayToDiskAndBack) {
  for (int i = 0; i < kNpyTypeCount; ++i) {
    const NpyType type = static_cast<NpyType>(i);
    SCOPED_TRACE(npy_descr(type));
    std::vector<std::byte> data(static_cast<std::size_t>(5 * 7 * npy_type_bytes(type)));
    for (std::size_t k = 0; k < data.size(); ++k) data[k] = static_cast<std::byte>(k * 37);
    ASSERT_TRUE(write_npy(dir_ / "a.npy", type, 5, 7, data.data(), 7));
    const Result<NpyMatrix> matrix = read_npy(dir_ / "a.npy", kLimit);
    ASSERT_TRUE(matrix) << matrix.error().message;
    EXPECT_EQ(matrix->type, type);
    EXPECT_EQ(matrix->data, data);
  }
}

void expect_refused(const Result<NpyMatrix>& result, ErrorKind kind, const fs::path& path, const std::string& says) {
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind, kind);
  EXPECT_EQ(result.error().message.rfind(path.string() + ": ", 0), 0u) << result.error().message;
  EXPECT_NE(result.error().message.find(says), std::string::npos) << result.error().message;
}

TEST_F(Npy, WhatIsNoRegularFileIsRefusedAtOnce) {
  const fs::path fifo = dir_ / "fifo.npy";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_refused(read_npy(fifo, kLimit), ErrorKind::kBadArgument, fifo, "not a regular file");
  expect_refused(read_npy(dir_, kLimit), ErrorKind::kBadArgument, dir_, "not a regular file");
  const fs::path missing = dir_ / "missing.npy";
  expect_refused(read_npy(missing, kLimit), ErrorKind::kIo, missing, "cannot be opened: No such file");
  expect_refused(read_npy("", kLimit), ErrorKind::kIo, "", "cannot be opened");
  const fs::path empty = dir_ / "empty.npy";
  spill(empty, "");
  expect_refused(read_npy(empty, kLimit), ErrorKind::kBadArgument, empty, "the file is empty");
}

TEST_F(Npy, MoreThanTheLimitIsRefusedBeforeMemoryIsTaken) {
  // A file with holes: 2^40 bytes that exist but take no disk. Allocating them would fail the test by its time or
  // by the sanitizer's limit.
  const fs::path path = dir_ / "huge.npy";
  const std::string header = npy_header(NpyType::kF32, 1 << 19, 1 << 19);
  spill(path, header);
  ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(header.size() + (std::size_t{1} << 40))), 0);
  expect_refused(read_npy(path, kLimit), ErrorKind::kOutOfMemory, path,
                 "1099511627776 bytes (524288 x 524288 of '<f4'), accepted are at most 67108864");
}

TEST_F(Npy, TheLimitIsExact) {
  const fs::path path = dir_ / "a.npy";
  const std::vector<float> data(12);
  ASSERT_TRUE(write_npy(path, NpyType::kF32, 3, 4, data.data(), 4));
  EXPECT_TRUE(read_npy(path, 48));
  expect_refused(read_npy(path, 47), ErrorKind::kOutOfMemory, path, "accepted are at most 47");
}

TEST_F(Npy, ACutOrExtendedFileIsRefused) {
  const fs::path path = dir_ / "a.npy";
  const std::vector<float> data(12);
  ASSERT_TRUE(write_npy(path, NpyType::kF32, 3, 4, data.data(), 4));
  const std::string whole = slurp(path);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    spill(path, whole.substr(0, bytes));
    ASSERT_FALSE(read_npy(path, kLimit)) << bytes;
  }
  spill(path, whole + "x");
  expect_refused(read_npy(path, kLimit), ErrorKind::kBadArgument, path, "48 bytes of data (3 x 4 of '<f4')");
}

TEST_F(Npy, AFileThatShrinksWhileItIsReadIsAnErrorNotAWait) {
  const fs::path path = dir_ / "a.npy";
  const std::string header = npy_header(NpyType::kF32, 2048, 2048);
  spill(path, header);
  const off_t header_bytes = static_cast<off_t>(header.size());
  bool seen = false;
  // Taking memory lies between the look at the size and the read, and lasts milliseconds: a cut in that time must
  // come up soon. Earlier or later ones are refused or not noticed.
  for (int i = 0; i < 1000 && !seen; ++i) {
    ASSERT_EQ(::truncate(path.c_str(), header_bytes + (off_t{1} << 24)), 0);
    std::thread cutter([&path, header_bytes, i] {
      ::usleep(static_cast<useconds_t>(i % 50 * 100));
      EXPECT_EQ(::truncate(path.c_str(), header_bytes + 1), 0);
    });
    const Result<NpyMatrix> matrix = read_npy(path, kLimit);
    cutter.join();
    if (matrix) continue;
    seen = matrix.error().kind == ErrorKind::kIo;
    if (seen) {
      expect_refused(matrix, ErrorKind::kIo, path, "became shorter while it was read and now ends at byte 129");
    }
  }
  EXPECT_TRUE(seen);
}

void expect_status(const Status& status, ErrorKind kind, const fs::path& path, const std::string& says) {
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, kind) << status.error().message;
  EXPECT_EQ(status.error().message.rfind(path.string(), 0), 0u) << status.error().message;
  EXPECT_NE(status.error().message.find(says), std::string::npos) << status.error().message;
}

TEST_F(Npy, BadArgumentsOfAWriteAreRefusedBeforeAFileAppears) {
  const fs::path path = dir_ / "a.npy";
  const float data[4] = {};
  const ErrorKind bad = ErrorKind::kBadArgument;
  const auto write = [&](std::int64_t rows, std::int64_t cols, const void* from, std::int64_t stride) {
    return write_npy(path, NpyType::kF32, rows, cols, from, stride);
  };
  expect_status(write(-1, 2, data, 2), bad, path, "-1 x 2 of '<f4', accepted are sizes from 0 up");
  expect_status(write(2, -1, data, 2), bad, path, "accepted are sizes from 0 up");
  expect_status(write(2, 2, nullptr, 2), bad, path, "the data to write is null");
  expect_status(write(2, 2, data, 1), bad, path, "the row stride to write is 1 elements, accepted is at least");
  expect_status(write(2, 2, data, -2), bad, path, "the row stride to write is -2 elements");
  expect_status(write(std::int64_t{1} << 31, std::int64_t{1} << 31, data, std::int64_t{1} << 31), bad, path,
                "does not fit 63 bits");
  expect_status(write(2, 2, data, INT64_MAX), bad, path, "times 2 rows does not fit 63 bits");
  EXPECT_TRUE(fs::is_empty(dir_));
  expect_status(write_npy("", NpyType::kF32, 1, 1, data, 1), bad, "", "is empty");
  expect_status(write_npy(dir_ / "", NpyType::kF32, 1, 1, data, 1), bad, dir_ / "", "names a directory");
  expect_status(write_npy(dir_, NpyType::kF32, 1, 1, data, 1), bad, dir_, "not a regular file");
  // Stands for a device: a write that is not refused replaces what it is given, so no test may name a real one.
  const fs::path fifo = dir_ / "fifo.npy";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_status(write_npy(fifo, NpyType::kF32, 1, 1, data, 1), bad, fifo, "not a regular file");
  EXPECT_TRUE(fs::is_fifo(fifo));
  const fs::path nowhere = dir_ / "missing" / "a.npy";
  expect_status(write_npy(nowhere, NpyType::kF32, 1, 1, data, 1), ErrorKind::kIo, nowhere, "No such file");
}

TEST_F(Npy, ASymbolicLinkIsFollowedAndStays) {
  const float data[1] = {1};
  fs::create_directory(dir_ / "elsewhere");
  spill(dir_ / "elsewhere" / "a.npy", "old");
  fs::create_symlink(fs::path("elsewhere") / "a.npy", dir_ / "link.npy");
  ASSERT_TRUE(write_npy(dir_ / "link.npy", NpyType::kF32, 1, 1, data, 1));
  EXPECT_TRUE(fs::is_symlink(dir_ / "link.npy"));
  EXPECT_TRUE(read_npy(dir_ / "elsewhere" / "a.npy", kLimit));
  fs::create_symlink("nothing.npy", dir_ / "dangling.npy");
  expect_status(write_npy(dir_ / "dangling.npy", NpyType::kF32, 1, 1, data, 1), ErrorKind::kIo, dir_ / "dangling.npy",
                "cannot be followed");
}

TEST_F(Npy, AFailedWriteIsReportedAndLeavesTheOldFileAndNothingElse) {
  const fs::path path = dir_ / "a.npy";
  spill(path, "old");
  const std::vector<float> data(1 << 16);
  // Past this size the system refuses to write: once in the header, once in the data, once in the last byte.
  for (const rlim_t limit : {rlim_t{100}, rlim_t{100000}, rlim_t{128 + (1 << 18) - 1}}) {
    rlimit before = {};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
    const auto handler = ::signal(SIGXFSZ, SIG_IGN);
    const rlimit tight = {limit, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
    const Status status = write_npy(path, NpyType::kF32, 256, 256, data.data(), 256);
    ::setrlimit(RLIMIT_FSIZE, &before);
    ::signal(SIGXFSZ, handler);
    expect_status(status, ErrorKind::kIo, path, "writing failed: File too large");
    EXPECT_EQ(slurp(path), "old");
    EXPECT_EQ(std::distance(fs::directory_iterator(dir_), fs::directory_iterator()), 1);
  }
}

ino_t inode_of(const fs::path& path) {
  struct stat info = {};
  EXPECT_EQ(::stat(path.c_str(), &info), 0);
  return info.st_ino;
}

TEST_F(Npy, AKilledWriterLeavesTheOldMatrixOrTheNewOneWhole) {
  const fs::path path = dir_ / "a.npy";
  const std::vector<std::int32_t> first(1 << 18, 0);
  ASSERT_TRUE(write_npy(path, NpyType::kI32, 512, 512, first.data(), 512));
  for (int round = 0; round < 12; ++round) {
    const ino_t before = inode_of(path);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (std::int32_t value = 1;; ++value) {
        const std::vector<std::int32_t> data(1 << 18, value);
        if (!write_npy(path, NpyType::kI32, 512, 512, data.data(), 512)) ::_exit(1);
      }
    }
    // Once a file has been replaced, the writer is at work; from then on the kill may strike anywhere.
    const auto replaced = [&path, before] { return inode_of(path) != before; };
    for (int i = 0; i < 30'000 && !replaced(); ++i) ::usleep(1000);
    ASSERT_TRUE(replaced());
    ::usleep(static_cast<useconds_t>(round * 737));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    const Result<NpyMatrix> matrix = read_npy(path, kLimit);
    ASSERT_TRUE(matrix) << matrix.error().message;
    const std::vector<std::int32_t> values = elements<std::int32_t>(*matrix);
    ASSERT_EQ(std::count(values.begin(), values.end(), values[0]), 1 << 18);
  }
  // A killed process cannot clean up; what it leaves does not get in the way of the next write.
  ASSERT_TRUE(write_npy(path, NpyType::kI32, 512, 512, first.data(), 512));
  for (const fs::directory_entry& entry : fs::directory_iterator(dir_)) {
    if (entry.path().extension() == ".tmp") fs::remove(entry.path());
  }
}

TEST_F(Npy, ThreadsThatWriteTheSameFileLeaveOneOfTheirMatricesWhole) {
  const fs::path path = dir_ / "a.npy";
  std::vector<std::thread> threads;
  for (std::int32_t value = 0; value < 4; ++value) {
    threads.emplace_back([&path, value] {
      const std::vector<std::int32_t> data(1 << 14, value);
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(write_npy(path, NpyType::kI32, 128, 128, data.data(), 128));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Result<NpyMatrix> matrix = read_npy(path, kLimit);
  ASSERT_TRUE(matrix) << matrix.error().message;
  const std::vector<std::int32_t> values = elements<std::int32_t>(*matrix);
  EXPECT_EQ(std::count(values.begin(), values.end(), values[0]), 1 << 14);
}

}  // namespace
}  // namespace mkernel
