#include "exec/cuda/tensor_map.h"

#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel {

Result<CUtensorMap> make_tensor_map(Dtype dtype, const void* data, std::int64_t rows, std::int64_t cols,
                                    std::int64_t pitch, int box_rows) {
  const Result<const DriverApi*> api = driver_api();
  if (!api.ok()) return api.error();
  CUtensorMap map{};
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult status = (*api)->tensor_map_encode_tiled(
      &map, dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    return driver_error(
        status, fmt::format("describing a {} x {} matrix with pitch {} at {} for TMA", rows, cols, pitch, data));
  }
  return map;
}

Result<CUtensorMap> make_tensor_map(Dtype dtype, const void* data, const TensorShape& shape, int box_tokens) {
  const Result<const DriverApi*> api = driver_api();
  if (!api.ok()) return api.error();
  CUtensorMap map{};
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(shape.dim), static_cast<cuuint64_t>(shape.tokens),
                              static_cast<cuuint64_t>(shape.heads), static_cast<cuuint64_t>(shape.batch)};
  // The stride of a single one is free, but TMA wants a good one.
  const auto bytes = [](std::int64_t count, std::int64_t stride) {
    return static_cast<cuuint64_t>(count > 1 ? stride * 2 : 16);
  };
  const cuuint64_t strides[] = {bytes(shape.tokens, shape.token_stride), bytes(shape.heads, shape.head_stride),
                                bytes(shape.batch, shape.batch_stride)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult status = (*api)->tensor_map_encode_tiled(
      &map, dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    return driver_error(
        status, fmt::format("describing a {} x {} x {} x {} tensor with strides {}, {}, {} at {} for TMA", shape.batch,
                            shape.heads, shape.tokens, shape.dim, shape.batch_stride, shape.head_stride,
                            shape.token_stride, data));
  }
  return map;
}

}  // namespace mkernel
