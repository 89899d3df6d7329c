// The network between the processes of a world, as Processes names it.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/mkernel.h"
#include "net/process_endpoint.h"
#include "world/launch.h"

namespace mkernel {

// What Processes::network may be.
const std::vector<std::string_view>& network_names();
// Why this build or this machine cannot use it; empty when it can.
std::string network_obstacle(std::string_view name);

// Where this process is among the world's.
struct NetworkPlace {
  std::int32_t rank = 0;
  std::int32_t size = 1;
  int local_index = 0;  // among the processes of this host, by rank
  int local_count = 1;
  std::vector<std::string> local_gpus;  // of the processes of this host: PCI address, or empty; none: no GPUs
  std::string local_address;            // IP; the one that leads to rank 0
  std::vector<std::int32_t> peers;      // ranks that it writes to, and that write to it
};

// Errors: kBadArgument for a name or an environment variable (MKERNEL_IB_..., NCCL_IB_...) that means nothing,
// kUnsupported when this machine or this build lacks it, kIo when it does not start.
Result<std::unique_ptr<ProcessEndpoint>> open_network(const Processes& processes, const NetworkPlace& place,
                                                      const Environment& environment);

}  // namespace mkernel
