// What benchmarks need of a GPU besides the things they compare: memory, data, checks, waiting. .cu files only.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "bench/machine.h"
#include "mkernel/result.h"
#include "mkernel/types.h"

namespace mkernel::bench {

// Memory of the current GPU.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBuffer();

  // Errors: kOutOfMemory.
  static Result<DeviceBuffer> create(std::int64_t bytes);
  void* data() const { return data_; }
  std::byte* at(std::int64_t byte) const { return static_cast<std::byte*>(data_) + byte; }

 private:
  void* data_ = nullptr;
};

// Normally distributed random elements of a 16-bit type.
void fill_gaussian(void* data, std::int64_t elements, Dtype dtype, std::uint64_t seed, cudaStream_t stream);
// All elements become NaN.
void fill_nan(void* data, std::int64_t elements, cudaStream_t stream);

// Norms of differences and digests, computed on the GPU. Each call waits for `stream`, which nothing else may occupy.
class Checker {
 public:
  static Result<Checker> create();

  // ||a - b|| / ||b|| over all elements; NaN when either has one.
  Result<double> relative_error(const void* a, const void* b, std::int64_t elements, Dtype dtype, cudaStream_t stream);
  // The same with b[i] = sum over `parts` of part[i], in fp32 in this order. At most kMaxParts parts.
  static constexpr int kMaxParts = 64;
  Result<double> relative_error_of_sum(const void* a, std::span<const void* const> parts, std::int64_t elements,
                                       Dtype dtype, cudaStream_t stream);
  // Of the bits and their places.
  Result<std::uint64_t> digest(const void* data, std::int64_t elements, cudaStream_t stream);

 private:
  DeviceBuffer scratch_;  // three words of 8 bytes
};

// Waits until `done` is true of every stream, without blocking in the driver. Calls `meanwhile` every few milliseconds.
// Errors: kTimeout, naming `what`; kAborted when a kernel has crashed.
Status wait_for(std::span<const cudaStream_t> streams, const std::string& what, double timeout_s,
                const std::function<void()>& meanwhile = {});

// Time between two events that have happened, in microseconds.
Result<double> elapsed_us(cudaEvent_t begin, cudaEvent_t end);

// An event that records times.
class TimedEvent {
 public:
  TimedEvent();
  TimedEvent(TimedEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  TimedEvent& operator=(TimedEvent&&) = delete;
  ~TimedEvent();
  cudaEvent_t get() const { return event_; }  // null when there was no memory for it: recording it fails

 private:
  cudaEvent_t event_ = nullptr;
};

// Names and versions of GPU 0 and what drives it. Not before an executor has been created.
Result<Machine> describe_machine();

}  // namespace mkernel::bench
