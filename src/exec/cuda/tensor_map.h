// TMA descriptors.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "mkernel/result.h"
#include "mkernel/types.h"

namespace mkernel {

// A row-major matrix of 16-bit elements, moved in boxes of 64 columns by `box_rows` with 128-byte swizzle; what lies
// outside reads as zero and is not written. `data` and the pitch in bytes are multiples of 16; rows, cols >= 1.
// Errors: kUnsupported when the driver refuses the descriptor.
Result<CUtensorMap> make_tensor_map(Dtype dtype, const void* data, std::int64_t rows, std::int64_t cols,
                                    std::int64_t pitch, int box_rows);

// The same for a tensor (batch, heads, tokens, dim) whose strides, in elements, are multiples of 8; boxes of 64 columns
// by `box_tokens`. No size is 0.
struct TensorShape {
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t tokens = 1;
  std::int64_t dim = 1;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};
Result<CUtensorMap> make_tensor_map(Dtype dtype, const void* data, const TensorShape& shape, int box_tokens);

}  // namespace mkernel
