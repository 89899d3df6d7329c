#include "bench/cluster_data.h"

#include <cmath>
#include <utility>

#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel::bench {
namespace {

constexpr std::int64_t kElementBytes = 2;  // bf16 and fp16

std::int64_t elements(const Plan::Extent& extent) { return extent.rows * extent.cols; }

}  // namespace

Result<std::unique_ptr<ClusterData>> ClusterData::create(ClusterSession& session, const Plan& plan) {
  std::unique_ptr<ClusterData> data(new ClusterData(session, plan));
  if (Status status = data->take_memory(); !status.ok()) return status.error();
  if (Status status = data->fill(); !status.ok()) return status.error();
  return std::unique_ptr<ClusterData>(std::move(data));
}

// Parts of C may need a row more per part than the whole, since rows do not divide evenly.
std::int64_t ClusterData::c_elements(std::int32_t rank) const {
  const Plan::Extent c = plan_.c_extent(rank);
  return (c.rows + kChunks) * c.cols;
}

Status ClusterData::take_memory() {
  const PlanSpec& spec = plan_.spec();
  for (std::int32_t r = 0; r < session_.world(); ++r) {
    Rank rank;
    const struct {
      DeviceBuffer* buffer;
      std::int64_t size;
    } wanted[] = {{&rank.a, elements(plan_.a_extent(r))},
                  {&rank.a_whole, gathers() ? spec.m * spec.k : 0},
                  {&rank.b, elements(plan_.b_extent(r))},
                  {&rank.c, c_elements(r)},
                  {&rank.cublas_c, spec.m * plan_.b_extent(r).cols}};
    for (const auto& [buffer, size] : wanted) {
      Result<DeviceBuffer> made = DeviceBuffer::create(size * kElementBytes);
      if (!made.ok()) return made.error();
      *buffer = std::move(*made);
    }
    ranks_.push_back(std::move(rank));
  }
  return Ok{};
}

Status ClusterData::fill() {
  const PlanSpec& spec = plan_.spec();
  cudaError_t status = cudaSuccess;
  for (std::int32_t r = 0; r < session_.world(); ++r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    cudaStream_t stream = session_.ranks[static_cast<std::size_t>(r)].stream;
    const auto seed = static_cast<std::uint64_t>(r);
    fill_gaussian(rank.b.data(), elements(plan_.b_extent(r)), dtype(), 1000 + seed, stream);
    if (!gathers()) {
      fill_gaussian(rank.a.data(), elements(plan_.a_extent(r)), dtype(), 1 + seed, stream);
      continue;
    }
    fill_gaussian(rank.a_whole.data(), spec.m * spec.k, dtype(), 1, stream);  // the same on every rank
    const std::int64_t begin = spec.row_split().begin(r) * spec.k * kElementBytes;
    const auto bytes = static_cast<std::size_t>(elements(plan_.a_extent(r)) * kElementBytes);
    if (bytes > 0 && status == cudaSuccess) {
      status = cudaMemcpyAsync(rank.a.data(), rank.a_whole.at(begin), bytes, cudaMemcpyDeviceToDevice, stream);
    }
  }
  if (status != cudaSuccess) return cuda_error(status, "dividing A among the ranks");
  return session_.settle("making the inputs");
}

GemmArguments ClusterData::arguments(std::int32_t rank) const { return part_arguments(plan_, rank, 0, 0); }

GemmArguments ClusterData::part_arguments(const Plan& part, std::int32_t r, std::int64_t first,
                                          std::int64_t c_row) const {
  const Rank& rank = ranks_[static_cast<std::size_t>(r)];
  const Plan::Extent a = part.a_extent(r);
  const Plan::Extent b = part.b_extent(r);
  const Plan::Extent c = part.c_extent(r);
  // In all_gather_gemm the part's rows of a rank are not among those that the rank has in the whole.
  const std::int64_t a_row = gathers() ? first + part.spec().row_split().begin(r) : first;
  const DeviceBuffer& a_from = gathers() && &part != &plan_ ? rank.a_whole : rank.a;
  const std::int64_t a_begin = &part == &plan_ ? 0 : a_row * a.cols;
  GemmArguments arguments;
  arguments.a = Matrix::row_major(a_from.at(a_begin * kElementBytes), a.rows, a.cols);
  arguments.b = Matrix::row_major(rank.b.data(), b.rows, b.cols);
  arguments.c = Matrix::row_major(rank.c.at(c_row * c.cols * kElementBytes), c.rows, c.cols);
  return arguments;
}

