#include "bench/device_tools.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "bench/nvml.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel::bench {
namespace {

constexpr unsigned kBlock = 256;
constexpr unsigned kBlocks = 1024;
constexpr double kPatienceS = 60;  // for checks, which take milliseconds

struct Parts {
  const void* part[Checker::kMaxParts];
  int count;
};

template <class T>
__device__ float to_float(T value) {
  return static_cast<float>(value);
}

// The finaliser of splitmix64: every bit of the result depends on every bit of `x`.
__device__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class T>
__global__ void gaussian_kernel(T* data, std::int64_t elements, std::uint64_t seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const std::uint64_t bits = mix(static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull + seed);
    // Box and Muller; the smallest u keeps the logarithm finite.
    const float u = static_cast<float>(static_cast<std::uint32_t>(bits) >> 8) * (1.0f / 16777216.0f) + 1e-7f;
    const float v = static_cast<float>(bits >> 40) * (1.0f / 16777216.0f);
    data[i] = static_cast<T>(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
  }
}

// out[0] += |a - sum of parts|^2, out[1] += |sum of parts|^2.
template <class T>
__global__ void compare_kernel(const T* a, const __grid_constant__ Parts parts, std::int64_t elements, double* out) {
  double difference = 0;
  double reference = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    float sum = 0;
    for (int p = 0; p < parts.count; ++p) sum += to_float(static_cast<const T*>(parts.part[p])[i]);
    const double apart = static_cast<double>(to_float(a[i])) - static_cast<double>(sum);
    difference += apart * apart;
    reference += static_cast<double>(sum) * static_cast<double>(sum);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    difference += __shfl_xor_sync(0xffffffffu, difference, lanes);
    reference += __shfl_xor_sync(0xffffffffu, reference, lanes);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(out, difference);
    atomicAdd(out + 1, reference);
  }
}

__global__ void digest_kernel(const std::uint16_t* data, std::int64_t elements, unsigned long long* out) {
  unsigned long long sum = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    sum += mix(static_cast<std::uint64_t>(i) * 65536 + data[i] + 1);
  }
  atomicAdd(out, sum);
}

}  // namespace

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) cudaFree(data_);
}

Result<DeviceBuffer> DeviceBuffer::create(std::int64_t bytes) {
  DeviceBuffer made;
  const cudaError_t status = cudaMalloc(&made.data_, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 256)));
  if (status != cudaSuccess) {
    made.data_ = nullptr;
    (void)cudaGetLastError();
    return cuda_error(status, fmt::format("allocating {} bytes for a benchmark", bytes));
  }
  return Result<DeviceBuffer>(std::move(made));
}

void fill_gaussian(void* data, std::int64_t elements, Dtype dtype, std::uint64_t seed, cudaStream_t stream) {
  if (elements == 0) return;
  const std::uint64_t spread = seed * 0xd1b54a32d192ed03ull;
  if (dtype == Dtype::kFp16) {
    gaussian_kernel<<<kBlocks, kBlock, 0, stream>>>(static_cast<__half*>(data), elements, spread);
  } else {
    gaussian_kernel<<<kBlocks, kBlock, 0, stream>>>(static_cast<__nv_bfloat16*>(data), elements, spread);
  }
}

void fill_nan(void* data, std::int64_t elements, cudaStream_t stream) {
  (void)cudaMemsetAsync(data, 0xff, static_cast<std::size_t>(elements) * 2, stream);
}

Result<Checker> Checker::create() {
  Result<DeviceBuffer> scratch = DeviceBuffer::create(3 * 8);
  if (!scratch.ok()) return scratch.error();
  Checker made;
  made.scratch_ = std::move(*scratch);
  return Result<Checker>(std::move(made));
}

Result<double> Checker::relative_error(const void* a, const void* b, std::int64_t elements, Dtype dtype,
                                       cudaStream_t stream) {
  return relative_error_of_sum(a, std::span<const void* const>(&b, 1), elements, dtype, stream);
}

