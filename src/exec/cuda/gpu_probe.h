// What is asked of GPUs before a network is chosen. No CUDA header is needed; without CUDA there are no GPUs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "mkernel/result.h"
#include "net/process_endpoint.h"

namespace mkernel {

// PCI addresses, "0000:1b:00.0", by CUDA's number; empty where there is no GPU that can be used.
std::vector<std::string> gpu_bus_ids();

// A little of a GPU's memory, made as heaps are, with a dma-buf of it where the driver makes one.
class GpuSample {
 public:
  virtual ~GpuSample() = default;
  virtual HeapMemory memory() const = 0;
};
Result<std::unique_ptr<GpuSample>> create_gpu_sample(int device);

}  // namespace mkernel
