// In a build without libibverbs there are no RDMA devices, and everything else works.
#include "net/verbs/verbs_endpoint.h"

namespace mkernel {

Result<std::unique_ptr<ProcessEndpoint>> create_verbs_endpoint(std::int32_t, std::int32_t, const VerbsOptions&) {
  return Error{ErrorKind::kUnsupported, verbs_obstacle()};
}

std::string gpu_memory_text(const Nic&, int, const HeapMemory&, const VerbsLibrary*, const std::string&) {
  return "only through host memory: " + verbs_obstacle();
}

std::string verbs_obstacle() {
  return "this build has no libibverbs: install libibverbs-dev (Debian) and configure again";
}

std::string efa_obstacle() { return verbs_obstacle(); }

}  // namespace mkernel
