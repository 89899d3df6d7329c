// The argument of the persistent kernel.
#pragma once
#include <cuda.h>

#include "exec/cuda/device_task.h"

namespace mkernel {

// What one launch brings along.
struct DeviceCall {
  CUtensorMap a;          // (rows, K)
  CUtensorMap gather[2];  // (M, K), by parity
  CUtensorMap b;          // (K, cols)
  CUtensorMap c;          // (rows, cols), for 64 x 64 stores
  CUtensorMap packed[2];  // the workspace that tiles go to, as rows of BN elements, by parity
  DeviceRank rank;
  DeviceMatrix a_matrix;  // for moves of A; wide
  DeviceMatrix c_matrix;
  std::int64_t k = 0;             // inner dimension
  std::int32_t a_bytes = 0;       // of a tile's rows of A, per k block: what its map loads
  std::int32_t compute_ctas = 1;  // CTAs from here on serve moves first
  std::uint32_t parts = 0;        // kPart... of cuda_executor.h
};

}  // namespace mkernel
