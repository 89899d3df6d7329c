#include "cli/matrices.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/npy.h"
#include "cli/values.h"

namespace mkernel::cli {
namespace {

constexpr std::int64_t kAllRowsProducts = std::int64_t{1} << 32;  // some seconds of one core
constexpr std::int64_t kSampledRows = 64;

bool c_on_every_rank(const PlanSpec& spec) { return spec.op == Op::kGemmAllReduce; }

std::optional<Dtype> dtype_of(NpyType type) {
  switch (type) {
    case NpyType::kBf16: return Dtype::kBf16;
    case NpyType::kF16: return Dtype::kFp16;
    case NpyType::kF32: return Dtype::kFp32;
    default: return std::nullopt;
  }
}

Result<NpyHeader> read_header(const std::filesystem::path& path) {
  const auto fail = [&](const char* why) {
    return bad_argument(fmt::format("input file {} cannot be read: {}", quote(path.string()), why));
  };
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return fail("there is no such file");
  if (!std::filesystem::is_regular_file(status)) return fail("it is not a regular file");
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return fail(error.message().c_str());
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return fail(std::strerror(errno));
  std::vector<std::byte> first(static_cast<std::size_t>(std::min<std::uintmax_t>(size, kNpyMaxHeaderBytes)));
  file.read(reinterpret_cast<char*>(first.data()), static_cast<std::streamsize>(first.size()));
  if (!file) return fail("it ends before its size");
  return parse_npy_header(first, size, path.string());
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio
  return hash ^ (hash >> 29);
}

}  // namespace

Matrices::Matrices(const PlanSpec& spec, std::int32_t own_rank) : plan_(spec), own_rank_(own_rank) {
  const int copies = c_on_every_rank(spec) && own_rank < 0 ? spec.topo.world() : 1;
  for (int i = 0; i < copies; ++i) c_.push_back(allocate(spec.m, spec.n, spec.dtype));
}

Matrices::Bytes Matrices::allocate(std::int64_t rows, std::int64_t cols, Dtype dtype) {
  const auto size = static_cast<std::size_t>(rows * cols * dtype_bytes(dtype));
  return {std::make_unique_for_overwrite<std::byte[]>(size), size};
}

double Matrices::bytes_needed(const PlanSpec& spec, std::int32_t own_rank) {
  const auto area = [](std::int64_t rows, std::int64_t cols) {
    return static_cast<double>(rows) * static_cast<double>(cols);
  };
  const double copies = c_on_every_rank(spec) && own_rank < 0 ? spec.topo.world() : 1;
  return static_cast<double>(dtype_bytes(spec.dtype)) *
         (area(spec.m, spec.k) + area(spec.k, spec.n) + copies * area(spec.m, spec.n));
}

void Matrices::fill(std::uint64_t seed, Fill kind) {
  const PlanSpec& spec = plan_.spec();
  const auto size = static_cast<std::size_t>(dtype_bytes(spec.dtype));
  a_.resize(static_cast<std::size_t>(spec.m * spec.k) * size);
  b_.resize(static_cast<std::size_t>(spec.k * spec.n) * size);
  fill_random({a_.data(), spec.dtype, spec.m, spec.k, spec.k, 1}, 2 * seed, kind);
  fill_random({b_.data(), spec.dtype, spec.k, spec.n, spec.n, 1}, 2 * seed + 1, kind);
}

void Matrices::load(std::vector<std::byte> a, std::vector<std::byte> b) {
  a_ = std::move(a);
  b_ = std::move(b);
}

Matrix Matrices::part(std::byte* whole, std::int64_t whole_cols, Plan::Extent extent, std::int64_t row,
                      std::int64_t col) const {
  if (extent.rows == 0 || extent.cols == 0) return {nullptr, extent.rows, extent.cols, whole_cols, 1};
  return {whole + (row * whole_cols + col) * dtype_bytes(plan_.spec().dtype), extent.rows, extent.cols, whole_cols, 1};
}

std::vector<GemmArguments> Matrices::arguments() {
  const PlanSpec& spec = plan_.spec();
  std::vector<GemmArguments> result;
  for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
    const bool gather = spec.op == Op::kAllGatherGemm;
    const std::int64_t row = spec.row_split().begin(rank);
    const std::int64_t col = spec.col_split().begin(rank);
    const std::int64_t inner = spec.k_split().begin(rank);
    std::byte* c = c_[c_.size() > 1 ? static_cast<std::size_t>(rank) : 0].data.get();
    result.push_back({
        part(a_.data(), spec.k, plan_.a_extent(rank), gather ? row : 0, gather ? 0 : inner),
        part(b_.data(), spec.n, plan_.b_extent(rank), gather ? 0 : inner, gather ? col : 0),
        part(c, spec.n, plan_.c_extent(rank), spec.op == Op::kGemmReduceScatter ? row : 0, gather ? col : 0),
    });
  }
  return result;
}

