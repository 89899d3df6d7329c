#include "net/verbs/library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <type_traits>

namespace mkernel {
namespace {

constexpr const char* kFile = "libibverbs.so.1";

VerbsLibrary load() {
  VerbsLibrary library;
  void* handle = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.obstacle = fmt::format("libibverbs cannot be loaded ({}): install libibverbs1 (Debian)", dlerror());
    return library;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) library.obstacle = fmt::format("{} has no function {}", kFile, name);
  };
  find(library.get_device_list, "ibv_get_device_list");
  find(library.free_device_list, "ibv_free_device_list");
  find(library.get_device_name, "ibv_get_device_name");
  find(library.open_device, "ibv_open_device");
  find(library.close_device, "ibv_close_device");
  find(library.query_device, "ibv_query_device");
  find(library.query_port, "ibv_query_port");
  find(library.query_gid, "ibv_query_gid");
  find(library.alloc_pd, "ibv_alloc_pd");
  find(library.dealloc_pd, "ibv_dealloc_pd");
  find(library.reg_mr, "ibv_reg_mr");
  find(library.dereg_mr, "ibv_dereg_mr");
  find(library.create_cq, "ibv_create_cq");
  find(library.destroy_cq, "ibv_destroy_cq");
  find(library.create_srq, "ibv_create_srq");
  find(library.destroy_srq, "ibv_destroy_srq");
  find(library.create_qp, "ibv_create_qp");
  find(library.modify_qp, "ibv_modify_qp");
  find(library.destroy_qp, "ibv_destroy_qp");
  find(library.create_ah, "ibv_create_ah");
  find(library.destroy_ah, "ibv_destroy_ah");
  find(library.wc_status_str, "ibv_wc_status_str");
  library.qp_to_qp_ex = reinterpret_cast<decltype(library.qp_to_qp_ex)>(dlsym(handle, "ibv_qp_to_qp_ex"));
  library.reg_dmabuf_mr =
      reinterpret_cast<decltype(library.reg_dmabuf_mr)>(dlsym(handle, "ibv_reg_dmabuf_mr"));  // may be missing
  return library;
}

}  // namespace

const VerbsLibrary& verbs_library() {
  static const VerbsLibrary library = load();
  return library;
}

}  // namespace mkernel
