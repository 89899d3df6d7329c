// What the cases of one topology share: an executor, streams and cuBLAS handles of every rank. .cu files only.
#pragma once
#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/cublas.h"
#include "bench/device_tools.h"
#include "exec/cuda/cuda_executor.h"

namespace mkernel::bench {

// A rank's deadline for any wait: above the longest call, and short enough that a hang is found soon.
inline constexpr double kClusterDeadlineS = 10;

// Of the contestant that overlaps a GEMM in chunks with communication.
inline constexpr int kChunks = 4;

// Calls of all ranks that are timed together.
struct TimedCalls {
  std::string name;
  std::function<Status()> start;  // before the first call; may be empty
  std::function<Status()> call;   // launches one call of all ranks
  bool ends_urgent = false;       // the last work of a call is on the urgent streams, else on the ranks' own
  int count = 0;
  double estimate_us = 0;  // of one call, for the patience; 0: unknown
};
struct CallTime {
  double us = 0;       // per call, mean over the ranks
  double host_us = 0;  // per call: launching it
  int clock_mhz = 0;   // mean while it ran; 0: unknown
};

enum class SessionStreams { kOwn, kOwnAndUrgent };

struct ClusterSession {
  struct Rank {
    cudaStream_t stream = nullptr;  // the rank's own; cuBLAS runs here
    cudaStream_t urgent = nullptr;  // of high priority, for communication beside it; null: there is none
    DeviceBuffer cublas_workspace;
    DeviceBuffer warm_c;
    std::unique_ptr<Cublas> cublas;
    TimedEvent begin;
    TimedEvent end;
    std::vector<TimedEvent> chunk_done;  // kChunks of them
    TimedEvent call_done;
  };

  // Errors: as CudaExecutor::create(); kUnsupported also with more than one GPU in sight.
  // Without urgent streams two sessions fit into the GPU's 32 hardware queues at once.
  static Result<std::unique_ptr<ClusterSession>> create(const Topology& topo, int sms,
                                                        SessionStreams streams = SessionStreams::kOwnAndUrgent);
  ~ClusterSession();

  std::int32_t world() const { return topo.world(); }
  std::vector<cudaStream_t> all_streams() const;
  // Waits for all streams. Errors: kTimeout and whatever made a kernel leave, with `what`.
  Status settle(const std::string& what, double timeout_s = 3 * kClusterDeadlineS);
  // Some milliseconds of GEMM on every rank: whoever is timed next finds the GPU warm, its clock where a GEMM leaves
  // it, and the host a good way ahead.
  Status warm_up();
  // count + 1 calls back to back behind a warm-up; the first one absorbs that ranks start apart.
  Result<CallTime> time(const TimedCalls& calls);

  Topology topo;
  int asked_sms = 0;
  int operators_made = 0;  // an executor makes a limited number over its life
  std::unique_ptr<CudaExecutor> executor;
  DeviceBuffer warm_a;
  DeviceBuffer warm_b;
  std::vector<Rank> ranks;  // after the executor, which owns their streams: handles go first
  Checker checker;
  double clock_sum = 0;  // of samples taken in settle(), MHz
  int clock_samples = 0;
};

}  // namespace mkernel::bench
