// The producer's side of a command ring as a kernel sees it; net/ring.h describes the protocol.
#pragma once
#include <cstdint>

namespace mkernel {

struct DeviceRing {
  std::uint64_t* slots = nullptr;       // pinned host memory, mapped into the GPU; read by the proxy
  std::uint32_t* head = nullptr;        // GPU memory: next position to reserve, one atomic for all CTAs of the rank
  std::uint32_t* tail_seen = nullptr;   // GPU memory: a tail that some producer has read, so that few read the host's
  const std::uint32_t* tail = nullptr;  // pinned host memory, mapped; written by the proxy
  std::uint32_t depth = 1;              // a power of two
  std::uint32_t depth_log2 = 0;
};

}  // namespace mkernel
