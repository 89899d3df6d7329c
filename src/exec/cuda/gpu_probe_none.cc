// A build without CUDA knows of no GPUs.
#ifndef MKERNEL_HAS_CUDA
#include "exec/cuda/gpu_probe.h"

namespace mkernel {

std::vector<std::string> gpu_bus_ids() { return {}; }

Result<std::unique_ptr<GpuSample>> create_gpu_sample(int) {
  return Error{ErrorKind::kUnsupported, "this build of mKernel has no CUDA part"};
}

}  // namespace mkernel
#endif