Status ClusterData::cublas(std::int32_t r, std::int64_t first, std::int64_t rows) {
  const Rank& rank = ranks_[static_cast<std::size_t>(r)];
  const Plan::Extent b = plan_.b_extent(r);
  if (rows == 0 || b.rows == 0 || b.cols == 0) return Ok{};
  const DenseGemm gemm{rows, b.cols, b.rows, dtype(), false};
  const DeviceBuffer& a = gathers() ? rank.a_whole : rank.a;
  return session_.ranks[static_cast<std::size_t>(r)].cublas->gemm(
      gemm, {a.at(first * b.rows * kElementBytes), rank.b.data(), rank.cublas_c.at(first * b.cols * kElementBytes)});
}

Status ClusterData::make_reference() {
  for (std::int32_t r = 0; r < session_.world(); ++r) {
    fill_nan(ranks_[static_cast<std::size_t>(r)].cublas_c.data(), plan_.spec().m * plan_.b_extent(r).cols,
             session_.ranks[static_cast<std::size_t>(r)].stream);
    if (Status status = cublas(r, 0, plan_.spec().m); !status.ok()) return status;
  }
  return session_.settle("the reference by cuBLAS");
}

void ClusterData::poison() {
  for (std::int32_t r = 0; r < session_.world(); ++r) {
    fill_nan(ranks_[static_cast<std::size_t>(r)].c.data(), c_elements(r),
             session_.ranks[static_cast<std::size_t>(r)].stream);
  }
}

Result<double> ClusterData::error(const std::vector<CPiece>& pieces) {
  double largest = 0;
  for (const CPiece& piece : pieces) {
    const std::int64_t cols = plan_.c_extent(piece.rank).cols;
    if (piece.rows == 0 || cols == 0) continue;
    std::vector<const void*> parts;
    for (std::int32_t r = 0; r < session_.world(); ++r) {
      if (gathers() && r != piece.rank) continue;
      if (!gathers() && plan_.b_extent(r).rows == 0) continue;  // the rank has no part in the sum
      parts.push_back(ranks_[static_cast<std::size_t>(r)].cublas_c.at(piece.row * cols * kElementBytes));
    }
    Result<double> error = session_.checker.relative_error_of_sum(
        ranks_[static_cast<std::size_t>(piece.rank)].c.at(piece.c_row * cols * kElementBytes), parts, piece.rows * cols,
        dtype(), session_.ranks[static_cast<std::size_t>(piece.rank)].stream);
    if (!error.ok()) return error.error();
    if (!(*error <= largest)) largest = *error;
    if (std::isnan(largest)) break;
  }
  return largest;
}

std::vector<CPiece> ClusterData::whole() const {
  std::vector<CPiece> pieces;
  const PlanSpec& spec = plan_.spec();
  for (std::int32_t r = 0; r < session_.world(); ++r) {
    const bool scattered = spec.op == Op::kGemmReduceScatter;
    pieces.push_back({r, 0, scattered ? spec.row_split().begin(r) : 0, plan_.c_extent(r).rows});
  }
  return pieces;
}

Result<bool> ClusterData::equal_bits() {
  std::uint64_t first = 0;
  for (std::int32_t r = 0; r < session_.world(); ++r) {
    Result<std::uint64_t> digest =
        session_.checker.digest(ranks_[static_cast<std::size_t>(r)].c.data(), plan_.spec().m * plan_.spec().n,
                                session_.ranks[static_cast<std::size_t>(r)].stream);
    if (!digest.ok()) return digest.error();
    if (r == 0) first = *digest;
    if (*digest != first) return false;
  }
  return true;
}

}  // namespace mkernel::bench
