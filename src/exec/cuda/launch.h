// Launching a kernel. Included by .cu files only.
#pragma once
#include <cuda_runtime.h>

namespace mkernel {

// Whether a kernel may begin while the one before it in the stream ends (programmatic dependent launch). It then runs
// up to wait_for_stream() (sm90/atoms.cuh) beside it; a kernel that calls let_next_begin() lets its successor do so.
enum class Overlap : std::uint8_t { kNone, kPrevious };

template <class... Args>
cudaError_t launch(void (*kernel)(Args...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                   Overlap overlap, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap == Overlap::kPrevious ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace mkernel
