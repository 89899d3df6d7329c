// The wire: moves the bytes of network writes between heaps on GPUs, and raises their stamps.
//
// It knows no link and no time. Every source rank has a queue of copies and one of stamps, each worked off in order; a
// stamp waits for the copies that it names and for nothing else, so that a copy may begin long before its stamp is due
// and later copies do not hold it up.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "exec/cuda/cuda_network.h"
#include "exec/cuda/virtual_gpu.h"
#include "mkernel/result.h"

namespace mkernel {

// The first `count` copies of `rank`, modulo 2^32: what a stamp waits for.
struct CopyMark {
  std::int32_t rank = 0;
  std::uint32_t count = 0;
};

// Functions that name a rank are for the thread of that rank's proxy only. They allocate nothing, take no lock unless
// the wire has been at rest, and wait only where there is no room.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual WireKind kind() const = 0;

  // How many more copies or stamps of `rank` can be queued without waiting.
  virtual std::uint32_t copy_room(std::int32_t rank) = 0;
  virtual std::uint32_t stamp_room(std::int32_t rank) = 0;

  // Queues a copy of `bytes` > 0 at any addresses. It sees what this thread has acquired.
  virtual CopyMark copy(std::int32_t rank, std::byte* dst, const std::byte* src, std::int64_t bytes) = 0;
  // A mark that has been reached, for stamps that vouch for no bytes.
  virtual CopyMark reached(std::int32_t rank) = 0;
  // Queues the write of `value` to `flag`, with release order at system scope, after the copies of `after`.
  virtual void stamp(std::int32_t rank, std::uint32_t* flag, std::uint32_t value, CopyMark after) = 0;

  // The rank's thread has had nothing to do for a while: what is idle may leave the GPU. It comes back by itself when
  // something is queued, about 10 us later, or already at wake().
  virtual void rest(std::int32_t) {}
  virtual void wake(std::int32_t) {}

  // Everything that was queued is done.
  virtual bool idle(std::int32_t rank) = 0;
  // Everything stops at once, whatever is queued; may be called from any thread.
  virtual void abort() = 0;
  // Why it does not work any more: what is queued is thrown away. From any thread.
  virtual std::optional<Error> failure() const = 0;
};

// For kCopyKernel and kCopyEngine. `cross_rank`: stamps may wait for copies of other ranks (networks without order).
Result<std::unique_ptr<Wire>> create_kernel_wire(VirtualGpus& gpus, const Topology& topo, bool cross_rank);
Result<std::unique_ptr<Wire>> create_engine_wire(VirtualGpus& gpus, const Topology& topo);

}  // namespace mkernel
