// The driver API without linking libcuda: its entry points are asked of the runtime, so that a program with the CUDA
// part also starts on a machine that has no driver. Only .cu files include this header.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <string_view>

#include "mkernel/result.h"

namespace mkernel {

// Entry points by name. All are there but those that say so; the green contexts are null before driver 550 (CUDA 12.4).
struct DriverApi {
  PFN_cuGetErrorName_v6000 get_error_name = nullptr;
  PFN_cuGetErrorString_v6000 get_error_string = nullptr;
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;

  PFN_cuMemGetAllocationGranularity_v10020 mem_get_allocation_granularity = nullptr;
  PFN_cuMemCreate_v10020 mem_create = nullptr;
  PFN_cuMemRelease_v10020 mem_release = nullptr;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 mem_address_free = nullptr;
  PFN_cuMemMap_v10020 mem_map = nullptr;
  PFN_cuMemUnmap_v10020 mem_unmap = nullptr;
  PFN_cuMemSetAccess_v10020 mem_set_access = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 mem_export_to_shareable_handle = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import_from_shareable_handle = nullptr;

  PFN_cuMemGetHandleForAddressRange_v11070 mem_get_handle_for_address_range = nullptr;  // may be null

  PFN_cuStreamWriteValue32_v11070 stream_write_value32 = nullptr;
  PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encode_tiled = nullptr;

  PFN_cuDeviceGetDevResource_v12040 device_get_dev_resource = nullptr;
  PFN_cuDevSmResourceSplitByCount_v12040 dev_sm_resource_split_by_count = nullptr;
  PFN_cuDevResourceGenerateDesc_v12040 dev_resource_generate_desc = nullptr;
  PFN_cuGreenCtxCreate_v12040 green_ctx_create = nullptr;
  PFN_cuGreenCtxStreamCreate_v12050 green_ctx_stream_create = nullptr;

  bool has_green_contexts() const;
};

// The table, filled at the first call. Error: kUnsupported, naming what is missing.
Result<const DriverApi*> driver_api();

// `doing` says what was tried, as in "creating a stream on GPU 0". Kinds: kOutOfMemory; kUnsupported where machine,
// driver or build lack something; kAborted for what should not happen, above all a kernel that has crashed.
Error cuda_error(cudaError_t status, std::string_view doing);
Error driver_error(CUresult status, std::string_view doing);

// Makes `device` the current one of this thread, with its primary context, and puts back the old one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }  // of making it current

 private:
  int previous_ = -1;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace mkernel
