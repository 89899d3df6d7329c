#include "net/libfabric/library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <type_traits>

namespace mkernel {
namespace {

constexpr const char* kFile = "libfabric.so.1";

FabricLibrary load() {
  FabricLibrary library;
  // The PSM providers of libfabric otherwise take the process's fatal signals and write files into its folder.
  setenv("IPATH_NO_BACKTRACE", "1", 0);
  setenv("HFI_NO_BACKTRACE", "1", 0);
  void* handle = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.obstacle = fmt::format("libfabric cannot be loaded ({}): install libfabric1 (Debian)", dlerror());
    return library;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) library.obstacle = fmt::format("{} has no function {}", kFile, name);
  };
  find(library.getinfo, "fi_getinfo");
  find(library.freeinfo, "fi_freeinfo");
  find(library.dupinfo, "fi_dupinfo");
  find(library.fabric, "fi_fabric");
  find(library.strerror, "fi_strerror");
  return library;
}

}  // namespace

const FabricLibrary& fabric_library() {
  static const FabricLibrary library = load();
  return library;
}

}  // namespace mkernel
