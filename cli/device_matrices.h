// Every rank's A, B and C in memory of its own GPU, dense and row-major.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "mkernel/mkernel.h"
#include "plan/plan.h"

namespace mkernel::cli {

class DeviceMatrices {
 public:
  // Errors: kOutOfMemory.
  static Result<DeviceMatrices> create(World& world, const PlanSpec& spec);
  DeviceMatrices(DeviceMatrices&& other) noexcept = default;
  DeviceMatrices& operator=(DeviceMatrices&&) = delete;
  ~DeviceMatrices();

  // By rank; those of other processes have no memory.
  std::vector<GemmArguments> arguments() const { return arguments_; }
  // Between these and the host's views of the same shapes.
  Status upload_inputs(std::span<const GemmArguments> host);
  Status upload_outputs(std::span<const GemmArguments> host);
  Status download_outputs(std::span<const GemmArguments> host);

 private:
  DeviceMatrices(World& world, const PlanSpec& spec);
  bool has(int rank) const { return world_->rank() < 0 || world_->rank() == rank; }
  Status take(int rank, Matrix& matrix, Plan::Extent extent);
  Status upload(int rank, const Matrix& device, const Matrix& host);

  World* world_;
  Plan plan_;
  std::vector<GemmArguments> arguments_;
  std::vector<std::byte> staging_;  // a matrix without the host's padding
};

}  // namespace mkernel::cli
