#include "exec/cuda/device_heap.h"

#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel {
namespace {

CUmemAllocationProp allocation_on(int device, bool shareable) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return properties;
}

// `bytes`, rounded up to what can be mapped.
Result<std::int64_t> mappable(const DriverApi& api, int device, std::int64_t bytes) {
  const CUmemAllocationProp properties = allocation_on(device, false);
  std::size_t granularity = 0;
  const CUresult got =
      api.mem_get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (got != CUDA_SUCCESS) return driver_error(got, fmt::format("asking how GPU {} maps memory", device));
  const auto unit = static_cast<std::int64_t>(granularity);
  return (bytes + unit - 1) / unit * unit;
}

Error out_of_memory(int device, std::int64_t bytes) {
  const DeviceGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  (void)cudaMemGetInfo(&free, &total);
  return {ErrorKind::kOutOfMemory, fmt::format("a heap of {} bytes does not fit on GPU {}: {} of its {} bytes are free",
                                               bytes, device, free, total)};
}

// Drivers and containers that cannot share memory by file descriptor get memory that cannot be exported.
Result<CUmemGenericAllocationHandle> allocate(const DriverApi& api, int device, std::int64_t mapped) {
  CUmemGenericAllocationHandle handle = 0;
  CUresult got = CUDA_SUCCESS;
  for (const bool shareable : {true, false}) {
    const CUmemAllocationProp properties = allocation_on(device, shareable);
    got = api.mem_create(&handle, static_cast<std::size_t>(mapped), &properties, 0);
    if (got == CUDA_SUCCESS) return handle;
    if (got == CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory(device, mapped);
  }
  return driver_error(got, fmt::format("allocating {} bytes on GPU {}", mapped, device));
}

// What cuMemSetAccess is to grant: `device` and all peers, each once.
Result<std::vector<CUmemAccessDesc>> access_for(int device, std::span<const int> peers) {
  std::vector<CUmemAccessDesc> access;
  const auto grant = [&access](int to) {
    for (const CUmemAccessDesc& granted : access) {
      if (granted.location.id == to) return;
    }
    CUmemAccessDesc one{};
    one.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    one.location.id = to;
    one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access.push_back(one);
  };
  grant(device);
  for (const int peer : peers) {
    if (peer == device) continue;
    int can = 0;
    const cudaError_t status = cudaDeviceCanAccessPeer(&can, peer, device);
    if (status != cudaSuccess)
      return cuda_error(status, fmt::format("asking whether GPU {} can access GPU {}", peer, device));
    if (can == 0) {
      return Error{
          ErrorKind::kUnsupported,
          fmt::format("GPU {} cannot access the memory of GPU {}, as GPUs of a node must: use GPUs that NVLink or "
                      "one PCIe switch connects (nvidia-smi topo -p2p rw shows which), or one GPU for all ranks",
                      peer, device)};
    }
    grant(peer);
  }
  return access;
}

// In a stream of its own, so that it waits for nothing but itself: a synchronous call could wait for kernels that spin.
Status zero(int device, std::byte* data, std::int64_t bytes) {
  const DeviceGuard guard(device);
  cudaError_t status = guard.status();
  cudaStream_t stream = nullptr;
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (stream != nullptr) (void)cudaStreamDestroy(stream);
  if (status != cudaSuccess) return cuda_error(status, fmt::format("clearing {} bytes on GPU {}", bytes, device));
  return Ok{};
}

// Reserves addresses and maps `handle` there. After an error nothing is mapped, and the handle is as it was.
Result<std::byte*> map(const DriverApi& api, CUmemGenericAllocationHandle handle, std::int64_t mapped,
                       const std::vector<CUmemAccessDesc>& access) {
  const auto size = static_cast<std::size_t>(mapped);
  const std::string doing = fmt::format("mapping {} bytes of GPU {}", mapped, access.front().location.id);
  CUdeviceptr address = 0;
  CUresult got = api.mem_address_reserve(&address, size, 0, 0, 0);
  if (got != CUDA_SUCCESS) return driver_error(got, doing);
  got = api.mem_map(address, size, 0, handle, 0);
  if (got != CUDA_SUCCESS) {
    (void)api.mem_address_free(address, size);
    return driver_error(got, doing);
  }
  got = api.mem_set_access(address, size, access.data(), access.size());
  if (got != CUDA_SUCCESS) {
    (void)api.mem_unmap(address, size);
    (void)api.mem_address_free(address, size);
    return driver_error(got, doing);
  }
  return reinterpret_cast<std::byte*>(address);
}

}  // namespace

