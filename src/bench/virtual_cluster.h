// Fused operators on a virtual cluster against what people do without them, all in one process, in the same green
// contexts and over the same wire.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "bench/link.h"
#include "bench/machine.h"
#include "bench/statistics.h"
#include "mkernel/mkernel.h"
#include "plan/spec.h"

namespace mkernel::bench {

struct ClusterOptions {
  Topology first = {2, 4};  // that run() will probably be asked for first
  int rounds = 3;
  double timed_ms = 30;          // of back-to-back calls of one contestant in one round, about
  int sms = 0;                   // per rank; 0: all there are
  bool sweep_partition = false;  // tries every number of movers from 1 to half of the SMs and takes the best
};

struct ClusterProblem {
  Topology topo;
  GemmOptions gemm;  // sizes over all ranks
  LinkRule link;
  Partition partition;  // all zero: chosen
};

// Mean over the ranks, in microseconds per call.
struct ClusterTime {
  std::string name;
  std::vector<double> us;  // per round
  double host_us = 0;      // what launching one call of all ranks took; close to `us`, the host was the limit
  int calls = 0;           // per round
  int clock_mhz = 0;       // mean while it ran; 0: unknown
  std::string checked;     // what its result was compared with, or why not
};

struct ClusterResult {
  PlanSpec spec;
  int sms = 0;
  Partition partition;
  LinkRate link;
  std::int64_t wire_bytes = 0;  // of the busiest rank per call
  std::int64_t workspace_bytes = 0;
  double error = 0;             // ||C - reference|| / ||reference|| of the fused result, the largest over the ranks
  double wire_us = 0;           // bytes / rate + latency
  double floor_us = 0;          // see floor_us() in link.h
  double floor_by_wire_us = 0;  // the same without what communication alone took when measured
  // In this order: our GEMM, cuBLAS, communication (where there is any), sequential, our own sequential, chunked ...,
  // fused. Empty `us`: left out.
  std::vector<ClusterTime> times;
  struct Comparison {
    std::string baseline;
    double baseline_us = 0;
    std::vector<double> ratios;  // per round, baseline / fused
  };
  Comparison sequential;
  Comparison chunked;  // the best of the chunked variants; no ratios where there is none
  struct Swept {
    int movers = 0;
    double us = 0;
  };
  std::vector<Swept> sweep;

  const ClusterTime* find(const std::string& name) const;
};

// Names in ClusterResult::times.
inline constexpr const char* kOurGemm = "our GEMM alone";
inline constexpr const char* kCublasGemm = "cuBLAS alone";
inline constexpr const char* kCommunication = "communication alone";
inline constexpr const char* kSequential = "sequential";
inline constexpr const char* kOurSequential = "our GEMM, then communication";
inline constexpr const char* kFused = "fused";

class ClusterBench {
 public:
  // Errors: kUnsupported, naming what is missing.
  static Result<std::unique_ptr<ClusterBench>> create(const ClusterOptions& options);
  virtual ~ClusterBench() = default;
  // Errors: kCheckFailed, kOutOfMemory, kBadArgument concern this problem only.
  virtual Result<ClusterResult> run(const ClusterProblem& problem) = 0;
  virtual const Machine& machine() const = 0;
  virtual std::string cublas_version() const = 0;
};

}  // namespace mkernel::bench