Result<double> Checker::relative_error_of_sum(const void* a, std::span<const void* const> parts, std::int64_t elements,
                                              Dtype dtype, cudaStream_t stream) {
  Parts list{};
  list.count = static_cast<int>(std::min<std::size_t>(parts.size(), kMaxParts));
  for (int i = 0; i < list.count; ++i) list.part[i] = parts[static_cast<std::size_t>(i)];
  auto* const sums = static_cast<double*>(scratch_.data());
  (void)cudaMemsetAsync(sums, 0, 16, stream);
  if (dtype == Dtype::kFp16) {
    compare_kernel<<<kBlocks, kBlock, 0, stream>>>(static_cast<const __half*>(a), list, elements, sums);
  } else {
    compare_kernel<<<kBlocks, kBlock, 0, stream>>>(static_cast<const __nv_bfloat16*>(a), list, elements, sums);
  }
  double host[2] = {};
  (void)cudaMemcpyAsync(host, sums, 16, cudaMemcpyDeviceToHost, stream);
  if (Status status = wait_for({&stream, 1}, "comparing two results", kPatienceS); !status.ok()) return status.error();
  if (host[1] == 0) return host[0] == 0 ? 0.0 : HUGE_VAL;
  return std::sqrt(host[0] / host[1]);
}

Result<std::uint64_t> Checker::digest(const void* data, std::int64_t elements, cudaStream_t stream) {
  auto* const sum = static_cast<unsigned long long*>(scratch_.data()) + 2;
  (void)cudaMemsetAsync(sum, 0, 8, stream);
  digest_kernel<<<kBlocks, kBlock, 0, stream>>>(static_cast<const std::uint16_t*>(data), elements, sum);
  std::uint64_t host = 0;
  (void)cudaMemcpyAsync(&host, sum, 8, cudaMemcpyDeviceToHost, stream);
  if (Status status = wait_for({&stream, 1}, "the digest of a result", kPatienceS); !status.ok()) return status.error();
  return host;
}

Status wait_for(std::span<const cudaStream_t> streams, const std::string& what, double timeout_s,
                const std::function<void()>& meanwhile) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  Clock::time_point called = begin;
  for (std::size_t i = 0; i < streams.size();) {
    const cudaError_t status = cudaStreamQuery(streams[i]);
    if (status == cudaSuccess) {
      ++i;
      continue;
    }
    if (status != cudaErrorNotReady) return cuda_error(status, what);
    const Clock::time_point now = Clock::now();
    if (std::chrono::duration<double>(now - begin).count() > timeout_s) {
      return Error{ErrorKind::kTimeout, fmt::format("{}: not finished after {:.0f} s (stream {} of {})", what,
                                                    timeout_s, i + 1, streams.size())};
    }
    if (meanwhile && now - called > std::chrono::milliseconds(5)) {
      called = now;
      meanwhile();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return Ok{};
}

Result<double> elapsed_us(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0;
  const cudaError_t status = cudaEventElapsedTime(&ms, begin, end);
  if (status != cudaSuccess) return cuda_error(status, "reading the time between two events");
  return static_cast<double>(ms) * 1e3;
}

TimedEvent::TimedEvent() {
  if (cudaEventCreate(&event_) != cudaSuccess) event_ = nullptr;
}
TimedEvent::~TimedEvent() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

Result<Machine> describe_machine() {
  cudaDeviceProp properties{};
  int runtime = 0;
  cudaError_t status = cudaGetDeviceProperties(&properties, 0);
  if (status == cudaSuccess) status = cudaRuntimeGetVersion(&runtime);
  if (status != cudaSuccess) return cuda_error(status, "asking for the properties of GPU 0");
  Machine machine;
  machine.gpu = properties.name;
  machine.sms = properties.multiProcessorCount;
  machine.cuda = fmt::format("{}.{}", runtime / 1000, runtime % 1000 / 10);
  machine.driver = driver_version();
  return machine;
}

}  // namespace mkernel::bench
