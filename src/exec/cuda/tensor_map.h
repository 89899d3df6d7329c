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

}  // namespace mkernel
