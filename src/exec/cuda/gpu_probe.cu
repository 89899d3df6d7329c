#include "exec/cuda/gpu_probe.h"

#include <cuda_runtime.h>

#include <utility>

#include "base/owned_file.h"
#include "exec/cuda/device_heap.h"
#include "exec/cuda/driver.h"

namespace mkernel {
namespace {

class Sample final : public GpuSample {
 public:
  explicit Sample(DeviceHeap heap) : heap_(std::move(heap)) {
    memory_.data = heap_.data();
    memory_.bytes = heap_.bytes();
    memory_.gpu = true;
    Result<OwnedFile> file = heap_.dmabuf();
    if (!file.ok()) {
      memory_.no_dmabuf = file.error().message;
      return;
    }
    file_ = std::move(file).value();
    memory_.dmabuf_file = file_.fd();
  }
  HeapMemory memory() const override { return memory_; }

 private:
  DeviceHeap heap_;
  OwnedFile file_;
  HeapMemory memory_;
};

}  // namespace

std::vector<std::string> gpu_bus_ids() {
  std::vector<std::string> addresses;
  int count = 0;
  if (!driver_api().ok() || cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int device = 0; device < count; ++device) {
    char text[32] = "";
    if (cudaDeviceGetPCIBusId(text, sizeof text, device) != cudaSuccess) text[0] = 0;
    addresses.emplace_back(text);
  }
  (void)cudaGetLastError();
  return addresses;
}

Result<std::unique_ptr<GpuSample>> create_gpu_sample(int device) {
  Result<DeviceHeap> heap = DeviceHeap::create(device, 1 << 16, {});
  if (!heap.ok()) return heap.error();
  return std::unique_ptr<GpuSample>(std::make_unique<Sample>(std::move(heap).value()));
}

}  // namespace mkernel
