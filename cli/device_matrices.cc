#include "cli/device_matrices.h"

#include <cstring>
#include <utility>

namespace mkernel::cli {
namespace {

std::size_t row_bytes(const Matrix& m, Dtype dtype) { return static_cast<std::size_t>(m.cols * dtype_bytes(dtype)); }

std::byte* row_of(const Matrix& m, std::int64_t row, Dtype dtype) {
  return static_cast<std::byte*>(m.data) + row * m.row_stride * dtype_bytes(dtype);
}

}  // namespace

DeviceMatrices::DeviceMatrices(World& world, const PlanSpec& spec) : world_(&world), plan_(spec) {}

Result<DeviceMatrices> DeviceMatrices::create(World& world, const PlanSpec& spec) {
  DeviceMatrices made(world, spec);
  made.arguments_.resize(static_cast<std::size_t>(world.size()));
  for (int rank = 0; rank < world.size(); ++rank) {
    if (!made.has(rank)) continue;
    GemmArguments& args = made.arguments_[static_cast<std::size_t>(rank)];
    const std::pair<Matrix*, Plan::Extent> matrices[] = {{&args.a, made.plan_.a_extent(rank)},
                                                         {&args.b, made.plan_.b_extent(rank)},
                                                         {&args.c, made.plan_.c_extent(rank)}};
    for (const auto& [matrix, extent] : matrices) {
      if (const Status status = made.take(rank, *matrix, extent); !status) return status.error();
    }
  }
  return made;
}

DeviceMatrices::~DeviceMatrices() {
  for (std::size_t rank = 0; rank < arguments_.size(); ++rank) {
    if (!has(static_cast<int>(rank))) continue;
    for (const Matrix* m : {&arguments_[rank].a, &arguments_[rank].b, &arguments_[rank].c}) {
      world_->release(static_cast<int>(rank), m->data);
    }
  }
}

Status DeviceMatrices::take(int rank, Matrix& matrix, Plan::Extent extent) {
  auto data = world_->allocate(rank, extent.rows * extent.cols * dtype_bytes(plan_.spec().dtype));
  if (!data) return data.error();
  matrix = Matrix::row_major(*data, extent.rows, extent.cols);
  return Ok{};
}

Status DeviceMatrices::upload(int rank, const Matrix& device, const Matrix& host) {
  const Dtype dtype = plan_.spec().dtype;
  const std::size_t bytes = row_bytes(host, dtype);
  staging_.resize(static_cast<std::size_t>(host.rows) * bytes);
  for (std::int64_t row = 0; row < host.rows && bytes > 0; ++row) {
    std::memcpy(staging_.data() + static_cast<std::size_t>(row) * bytes, row_of(host, row, dtype), bytes);
  }
  return world_->copy(rank, device.data, staging_.data(), static_cast<std::int64_t>(staging_.size()));
}

Status DeviceMatrices::upload_inputs(std::span<const GemmArguments> host) {
  for (std::size_t rank = 0; rank < host.size(); ++rank) {
    const int r = static_cast<int>(rank);
    if (!has(r)) continue;
    if (const Status status = upload(r, arguments_[rank].a, host[rank].a); !status) return status;
    if (const Status status = upload(r, arguments_[rank].b, host[rank].b); !status) return status;
  }
  return Ok{};
}

Status DeviceMatrices::upload_outputs(std::span<const GemmArguments> host) {
  for (std::size_t rank = 0; rank < host.size(); ++rank) {
    if (!has(static_cast<int>(rank))) continue;
    if (const Status status = upload(static_cast<int>(rank), arguments_[rank].c, host[rank].c); !status) return status;
  }
  return Ok{};
}

Status DeviceMatrices::download_outputs(std::span<const GemmArguments> host) {
  const Dtype dtype = plan_.spec().dtype;
  for (std::size_t rank = 0; rank < host.size(); ++rank) {
    if (!has(static_cast<int>(rank))) continue;
    const Matrix& to = host[rank].c;
    const std::size_t bytes = row_bytes(to, dtype);
    staging_.resize(static_cast<std::size_t>(to.rows) * bytes);
    const Status status = world_->copy(static_cast<int>(rank), staging_.data(), arguments_[rank].c.data,
                                       static_cast<std::int64_t>(staging_.size()));
    if (!status) return status;
    for (std::int64_t row = 0; row < to.rows && bytes > 0; ++row) {
      std::memcpy(row_of(to, row, dtype), staging_.data() + static_cast<std::size_t>(row) * bytes, bytes);
    }
  }
  return Ok{};
}

}  // namespace mkernel::cli
