// Memory that a NIC may read and write.
#pragma once
#include <infiniband/verbs.h>

#include <cstdint>
#include <string>

#include "mkernel/result.h"
#include "net/process_endpoint.h"
#include "net/verbs/device.h"

namespace mkernel {

// How a NIC reaches memory.
enum class MemoryWay : std::uint8_t {
  kHost,     // pinned pages
  kDmabuf,   // a GPU's, through a dma-buf of its driver
  kPeermem,  // a GPU's, through a kernel module that knows its addresses (nvidia_peermem)
};

struct Registration {
  VerbsObject<ibv_mr> region{nullptr};
  MemoryWay way = MemoryWay::kHost;
  std::string why;  // kPeermem: why not by dma-buf
};

// Registers memory for local reads and remote writes, without relaxed ordering: stamps lie in it. A GPU's memory by
// dma-buf where there is one, else by its address. Errors: kUnsupported when a GPU's memory can be reached neither way
// (the caller then takes pinned host memory for the heap), kIo for the host's.
Result<Registration> register_memory(const VerbsDevice& device, const HeapMemory& memory);

}  // namespace mkernel
