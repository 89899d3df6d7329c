// A network between processes over libfabric: one reliable datagram endpoint per rank, remote writes with immediates.
//
// A put becomes `pieces` remote writes, each of which carries 64 bits of completion data that name operator, epoch,
// flag and sender. The order of delivery is left open (libfabric promises none between writes that we do not ask for):
// the data of one write comes with its own completion only, so the receiving proxy counts a put's pieces and stamps
// when all are there (docs/wire-protocol.md).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mkernel/result.h"
#include "net/process_endpoint.h"

namespace mkernel {

struct FabricOptions {
  std::string provider = "tcp";
  std::string local_address;  // IP address of the interface to use; empty: the provider's choice
  int queue_depth = 256;      // puts in flight; beyond it the endpoint is full
  int pieces = 1;             // per put, each with an arrival of its own
};

// Nothing is connected before the first put. Errors: kUnsupported when this build or this machine lacks the provider;
// kIo when it does not start.
Result<std::unique_ptr<ProcessEndpoint>> create_fabric_endpoint(std::int32_t rank, std::int32_t world,
                                                                const FabricOptions& options);

// The providers that mKernel knows and this machine has for its puts; empty in a build without libfabric.
std::vector<std::string> fabric_providers();
// Why there are none, or an empty text.
std::string fabric_obstacle();

}  // namespace mkernel
