#include "net/verbs/device.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace mkernel {

Error VerbsDevice::error(const char* step, int code) const {
  std::string remedy;
  if (code == EPERM || code == EACCES) remedy = " (may this user open /dev/infiniband?)";
  if (code == ENOMEM) remedy = " (does `ulimit -l` let this process lock memory?)";
  return {ErrorKind::kIo, fmt::format("{}: {} says {}{}", nic.name(), step, std::strerror(code), remedy)};
}

Result<VerbsDevice> open_device(const VerbsLibrary& library, const std::string& sysfs, const Nic& nic, int gid_index) {
  VerbsDevice device;
  device.library = &library;
  device.nic = nic;
  int count = 0;
  ibv_device** list = library.get_device_list(&count);
  if (list == nullptr) return device.error("ibv_get_device_list", errno);
  ibv_context* context = nullptr;
  bool found = false;
  int code = 0;
  for (int i = 0; i < count && !found; ++i) {
    found = nic.device == library.get_device_name(list[i]);
    if (!found) continue;
    context = library.open_device(list[i]);
    code = errno;
  }
  library.free_device_list(list);
  if (!found) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("libibverbs does not know the device {}: is its driver library installed "
                             "(ibverbs-providers), and may this user open /dev/infiniband?",
                             nic.device)};
  }
  if (context == nullptr) return device.error("ibv_open_device", code);
  device.context = {context, {library.close_device}};
  ibv_pd* domain = library.alloc_pd(context);
  if (domain == nullptr) return device.error("ibv_alloc_pd", errno);
  device.domain = {domain, {library.dealloc_pd}};
  if ((code = library.query_device(context, &device.attributes)) != 0) return device.error("ibv_query_device", code);
  const auto port = static_cast<std::uint8_t>(nic.port);
  if ((code = library.query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&device.port))) != 0) {
    return device.error("ibv_query_port", code);
  }
  if (device.port.state != IBV_PORT_ACTIVE) {
    return Error{ErrorKind::kUnsupported, fmt::format("{} is not active: is its link up?", nic.name())};
  }
  if (gid_index < 0 && device.port.link_layer == IBV_LINK_LAYER_ETHERNET) {
    gid_index = choose_gid(read_gids(sysfs, nic));
    if (gid_index < 0) {
      return Error{ErrorKind::kUnsupported,
                   fmt::format("{} has no GID: give its network interface an IP address", nic.name())};
    }
  }
  device.gid_index = gid_index < 0 ? 0 : gid_index;
  // Tables have holes, and the function may then succeed with zeros.
  code = library.query_gid(context, port, device.gid_index, &device.gid);
  const ibv_gid none = {};
  if (code != 0 || std::memcmp(&device.gid, &none, sizeof none) == 0) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("{} has no GID with index {}: MKERNEL_IB_GID_INDEX and NCCL_IB_GID_INDEX name one",
                             nic.name(), device.gid_index)};
  }
  return device;
}

}  // namespace mkernel