Result<DeviceHeap> DeviceHeap::create(int device, std::int64_t bytes, std::span<const int> peers) {
  MK_CHECK_OP(bytes, >=, 0);
  const Result<const DriverApi*> api = driver_api();
  if (!api) return api.error();
  const Result<std::vector<CUmemAccessDesc>> access = access_for(device, peers);
  if (!access) return access.error();
  if (bytes == 0) return DeviceHeap();
  const DeviceGuard guard(device);  // the driver's functions need a device that has been initialised
  if (guard.status() != cudaSuccess) return cuda_error(guard.status(), fmt::format("using GPU {}", device));
  const Result<std::int64_t> mapped = mappable(**api, device, bytes);
  if (!mapped) return mapped.error();
  const Result<CUmemGenericAllocationHandle> handle = allocate(**api, device, *mapped);
  if (!handle) return handle.error();

  // The heap owns what it has from here on, so every return below releases it.
  DeviceHeap heap;
  heap.handle_ = *handle;
  heap.bytes_ = bytes;
  heap.mapped_ = *mapped;
  const Result<std::byte*> data = map(**api, *handle, *mapped, *access);
  if (!data) return data.error();
  heap.data_ = *data;
  const Status cleared = zero(device, heap.data_, heap.mapped_);
  if (!cleared) return cleared.error();
  return Result<DeviceHeap>(std::move(heap));
}

Result<DeviceHeap> DeviceHeap::import_from(int fd, std::int64_t bytes, int device) {
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  };
  const Closer closer{fd};  // the imported handle holds the memory, no longer the descriptor
  MK_CHECK_OP(bytes, >, 0);
  const Result<const DriverApi*> api = driver_api();
  if (!api) return api.error();
  const Result<std::int64_t> mapped = mappable(**api, device, bytes);
  if (!mapped) return mapped.error();
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return cuda_error(guard.status(), fmt::format("using GPU {}", device));
  DeviceHeap heap;
  void* const descriptor = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  const CUresult got =
      (*api)->mem_import_from_shareable_handle(&heap.handle_, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (got != CUDA_SUCCESS) return driver_error(got, "importing the heap of another process");
  heap.bytes_ = bytes;
  heap.mapped_ = *mapped;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const Result<std::byte*> data = map(**api, heap.handle_, *mapped, {access});
  if (!data) return data.error();
  heap.data_ = *data;
  return Result<DeviceHeap>(std::move(heap));
}

DeviceHeap::DeviceHeap(DeviceHeap&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_(std::exchange(other.mapped_, 0)),
      handle_(std::exchange(other.handle_, 0)) {}

DeviceHeap& DeviceHeap::operator=(DeviceHeap&& other) noexcept {
  // The old mapping goes when `other` is destroyed.
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(handle_, other.handle_);
  return *this;
}

DeviceHeap::~DeviceHeap() {
  if (handle_ == 0 && data_ == nullptr) return;
  const Result<const DriverApi*> api = driver_api();
  if (!api) return;
  // Errors are of no use here: either the process is ending, or the context is broken and its memory gone.
  if (data_ != nullptr) {
    const auto address = reinterpret_cast<CUdeviceptr>(data_);
    (void)(*api)->mem_unmap(address, static_cast<std::size_t>(mapped_));
    (void)(*api)->mem_address_free(address, static_cast<std::size_t>(mapped_));
  }
  if (handle_ != 0) (void)(*api)->mem_release(handle_);
}

Result<int> DeviceHeap::export_fd() const {
  if (handle_ == 0) return bad_argument("an empty heap cannot be exported");
  const Result<const DriverApi*> api = driver_api();
  if (!api) return api.error();
  int fd = -1;
  const CUresult got =
      (*api)->mem_export_to_shareable_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (got != CUDA_SUCCESS) {
    Error error = driver_error(got, "exporting a heap to other processes");
    error.kind = ErrorKind::kUnsupported;
    return error;
  }
  return fd;
}

Result<OwnedFile> DeviceHeap::dmabuf() const {
  if (handle_ == 0) return bad_argument("an empty heap has no dma-buf");
  const Result<const DriverApi*> api = driver_api();
  if (!api) return api.error();
  if ((*api)->mem_get_handle_for_address_range == nullptr) {
    return Error{ErrorKind::kUnsupported, "the CUDA driver has no cuMemGetHandleForAddressRange"};
  }
  int fd = -1;
  // The whole mapping: the range must be of whole host pages, and heaps are of whole granules.
  const CUresult got = (*api)->mem_get_handle_for_address_range(&fd, reinterpret_cast<CUdeviceptr>(data_),
                                                                static_cast<std::size_t>(mapped_),
                                                                CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (got != CUDA_SUCCESS) {
    Error error = driver_error(got, "asking the driver for a dma-buf (cuMemGetHandleForAddressRange)");
    error.kind = ErrorKind::kUnsupported;
    return error;
  }
  return OwnedFile(fd);
}

}  // namespace mkernel
