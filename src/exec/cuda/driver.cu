#include "exec/cuda/driver.h"

#include <string>

#include "exec/cuda/format.h"

namespace mkernel {
namespace {

ErrorKind kind_of(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation: return ErrorKind::kOutOfMemory;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceUninitialized:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorNotPermitted:
    case cudaErrorNotSupported: return ErrorKind::kUnsupported;
    default: return ErrorKind::kAborted;
  }
}

ErrorKind kind_of(CUresult status) {
  switch (status) {
    case CUDA_ERROR_OUT_OF_MEMORY: return ErrorKind::kOutOfMemory;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
    case CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION:
    case CUDA_ERROR_INVALID_RESOURCE_TYPE:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_NOT_SUPPORTED: return ErrorKind::kUnsupported;
    default: return ErrorKind::kAborted;
  }
}

// `version` is the CUDA version whose prototype we know: newer drivers keep answering for it.
template <class Function>
void load(Function& function, const char* name, unsigned int version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &answer);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();  // a driver that is too old: reported by driver_api(), not by the next launch
    return;
  }
  if (answer == cudaDriverEntryPointSuccess) function = reinterpret_cast<Function>(found);
}

struct LoadedApi {
  DriverApi api;
  const char* missing = nullptr;  // the first of the core functions that the driver lacks

  LoadedApi() {
    const auto need = [this](auto& function, const char* name, unsigned int version) {
      load(function, name, version);
      if (function == nullptr && missing == nullptr) missing = name;
    };
    need(api.get_error_name, "cuGetErrorName", 12000);
    need(api.get_error_string, "cuGetErrorString", 12000);
    need(api.device_get, "cuDeviceGet", 12000);
    need(api.device_get_attribute, "cuDeviceGetAttribute", 12000);
    need(api.mem_get_allocation_granularity, "cuMemGetAllocationGranularity", 12000);
    need(api.mem_create, "cuMemCreate", 12000);
    need(api.mem_release, "cuMemRelease", 12000);
    need(api.mem_address_reserve, "cuMemAddressReserve", 12000);
    need(api.mem_address_free, "cuMemAddressFree", 12000);
    need(api.mem_map, "cuMemMap", 12000);
    need(api.mem_unmap, "cuMemUnmap", 12000);
    need(api.mem_set_access, "cuMemSetAccess", 12000);
    need(api.mem_export_to_shareable_handle, "cuMemExportToShareableHandle", 12000);
    need(api.mem_import_from_shareable_handle, "cuMemImportFromShareableHandle", 12000);
    need(api.stream_write_value32, "cuStreamWriteValue32", 12000);
    need(api.tensor_map_encode_tiled, "cuTensorMapEncodeTiled", 12000);
    load(api.mem_get_handle_for_address_range, "cuMemGetHandleForAddressRange", 12000);
    load(api.device_get_dev_resource, "cuDeviceGetDevResource", 12040);
    load(api.dev_sm_resource_split_by_count, "cuDevSmResourceSplitByCount", 12040);
    load(api.dev_resource_generate_desc, "cuDevResourceGenerateDesc", 12040);
    load(api.green_ctx_create, "cuGreenCtxCreate", 12040);
    load(api.green_ctx_stream_create, "cuGreenCtxStreamCreate", 12050);
  }
};

const LoadedApi& loaded_api() {
  static const LoadedApi loaded;
  return loaded;
}

}  // namespace

bool DriverApi::has_green_contexts() const {
  return device_get_dev_resource != nullptr && dev_sm_resource_split_by_count != nullptr &&
         dev_resource_generate_desc != nullptr && green_ctx_create != nullptr && green_ctx_stream_create != nullptr;
}

Result<const DriverApi*> driver_api() {
  // Asked first, and not kept: a program may look for GPUs before they are there.
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) {
    (void)cudaGetLastError();
    return Error{ErrorKind::kUnsupported, "this machine has no CUDA driver: libcuda.so.1 cannot be loaded"};
  }
  const LoadedApi& loaded = loaded_api();
  if (loaded.missing != nullptr) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("the CUDA driver is too old: it supports CUDA {}.{} and lacks {}, CUDA 12.0 is needed",
                             version / 1000, version % 1000 / 10, loaded.missing)};
  }
  return &loaded.api;
}

Error cuda_error(cudaError_t status, std::string_view doing) {
  return {kind_of(status),
          fmt::format("{} failed: {} ({})", doing, cudaGetErrorString(status), cudaGetErrorName(status))};
}

Error driver_error(CUresult status, std::string_view doing) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (const auto api = driver_api()) {
    (*api)->get_error_name(status, &name);
    (*api)->get_error_string(status, &text);
  }
  return {kind_of(status), fmt::format("{} failed: {} ({})", doing, text != nullptr ? text : "unknown driver error",
                                       name != nullptr ? std::string(name) : std::to_string(static_cast<int>(status)))};
}

DeviceGuard::DeviceGuard(int device) {
  status_ = cudaGetDevice(&previous_);
  // Also when it is the current one already: this call is what creates its primary context.
  if (status_ == cudaSuccess) status_ = cudaSetDevice(device);
  if (previous_ == device) previous_ = -1;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

}  // namespace mkernel
