// The kernel alone: one rank on a whole GPU against cuBLAS.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/shapes.h"
#include "bench/statistics.h"
#include "mkernel/mkernel.h"
#include "plan/spec.h"

namespace mkernel::bench {

struct CoreOptions {
  int rounds = 7;
  double block_ms = 10;  // back-to-back launches of one contestant that are timed together, at least
  // 0: chosen, as for any operator.
  int bm = 0;
  int bn = 0;
  int band = 0;
};

// Ours against one baseline, in pairs.
struct CorePairing {
  std::string baseline;  // "cublasGemmEx", "cublasLt (algorithm 2 of 6)"
  double ours_us = 0;    // median over all blocks of this pairing
  double baseline_us = 0;
  std::vector<double> ratios;  // per round, baseline / ours
};

struct CoreResult {
  PlanSpec spec;
  int sms = 0;
  int input_sets = 0;
  int launches_per_block = 0;  // of ours
  double error = 0;   // ||ours - cuBLAS|| / ||cuBLAS||, the largest over all input sets, before and after timing
  int clock_mhz = 0;  // mean while measuring; 0: unknown
  std::vector<CorePairing> pairings;
  struct LtAlgorithm {
    std::string text;
    double ratio = 0;  // to cublasGemmEx, above 1 it is faster; of a short comparison
  };
  std::vector<LtAlgorithm> lt;  // empty where the heuristic knows none
};

struct CoreProblem {
  Shape shape;
  Dtype dtype = Dtype::kBf16;
  bool b_transposed = false;
};

class CoreBench {
 public:
  // Errors: kUnsupported, naming what is missing: the CUDA part, a GPU, cuBLAS.
  static Result<std::unique_ptr<CoreBench>> create(const CoreOptions& options);
  virtual ~CoreBench() = default;
  // Errors: kCheckFailed (a wrong result; nothing was timed or the timing does not count), kOutOfMemory, kBadArgument;
  // the rest make the bench useless.
  virtual Result<CoreResult> run(const CoreProblem& problem) = 0;
  virtual const Machine& machine() const = 0;
  virtual std::string cublas_version() const = 0;
};

}  // namespace mkernel::bench
