// cuBLAS and cuBLASLt, the baselines, loaded with dlopen so that nothing links them. Included by .cu files only.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mkernel/result.h"
#include "mkernel/types.h"

namespace mkernel::bench {

inline constexpr std::int64_t kCublasWorkspaceBytes = std::int64_t{64} << 20;
inline constexpr int kLtAlgorithms = 6;  // the most that are asked of the heuristic

// C (m, n) = A (m, k) * B (k, n), all dense; sums in fp32.
struct DenseGemm {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Dtype dtype = Dtype::kBf16;  // bf16 or fp16
  bool b_transposed = false;   // B is stored (n, k) row-major; else (k, n) row-major
};
struct DenseOperands {
  const void* a = nullptr;  // (m, k) row-major
  const void* b = nullptr;
  void* c = nullptr;  // (m, n) row-major
};

// The algorithms that cublasLt's heuristic proposes for one shape, best first. Keeps its descriptors alive.
class LtPlan {
 public:
  virtual ~LtPlan() = default;
  virtual int count() const = 0;                          // 0 to kLtAlgorithms
  virtual std::string describe(int algorithm) const = 0;  // "id 66, tile 20, stages 35, split-k 1, cluster 3"
};

// One handle for one stream. Not thread-safe. It never limits the number of SMs by cublasSetSmCountTarget, which costs
// cuBLAS 25 to 35 % in green contexts (measured, H200, 2026-12-01, hopper-notes).
class Cublas {
 public:
  // `workspace` has kCublasWorkspaceBytes on the stream's GPU, which is the current one. Errors: kUnsupported (no
  // cuBLAS on this machine).
  static Result<std::unique_ptr<Cublas>> create(cudaStream_t stream, void* workspace);
  virtual ~Cublas() = default;

  // cublasGemmEx with its default algorithm. Asynchronous; may be captured.
  virtual Status gemm(const DenseGemm& gemm, const DenseOperands& operands) = 0;
  virtual Result<std::unique_ptr<LtPlan>> plan_lt(const DenseGemm& gemm) = 0;
  // The same product by an algorithm of a plan of this handle.
  virtual Status gemm_lt(const LtPlan& plan, int algorithm, const DenseOperands& operands) = 0;
  virtual std::string version() const = 0;  // "13.0.2"
};

}  // namespace mkernel::bench
