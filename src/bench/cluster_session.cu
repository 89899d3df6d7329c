#include "bench/cluster_session.h"

#include <chrono>
#include <utility>

#include "bench/nvml.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel::bench {
namespace {

// About 0.5 ms on 16 SMs of an H200.
constexpr DenseGemm kWarmGemm{2048, 2048, 4096, Dtype::kBf16, false};
constexpr int kWarmGemms = 40;

Status make_rank(CudaExecutor& executor, std::int32_t number, SessionStreams streams, ClusterSession::Rank& rank) {
  rank.stream = static_cast<cudaStream_t>(executor.stream(number));
  if (streams == SessionStreams::kOwnAndUrgent) {
    Result<void*> urgent = executor.new_stream(number, true);
    if (!urgent.ok()) return urgent.error();
    rank.urgent = static_cast<cudaStream_t>(*urgent);
  }
  Result<DeviceBuffer> workspace = DeviceBuffer::create(kCublasWorkspaceBytes);
  if (!workspace.ok()) return workspace.error();
  rank.cublas_workspace = std::move(*workspace);
  Result<DeviceBuffer> c = DeviceBuffer::create(2 * kWarmGemm.m * kWarmGemm.n);
  if (!c.ok()) return c.error();
  rank.warm_c = std::move(*c);
  Result<std::unique_ptr<Cublas>> cublas = Cublas::create(rank.stream, rank.cublas_workspace.data());
  if (!cublas.ok()) return cublas.error();
  rank.cublas = std::move(*cublas);
  for (int i = 0; i < kChunks; ++i) rank.chunk_done.emplace_back();
  return Ok{};
}

}  // namespace

Result<std::unique_ptr<ClusterSession>> ClusterSession::create(const Topology& topo, int sms, SessionStreams streams) {
  auto session = std::make_unique<ClusterSession>();
  session->topo = topo;
  session->asked_sms = sms;
  CudaExecutorOptions options;
  options.topo = topo;
  options.sms = sms;
  options.deadline_s = kClusterDeadlineS;
  Result<std::unique_ptr<CudaExecutor>> executor = CudaExecutor::create(options);
  if (!executor.ok()) return executor.error();
  session->executor = std::move(*executor);
  int gpus = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&gpus); status != cudaSuccess) {
    return cuda_error(status, "counting GPUs");
  }
  if (gpus > 1) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("{} GPUs are visible, and this benchmark divides one among all ranks: set "
                             "CUDA_VISIBLE_DEVICES=0",
                             gpus)};
  }
  for (auto [buffer, elements] : {std::pair(&session->warm_a, kWarmGemm.m * kWarmGemm.k),
                                  std::pair(&session->warm_b, kWarmGemm.k * kWarmGemm.n)}) {
    Result<DeviceBuffer> made = DeviceBuffer::create(2 * elements);
    if (!made.ok()) return made.error();
    *buffer = std::move(*made);
    fill_gaussian(buffer->data(), elements, kWarmGemm.dtype, static_cast<std::uint64_t>(elements), nullptr);
  }
  if (const cudaError_t status = cudaStreamSynchronize(nullptr); status != cudaSuccess) {
    return cuda_error(status, "making random numbers");
  }
  Result<Checker> checker = Checker::create();
  if (!checker.ok()) return checker.error();
  session->checker = std::move(*checker);
  for (std::int32_t r = 0; r < topo.world(); ++r) {
    session->ranks.emplace_back();
    if (Status status = make_rank(*session->executor, r, streams, session->ranks.back()); !status.ok()) {
      return status.error();
    }
  }
  if (Status status = session->warm_up(); !status.ok()) return status.error();
  if (Status status = session->settle("the first products of cuBLAS"); !status.ok()) return status.error();
  return std::unique_ptr<ClusterSession>(std::move(session));
}

ClusterSession::~ClusterSession() {
  ranks.clear();  // handles before the streams, which the executor destroys
}

std::vector<cudaStream_t> ClusterSession::all_streams() const {
  std::vector<cudaStream_t> streams;
  for (const Rank& rank : ranks) {
    streams.push_back(rank.stream);
    if (rank.urgent != nullptr) streams.push_back(rank.urgent);
  }
  return streams;
}

Status ClusterSession::settle(const std::string& what, double timeout_s) {
  const std::vector<cudaStream_t> streams = all_streams();
  Status status = wait_for(streams, what, timeout_s, [this] {
    if (const int mhz = sm_clock_mhz(); mhz > 0) {
      clock_sum += mhz;
      ++clock_samples;
    }
  });
  if (!status.ok()) {
    executor->fail(status.error());  // kernels that still wait for each other leave
    return status;
  }
  if (!executor->failure().happened()) return Ok{};
  const Error error = executor->failure().error();
  return Error{error.kind, what + ": " + error.message};
}

Status ClusterSession::warm_up() {
  for (int i = 0; i < kWarmGemms; ++i) {
    for (Rank& rank : ranks) {
      if (Status status = rank.cublas->gemm(kWarmGemm, {warm_a.data(), warm_b.data(), rank.warm_c.data()});
          !status.ok()) {
        return status;
      }
    }
  }
  return Ok{};
}

Result<CallTime> ClusterSession::time(const TimedCalls& calls) {
  const auto record = [&](TimedEvent Rank::*event) -> Status {
    for (Rank& rank : ranks) {
      const cudaError_t status = cudaEventRecord((rank.*event).get(), calls.ends_urgent ? rank.urgent : rank.stream);
      if (status != cudaSuccess) return cuda_error(status, "recording an event of a benchmark");
    }
    return Ok{};
  };
  clock_sum = 0;
  clock_samples = 0;
  if (Status status = warm_up(); !status.ok()) return status.error();
  if (calls.start) {
    if (Status status = calls.start(); !status.ok()) return status.error();
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i <= calls.count; ++i) {
    if (Status status = calls.call(); !status.ok()) return status.error();
    if (i > 0) continue;
    if (Status status = record(&Rank::begin); !status.ok()) return status.error();
  }
  const double host_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (Status status = record(&Rank::end); !status.ok()) return status.error();
  const double patience_s = 3 * kClusterDeadlineS + 20e-6 * calls.estimate_us * calls.count;
  if (Status status = settle(calls.name, patience_s); !status.ok()) return status.error();
  CallTime timed;
  for (const Rank& rank : ranks) {
    Result<double> us = elapsed_us(rank.begin.get(), rank.end.get());
    if (!us.ok()) return us.error();
    timed.us += *us / calls.count / static_cast<double>(ranks.size());
  }
  timed.host_us = host_s * 1e6 / (calls.count + 1);
  if (clock_samples > 0) timed.clock_mhz = static_cast<int>(clock_sum / clock_samples);
  return timed;
}

}  // namespace mkernel::bench
