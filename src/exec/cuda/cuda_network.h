// The network behind GPU ranks of one process: command rings in pinned memory, one proxy per rank, the in-process
// transport with its link model, and a wire that moves the bytes on the GPU.
//
// The link model says when a write arrives; the wire copies its bytes when it is posted, on SMs that no rank owns (or
// with the copy engine), and raises the stamp when it is due. So a stamp is never early and never before its bytes.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "exec/cuda/device_network.h"
#include "exec/cuda/virtual_gpu.h"
#include "mkernel/result.h"
#include "net/local/local_transport.h"

namespace mkernel {

enum class WireKind : std::uint8_t {
  kAuto,        // kCopyKernel where there are spare SMs, else kCopyEngine
  kCopyKernel,  // a persistent kernel on spare SMs, commanded through pinned memory
  kCopyEngine,  // cudaMemcpyAsync and cuStreamWriteValue32 per put: about 8 us of host time each
};

struct CudaNetworkOptions {
  Topology topo;
  LinkModel link;
  int ring_depth = 256;
  WireKind wire = WireKind::kAuto;
  Nanos max_post_failures_ns = 60'000'000'000;
  std::function<void(Error)> on_failure;  // called from a proxy thread, once per failing proxy
  std::function<void()> on_poll;          // called by proxy threads now and then (at least every 10 ms); must be quick
};

class CudaNetwork : public DeviceNetwork {
 public:
  // Errors: kOutOfMemory, kUnsupported.
  static Result<std::unique_ptr<CudaNetwork>> create(VirtualGpus& gpus, const CudaNetworkOptions& options);

  HeapMemory open_heap(std::uint32_t) override { return {}; }
  // Bytes that `rank` has posted so far.
  virtual std::int64_t bytes_posted(std::int32_t rank) const = 0;
  // Changes the link between calls, for benches; nothing is in flight.
  virtual void set_link(double bytes_per_ns, Nanos latency_ns) = 0;
  virtual WireKind wire() const = 0;
};

}  // namespace mkernel
