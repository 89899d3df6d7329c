// The benchmarks of a build without CUDA.
#ifndef MKERNEL_HAS_CUDA
#include "bench/command_ring.h"
#include "bench/gemm_core.h"
#include "bench/hierarchy.h"
#include "bench/virtual_cluster.h"

namespace mkernel::bench {
namespace {

Error no_cuda() {
  return {ErrorKind::kUnsupported,
          "`mkernel bench` measures GPUs, and this build of mKernel has no CUDA part: build it where nvcc of CUDA 12.5 "
          "or newer is found"};
}

}  // namespace

Result<std::unique_ptr<CoreBench>> CoreBench::create(const CoreOptions&) { return no_cuda(); }
Result<std::unique_ptr<ClusterBench>> ClusterBench::create(const ClusterOptions&) { return no_cuda(); }
Result<std::unique_ptr<HierarchyBench>> HierarchyBench::create(const HierarchyOptions&) { return no_cuda(); }
Result<std::vector<RingResult>> measure_command_ring(const RingOptions&, Machine&) { return no_cuda(); }

}  // namespace mkernel::bench
#endif
