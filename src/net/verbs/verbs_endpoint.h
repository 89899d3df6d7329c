// A network between processes over libibverbs. Two ways to say that a put has come:
//
//   ordered   on reliable connections, which write in order. With `notify` the payload's last write brings an
//             immediate, and the receiving endpoint writes the stamp: one write. Without, the NIC writes the stamp
//             (4 inline bytes) after the payload on the same queue pair, and nobody need look: two writes.
//   counted   nothing is assumed about order: a put is cut into pieces, each of which brings an immediate, and the
//             receiving proxy stamps when it has counted all. This is how EFA's SRD is used; over reliable connections
//             it is the same code, with the order of pieces and arrivals shuffled on request.
//
// docs/wire-protocol.md says why a stamp is visible only after all bytes it vouches for.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mkernel/result.h"
#include "net/process_endpoint.h"
#include "net/verbs/nic_choice.h"

namespace mkernel {

struct VerbsLibrary;

enum class VerbsMode : std::uint8_t {
  kOrdered,
  kCounted,
  kEfa,  // counted, over SRD
};

struct VerbsOptions {
  VerbsMode mode = VerbsMode::kOrdered;
  Nic nic;             // the port to use; choose_nic() finds one
  int gid_index = -1;  // -1: chosen, RoCE v2 before v1
  int traffic_class = 0;
  int service_level = 0;
  std::vector<std::int32_t> peers;  // ranks that are written to or write; empty: all others
  int lanes = 2;                    // queue pairs per peer; a stamp always goes over the same one
  int pieces = 1;                   // counted: per put, each with an arrival of its own
  bool notify = true;               // ordered: receivers poll, are told of puts and write stamps; else the NIC does
  std::uint64_t shuffle_seed = 0;   // counted: puts pieces and arrivals out of order; 0: leaves them
  int queue_depth = 256;            // puts in flight; beyond it the endpoint is full
  int send_depth = 256;             // writes in flight per queue pair
  int receive_depth = 4096;         // immediates that may come before anybody looks
  int signal_every = 16;            // ordered: writes per completion, at most
  int timeout = 17;                 // 4.096 us * 2^timeout per retry of the hardware
  int retry_count = 6;
  Nanos max_post_failures_ns = 10'000'000'000;  // how long posting may fail for the moment
  const VerbsLibrary* library = nullptr;        // null: libibverbs
  std::string sysfs = "/sys";
};

// Errors: kUnsupported when this build or this machine lacks the device; kIo when it does not start.
Result<std::unique_ptr<ProcessEndpoint>> create_verbs_endpoint(std::int32_t rank, std::int32_t world,
                                                               const VerbsOptions& options);

// Why there is no port that can be used, or an empty text.
std::string verbs_obstacle();
// Why there is no EFA that can be used, or an empty text.
std::string efa_obstacle();

}  // namespace mkernel
