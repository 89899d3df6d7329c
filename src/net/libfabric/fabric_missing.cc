// In a build without libfabric there is no network between hosts, and everything else works.
#include "net/libfabric/fabric_endpoint.h"

namespace mkernel {

std::string fabric_obstacle() {
  return "this build has no libfabric: install libfabric-dev (Debian) and configure again";
}

std::vector<std::string> fabric_providers() { return {}; }

Result<std::unique_ptr<ProcessEndpoint>> create_fabric_endpoint(std::int32_t, std::int32_t, const FabricOptions&) {
  return Error{ErrorKind::kUnsupported, fabric_obstacle()};
}

}  // namespace mkernel
