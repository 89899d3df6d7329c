// A network between processes over libfabric: one reliable datagram endpoint per rank, remote writes with immediates.
//
// A put becomes `pieces` remote writes, each of which carries 64 bits of completion data that name operator, epoch,
// flag and sender. The order of delivery is left open (libfabric promises none between writes that we do not ask for):
// the data of one write comes with its own completion only, so the receiving proxy counts a put's pieces and stamps
// when all are there (docs/wire-protocol.md).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/result.h"
#include "net/transport.h"

namespace mkernel {

struct FabricOptions {
  std::string provider = "tcp";
  std::string local_address;  // IP address of the interface to use; empty: the provider's choice
  int queue_depth = 256;      // puts in flight; beyond it the endpoint is full
  int pieces = 1;             // per put, each with an arrival of its own
};

// What a peer must know to write into a heap.
struct RemoteHeap {
  std::uint64_t key = 0;
  std::uint64_t address = 0;
};

// post(), poll() and next_event() are for one thread at a time, as Endpoint says; add_heap(), set_remote() and
// remove_heap() may run beside them.
class FabricEndpoint : public Endpoint {
 public:
  // Errors: kUnsupported when this build or this machine lacks the provider; kIo when it does not start.
  static Result<std::unique_ptr<FabricEndpoint>> create(std::int32_t rank, std::int32_t world,
                                                        const FabricOptions& options);

  // Bytes that peers give to their connect(). Nothing is connected before the first put.
  virtual const std::string& address() const = 0;
  virtual Status connect(std::int32_t peer, std::string_view address) = 0;

  // Makes operator `op`'s heap a source of puts and open to peers' writes, which may begin once they know the answer.
  // `start_epoch` is any epoch fewer than 100 before or after the first one that will be run.
  virtual Result<RemoteHeap> add_heap(std::uint32_t op, void* data, std::int64_t bytes, std::uint64_t start_epoch) = 0;
  // Before the first put of `op` to `peer`.
  virtual void set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) = 0;
  // All puts from and to it have arrived, or nobody polls any more.
  virtual void remove_heap(std::uint32_t op) = 0;

  // Bytes of puts that were accepted, by operator.
  virtual std::int64_t bytes_sent(std::uint32_t op) const = 0;
  // What libfabric said when a put last failed; empty: none has. For the thread that polls.
  virtual std::string last_error() const = 0;
};

// The providers that mKernel knows and this machine has for its puts; empty in a build without libfabric.
std::vector<std::string> fabric_providers();
// Why there are none, or an empty text.
std::string fabric_obstacle();

}  // namespace mkernel
