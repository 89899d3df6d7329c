// The whole A, B and C of a call, in row-major order, and every rank's part of them as a view: `run` and `sim --data`
// take their input from here and check their output here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exec/fill.h"
#include "exec/reference.h"
#include "mkernel/mkernel.h"
#include "plan/plan.h"

namespace mkernel::cli {

class Matrices {
 public:
  // Memory for all of C; A and B are still to be filled or loaded. Throws std::bad_alloc. With an `own_rank` only that
  // rank's part of C is used.
  explicit Matrices(const PlanSpec& spec, std::int32_t own_rank = -1);

  // Bytes of A, B and all C, as a floating-point number since the ranks' sum may exceed 64 bits.
  static double bytes_needed(const PlanSpec& spec, std::int32_t own_rank = -1);

  void fill(std::uint64_t seed, Fill kind);
  // `a` and `b` hold the whole matrices in the spec's type.
  void load(std::vector<std::byte> a, std::vector<std::byte> b);

  // Every rank's views; A and B must have been filled or loaded.
  std::vector<GemmArguments> arguments();
  // Fills all of C with NaNs, so that what is not written shows.
  void poison();
  // A number that differs when any bit of any C does (but for chance).
  std::uint64_t digest() const;

  // gemm_all_reduce: the first rank whose C is not rank 0's bit for bit.
  std::optional<int> first_different_rank() const;
  // Compares C (rank 0's where every rank has one) with fp64: all rows where that takes up to 2^32 products, else 64.
  // With an own rank: its part of C, and of a C that all ranks have its share of the rows.
  CheckReport check() const;
  static std::vector<std::int64_t> rows_to_check(const PlanSpec& spec);

  // Writes C.npy into `folder`.
  Status write(const std::filesystem::path& folder) const;

 private:
  struct Bytes {
    std::unique_ptr<std::byte[]> data;
    std::size_t size = 0;
  };
  static Bytes allocate(std::int64_t rows, std::int64_t cols, Dtype dtype);
  ConstMatrix whole(const std::byte* data, std::int64_t rows, std::int64_t cols) const;
  Matrix part(std::byte* whole, std::int64_t whole_cols, Plan::Extent extent, std::int64_t row, std::int64_t col) const;

  Plan plan_;
  std::int32_t own_rank_;
  std::vector<std::byte> a_;
  std::vector<std::byte> b_;
  std::vector<Bytes> c_;  // one, or one for each rank
};

// The element types and shapes in A.npy and B.npy of a folder, before their data is read.
struct InputHeaders {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::optional<Dtype> dtype;  // when both files have one that operators take
  std::string type_names;      // "<f8" or "<f4 and <f2", for messages
};
Result<InputHeaders> read_headers(const std::filesystem::path& folder);

// Reads a whole matrix and rounds it to `dtype`. At most `max_bytes` are taken.
Result<std::vector<std::byte>> read_matrix(const std::filesystem::path& path, Dtype dtype, std::uint64_t max_bytes);

}  // namespace mkernel::cli
