// The CUDA executor of a build without CUDA.
#ifndef MKERNEL_HAS_CUDA
#include "exec/cuda/cuda_executor.h"

namespace mkernel {

Result<std::unique_ptr<CudaExecutor>> CudaExecutor::create(const CudaExecutorOptions&) {
  return Error{ErrorKind::kUnsupported,
               "this build of mKernel has no CUDA part: build it where nvcc of CUDA 12.5 or newer is found"};
}

}  // namespace mkernel
#endif
