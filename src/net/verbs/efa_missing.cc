// In a build without EFA's header there are reliable connections only.
#include "net/verbs/queue_pairs.h"

namespace mkernel {

std::string efa_device_obstacle(const VerbsDevice&) {
  return "this build has no EFA: install libibverbs-dev (Debian) and configure again";
}

Result<std::unique_ptr<QueuePairs>> create_efa_queue_pairs(const QueuePairsConfig& config) {
  return Error{ErrorKind::kUnsupported, efa_device_obstacle(*config.device)};
}

}  // namespace mkernel
