// What an executor of GPU ranks asks of the network behind them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "exec/cuda/device_ring.h"
#include "mkernel/result.h"
#include "net/process_endpoint.h"
#include "plan/heap_layout.h"
#include "plan/plan.h"

namespace mkernel {

class DeviceNetwork {
 public:
  // Stops its threads. No kernel that uses a ring is running any more.
  virtual ~DeviceNetwork() = default;

  // `heaps[rank]` are device addresses, null for ranks of other processes; they and `source` stay valid until
  // remove_operator(). Errors: kOutOfMemory.
  virtual Status add_operator(std::uint32_t number, std::shared_ptr<const PlanSource> source, const HeapLayout& layout,
                              std::uint64_t start_epoch, std::vector<std::byte*> heaps) = 0;
  // All its calls are complete, or the world has failed. When it returns, nothing touches the heaps any more.
  virtual void remove_operator(std::uint32_t number) = 0;
  // What stands for the operator's heap where other processes write to it; empty in a network of one process.
  virtual HeapMemory open_heap(std::uint32_t number) = 0;
  // A call is about to be launched: makes ready what has been idle for long. Else the first records find the network at
  // rest and start it, which takes some 10 us, and, should another thread be inside a call that waits for the whole
  // GPU, as cudaFree does, may have to wait for that.
  virtual void wake() = 0;
  // A table in GPU memory of `rank`, by destination node; the entry of the own node is empty.
  virtual const DeviceRing* rings(std::int32_t rank) const = 0;
  // Bytes that this process's ranks have posted for operator `number`, which is there.
  virtual std::int64_t operator_bytes(std::uint32_t number) const = 0;
  // After a failure: nothing is posted, copied or stamped any more when it returns. Not from a callback.
  virtual void drop() = 0;
};

}  // namespace mkernel
