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

#include "exec/cuda/device_ring.h"
#include "exec/cuda/virtual_gpu.h"
#include "mkernel/result.h"
#include "net/local/local_transport.h"
#include "plan/heap_layout.h"
#include "plan/plan.h"

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

class CudaNetwork {
 public:
  // Errors: kOutOfMemory, kUnsupported.
  static Result<std::unique_ptr<CudaNetwork>> create(VirtualGpus& gpus, const CudaNetworkOptions& options);
  // Stops wire and threads. No kernel that uses a ring is running any more.
  virtual ~CudaNetwork() = default;

  // `heaps[rank]` are device addresses; they and `source` stay valid until remove_operator().
  virtual void add_operator(std::uint32_t number, std::shared_ptr<const PlanSource> source, const HeapLayout& layout,
                            std::uint64_t start_epoch, std::vector<std::byte*> heaps) = 0;
  // All its calls are complete, or the world has failed. When it returns, nothing touches the heaps any more.
  virtual void remove_operator(std::uint32_t number) = 0;
  // A call is about to be launched: makes ready what has been idle for long. Else the first records find the wire at
  // rest and start it, which takes some 10 us, and, should another thread be inside a call that waits for the whole
  // GPU, as cudaFree does, may have to wait for that.
  virtual void wake() = 0;
  // A table in GPU memory of `rank`, by destination node; the entry of the own node is empty.
  virtual const DeviceRing* rings(std::int32_t rank) const = 0;
  // Bytes that `rank` has posted so far, and those that all ranks have posted for operator `number`, which is there.
  virtual std::int64_t bytes_posted(std::int32_t rank) const = 0;
  virtual std::int64_t operator_bytes(std::uint32_t number) const = 0;
  // After a failure: nothing is posted, copied or stamped any more when it returns. Not from on_failure or on_poll.
  virtual void drop() = 0;
  // Changes the link between calls, for benches; nothing is in flight.
  virtual void set_link(double bytes_per_ns, Nanos latency_ns) = 0;
  virtual WireKind wire() const = 0;
};

}  // namespace mkernel
