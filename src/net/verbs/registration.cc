#include "net/verbs/registration.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "net/verbs/verbs_endpoint.h"

namespace mkernel {
namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

}  // namespace

Result<Registration> register_memory(const VerbsDevice& device, const HeapMemory& memory) {
  const VerbsLibrary& library = *device.library;
  const auto bytes = static_cast<std::size_t>(memory.bytes);
  const auto made = [&](ibv_mr* region, MemoryWay way, const std::string& why = "") {
    Registration registration;
    registration.region = {region, {library.dereg_mr}};
    registration.way = way;
    registration.why = why;
    return registration;
  };
  std::string by_dmabuf = memory.no_dmabuf.empty() ? "there is no dma-buf of it" : memory.no_dmabuf;
  if (memory.gpu && memory.dmabuf_file >= 0) {
    if (library.reg_dmabuf_mr == nullptr) {
      by_dmabuf = "libibverbs is too old for dma-buf";
    } else {
      ibv_mr* region = library.reg_dmabuf_mr(device.domain.get(), memory.dmabuf_offset, bytes,
                                             reinterpret_cast<std::uint64_t>(memory.data), memory.dmabuf_file, kAccess);
      if (region != nullptr) return made(region, MemoryWay::kDmabuf);
      by_dmabuf = fmt::format("ibv_reg_dmabuf_mr says {}", std::strerror(errno));
    }
  }
  ibv_mr* region = library.reg_mr(device.domain.get(), memory.data, bytes, kAccess);
  if (region != nullptr && memory.gpu) return made(region, MemoryWay::kPeermem, by_dmabuf);
  if (region != nullptr) return made(region, MemoryWay::kHost);
  const int code = errno;
  if (!memory.gpu) {
    Error error = device.error("ibv_reg_mr", code);
    error.message = fmt::format("{} bytes of workspace cannot be registered: {}", memory.bytes, error.message);
    return error;
  }
  return Error{
      ErrorKind::kUnsupported,
      fmt::format("{} reaches the GPU's memory neither by dma-buf ({}) nor by its address (ibv_reg_mr says {}; "
                  "is nvidia_peermem loaded?)",
                  device.nic.name(), by_dmabuf, std::strerror(code))};
}

std::string gpu_memory_text(const Nic& nic, int gid_index, const HeapMemory& memory, const VerbsLibrary* library,
                            const std::string& sysfs) {
  const VerbsLibrary& used = library != nullptr ? *library : verbs_library();
  if (!used.obstacle.empty()) return "only through host memory: " + used.obstacle;
  const Result<VerbsDevice> device = open_device(used, sysfs, nic, gid_index);
  if (!device.ok()) return "only through host memory: " + device.error().message;
  const Result<Registration> registration = register_memory(*device, memory);
  if (!registration.ok()) return "only through host memory: " + registration.error().message;
  switch (registration->way) {
    case MemoryWay::kDmabuf: return fmt::format("{} reaches it by dma-buf", nic.name());
    case MemoryWay::kPeermem:
      return fmt::format("{} reaches it by its address (peermem), not by dma-buf: {}", nic.name(), registration->why);
    case MemoryWay::kHost: break;
  }
  return "it is the host's";
}

}  // namespace mkernel
