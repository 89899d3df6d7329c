// A network between processes as one of its ranks sees it: an endpoint, whom it reaches, and what may be written to.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/result.h"
#include "net/transport.h"

namespace mkernel {

// What a peer must know to write into a heap.
struct RemoteHeap {
  std::uint64_t key = 0;
  std::uint64_t address = 0;
  std::vector<RemoteHeap> rails = {};  // of an endpoint of several rails: one each, and key and address mean nothing
};

// Memory that becomes a heap.
struct HeapMemory {
  void* data = nullptr;
  std::int64_t bytes = 0;
  bool gpu = false;                 // of a GPU; else the host's
  int dmabuf_file = -1;             // gpu: a dma-buf that holds it, where the driver makes one
  std::uint64_t dmabuf_offset = 0;  // of `data` in it
  std::string no_dmabuf = {};       // gpu: why there is none, where somebody knows
};

// post(), flush(), poll() and next_event() are for one thread at a time, as Endpoint says; add_heap(), set_remote() and
// remove_heap() may run beside them.
class ProcessEndpoint : public Endpoint {
 public:
  // Bytes that peers give to their connect().
  virtual const std::string& address() const = 0;
  virtual Status connect(std::int32_t peer, std::string_view address) = 0;

  // Makes operator `op`'s heap a source of puts and open to peers' writes, which may begin once they know the answer.
  // All ranks' heaps have the same layout and begin with the stamps, 4 bytes each (HeapLayout). `start_epoch` is any
  // epoch fewer than 8 before or after the first one that will be run.
  virtual Result<RemoteHeap> add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) = 0;
  // Before the first put of `op` to `peer`.
  virtual void set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) = 0;
  // All puts from and to it have arrived, or nobody polls any more.
  virtual void remove_heap(std::uint32_t op) = 0;

  // What it is, for people: "libfabric's tcp".
  virtual std::string name() const = 0;
  // Bytes of puts that were accepted, by operator.
  virtual std::int64_t bytes_sent(std::uint32_t op) const = 0;
  // What the network said when a put last failed; empty: none has. For the thread that polls.
  virtual std::string last_error() const = 0;
};

}  // namespace mkernel
