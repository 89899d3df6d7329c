// The network behind one GPU rank whose peers are other processes: any ProcessEndpoint, through pinned host memory.
//
// The heap has a mirror in host memory, which is what the network reads and writes. A put's bytes are copied from the
// GPU to the mirror before it is posted; when one has arrived, its bytes are copied from the mirror to the GPU, and
// then its stamp. Copy engines do both beside the kernel, so no SM is used.
#pragma once
#include <functional>
#include <memory>

#include "exec/cuda/device_network.h"
#include "exec/cuda/virtual_gpu.h"

namespace mkernel {

struct StagedNetworkOptions {
  Topology topo;
  std::int32_t rank = 0;
  ProcessEndpoint* endpoint = nullptr;  // tells of arrivals; this network's thread is its only user
  int ring_depth = 256;
  Nanos max_post_failures_ns = 60'000'000'000;
  std::function<void(Error)> on_failure;  // called from the network's thread
};

// Errors: kOutOfMemory, kUnsupported.
Result<std::unique_ptr<DeviceNetwork>> create_staged_network(VirtualGpus& gpus, const StagedNetworkOptions& options);

}  // namespace mkernel
