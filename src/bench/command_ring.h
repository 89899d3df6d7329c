// The command ring, the proxy and the wire alone: from a kernel to the network and back.
#pragma once
#include <string>
#include <vector>

#include "bench/machine.h"
#include "mkernel/result.h"

namespace mkernel::bench {

struct RingOptions {
  int rounds = 5;
};

// Of one kind of wire, by round. Puts are empty, between two ranks that share a GPU, over a link without latency.
struct RingResult {
  std::string wire;                    // "copy kernel", "copy engine"
  std::vector<double> round_trip_us;   // median of 1,000: push a record, see its stamp
  std::vector<double> p99_us;          // their 99th percentile
  std::vector<double> records_per_us;  // 512 threads push 100,000 records to one proxy and wait for all stamps
};

// Errors: kUnsupported, naming what is missing; kTimeout.
Result<std::vector<RingResult>> measure_command_ring(const RingOptions& options, Machine& machine);

}  // namespace mkernel::bench
