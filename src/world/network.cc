#include "world/network.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "net/libfabric/fabric_endpoint.h"
#include "net/rails_endpoint.h"
#include "net/verbs/settings.h"
#include "net/verbs/verbs_endpoint.h"

namespace mkernel {
namespace {

using Endpoints = std::vector<std::unique_ptr<ProcessEndpoint>>;

Result<std::unique_ptr<ProcessEndpoint>> open_libfabric(const Processes& processes, const NetworkPlace& place) {
  FabricOptions fabric;
  fabric.provider = processes.provider;
  fabric.local_address = processes.interface.empty() ? place.local_address : processes.interface;
  if (fabric.provider == "shm") fabric.local_address.clear();  // its addresses are no IP addresses
  return create_fabric_endpoint(place.rank, place.size, fabric);
}

Result<std::unique_ptr<ProcessEndpoint>> open_verbs(VerbsMode mode, const NetworkPlace& place,
                                                    const Environment& environment) {
  const Result<VerbsSettings> settings = verbs_settings_from(environment);
  if (!settings.ok()) return settings.error();
  // Before a port is looked for: the build or the library may be what is missing.
  const std::string obstacle = mode == VerbsMode::kEfa ? efa_obstacle() : verbs_obstacle();
  if (!obstacle.empty()) return Error{ErrorKind::kUnsupported, obstacle};
  // Host memory is near no card, so processes without GPUs only share the cards out.
  std::vector<GpuPlace> places(static_cast<std::size_t>(place.local_count));
  for (std::size_t i = 0; i < places.size() && i < place.local_gpus.size(); ++i) {
    if (!place.local_gpus[i].empty()) places[i] = find_gpu("/sys", place.local_gpus[i]);
  }
  const Result<std::vector<Nic>> nics = choose_nics(*settings, "/sys", places, place.local_index);
  if (!nics.ok()) return nics.error();
  VerbsOptions options;
  options.mode = mode;
  options.gid_index = settings->gid_index;
  options.traffic_class = settings->traffic_class;
  options.service_level = settings->service_level;
  options.peers = place.peers;
  options.lanes = settings->lanes;
  options.timeout = settings->timeout;
  options.retry_count = settings->retry_count;
  Endpoints rails;
  for (const Nic& nic : *nics) {
    options.nic = nic;
    Result<std::unique_ptr<ProcessEndpoint>> rail = create_verbs_endpoint(place.rank, place.size, options);
    if (!rail.ok()) return rail.error();
    rails.push_back(std::move(rail).value());
  }
  return create_rails_endpoint(place.size, options.queue_depth, std::move(rails));
}

}  // namespace

const std::vector<std::string_view>& network_names() {
  static const std::vector<std::string_view> names = {"libfabric", "verbs", "verbs-counted", "efa"};
  return names;
}

std::string network_obstacle(std::string_view name) {
  return name == "libfabric" ? fabric_obstacle() : name == "efa" ? efa_obstacle() : verbs_obstacle();
}

Result<std::unique_ptr<ProcessEndpoint>> open_network(const Processes& processes, const NetworkPlace& place,
                                                      const Environment& environment) {
  if (processes.network == "libfabric") return open_libfabric(processes, place);
  if (processes.network == "verbs") return open_verbs(VerbsMode::kOrdered, place, environment);
  if (processes.network == "verbs-counted") return open_verbs(VerbsMode::kCounted, place, environment);
  if (processes.network == "efa") return open_verbs(VerbsMode::kEfa, place, environment);
  return bad_argument(
      fmt::format("the network is '{}': it must be one of {}", processes.network, fmt::join(network_names(), ", ")));
}

}  // namespace mkernel