void Matrices::poison() {
  // All bits set is a NaN in every type.
  for (Bytes& c : c_) std::memset(c.data.get(), 0xff, c.size);
}

std::uint64_t Matrices::digest() const {
  std::uint64_t hash = 0;
  for (const Bytes& c : c_) {
    std::size_t i = 0;
    for (; i + 8 <= c.size; i += 8) {
      std::uint64_t word;
      std::memcpy(&word, c.data.get() + i, 8);
      hash = mix(hash, word);
    }
    for (; i < c.size; ++i) hash = mix(hash, std::to_integer<std::uint64_t>(c.data[i]));
  }
  return hash;
}

std::optional<int> Matrices::first_different_rank() const {
  for (std::size_t rank = 1; rank < c_.size(); ++rank) {
    if (c_[0].size > 0 && std::memcmp(c_[0].data.get(), c_[rank].data.get(), c_[0].size) != 0)
      return static_cast<int>(rank);
  }
  return std::nullopt;
}

ConstMatrix Matrices::whole(const std::byte* data, std::int64_t rows, std::int64_t cols) const {
  return {data, plan_.spec().dtype, rows, cols, cols, 1};
}

std::vector<std::int64_t> Matrices::rows_to_check(const PlanSpec& spec) {
  const double products = static_cast<double>(spec.m) * static_cast<double>(spec.n) * static_cast<double>(spec.k);
  const std::int64_t count =
      products <= static_cast<double>(kAllRowsProducts) ? spec.m : std::min(spec.m, kSampledRows);
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < count; ++i) {
    // Evenly spread from the first row to the last.
    rows.push_back(count == spec.m ? i
                                   : i * ((spec.m - 1) / (count - 1)) + i * ((spec.m - 1) % (count - 1)) / (count - 1));
  }
  return rows;
}

CheckReport Matrices::check() const {
  const PlanSpec& spec = plan_.spec();
  ReferenceSpec reference;
  reference.m = spec.m;
  reference.n = spec.n;
  reference.k = spec.k;
  reference.nodes = spec.topo.nodes;
  reference.gpus = spec.topo.gpus;
  reference.in = reference.out = spec.dtype;
  reference.partial = spec.partial;
  reference.split_k = spec.op != Op::kAllGatherGemm;
  std::vector<std::int64_t> rows = rows_to_check(spec);
  ConstMatrix b = whole(b_.data(), spec.k, spec.n);
  ConstMatrix c = whole(c_[0].data.get(), spec.m, spec.n);
  if (own_rank_ >= 0 && spec.op == Op::kAllGatherGemm) {
    const std::int64_t col = spec.col_split().begin(own_rank_);
    reference.n = b.cols = c.cols = spec.col_split().size(own_rank_);
    b.data = b_.data() + col * dtype_bytes(spec.dtype);
    c.data = c_[0].data.get() + col * dtype_bytes(spec.dtype);
  } else if (own_rank_ >= 0) {
    const std::int64_t begin = spec.row_split().begin(own_rank_);
    const std::int64_t end = begin + spec.row_split().size(own_rank_);
    std::erase_if(rows, [&](std::int64_t row) { return row < begin || row >= end; });
  }
  return check_rows(reference, whole(a_.data(), spec.m, spec.k), b, c, rows);
}

Status Matrices::write(const std::filesystem::path& folder) const {
  const PlanSpec& spec = plan_.spec();
  return write_npy(folder / "C.npy", npy_type_of(spec.dtype), spec.m, spec.n, c_[0].data.get(), spec.n);
}

Result<InputHeaders> read_headers(const std::filesystem::path& folder) {
  const auto a = read_header(folder / "A.npy");
  if (!a) return a.error();
  const auto b = read_header(folder / "B.npy");
  if (!b) return b.error();
  if (a->cols != b->rows) {
    return bad_argument(
        fmt::format("A.npy is {} x {} and B.npy is {} x {} in {}: the columns of A must be the rows of B", a->rows,
                    a->cols, b->rows, b->cols, quote(folder.string())));
  }
  InputHeaders headers{a->rows, b->cols, a->cols, std::nullopt, std::string(npy_descr(a->type))};
  if (a->type == b->type) {
    headers.dtype = dtype_of(a->type);
  } else {
    headers.type_names += " and " + std::string(npy_descr(b->type));
  }
  return headers;
}

Result<std::vector<std::byte>> read_matrix(const std::filesystem::path& path, Dtype dtype, std::uint64_t max_bytes) {
  auto matrix = read_npy(path, max_bytes);
  if (!matrix) return matrix.error();
  // A file of 16-bit integers is taken for bf16 bits only where bf16 is asked for.
  return npy_to_dtype(std::move(matrix).value(), dtype,
                      dtype == Dtype::kBf16 ? U2Meaning::kBf16Bits : U2Meaning::kUnknown);
}

}  // namespace mkernel::cli
