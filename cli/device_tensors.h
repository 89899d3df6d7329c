// Every rank's Q, K, V, O and log-sum-exp in memory of its own GPU, as they lie on the host.
#pragma once
#include <span>
#include <utility>
#include <vector>

#include "mkernel/mkernel.h"

namespace mkernel::cli {

class DeviceTensors {
 public:
  // Copies Q, K and V of `host`, one entry per rank. Errors: kOutOfMemory.
  static Result<DeviceTensors> create(World& world, std::span<const AttentionArguments> host);
  DeviceTensors(DeviceTensors&& other) noexcept = default;
  DeviceTensors& operator=(DeviceTensors&&) = delete;
  ~DeviceTensors();

  const std::vector<AttentionArguments>& arguments() const { return arguments_; }
  // O and the log-sum-exp go to the host.
  Status download(std::span<const AttentionArguments> host);

 private:
  explicit DeviceTensors(World& world) : world_(&world) {}
  Status take(int rank, std::int64_t bytes, void** data);

  World* world_;
  std::vector<AttentionArguments> arguments_;
  std::vector<std::pair<int, void*>> blocks_;
};

}  // namespace mkernel::cli
