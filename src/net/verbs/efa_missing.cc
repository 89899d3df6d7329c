// In a build without EFA's header there are reliable connections only.
#include "net/verbs/queue_pairs.h"

namespace mkernel {

Result<std::unique_ptr<QueuePairs>> create_efa_queue_pairs(const QueuePairsConfig&) {
  return Error{ErrorKind::kUnsupported, "this build has no EFA: install libibverbs-dev (Debian) and configure again"};
}

}  // namespace mkernel
