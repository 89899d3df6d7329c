// libibverbs, loaded when it is first asked for, so that a program runs where it is missing.
#pragma once
#include <infiniband/verbs.h>

#include <string>

namespace mkernel {

// The functions that libibverbs exports and we call. Posting and polling are inline in verbs.h and go through the
// objects, whatever made them: tests put a device of their own behind this table.
struct VerbsLibrary {
  decltype(&ibv_get_device_list) get_device_list = nullptr;
  decltype(&ibv_free_device_list) free_device_list = nullptr;
  decltype(&ibv_get_device_name) get_device_name = nullptr;
  decltype(&ibv_open_device) open_device = nullptr;
  decltype(&ibv_close_device) close_device = nullptr;
  decltype(&ibv_query_device) query_device = nullptr;
  // Takes an older, shorter structure, which ibv_port_attr begins with.
  int (*query_port)(ibv_context* context, std::uint8_t port, _compat_ibv_port_attr* attributes) = nullptr;
  decltype(&ibv_query_gid) query_gid = nullptr;
  decltype(&ibv_alloc_pd) alloc_pd = nullptr;
  decltype(&ibv_dealloc_pd) dealloc_pd = nullptr;
  ibv_mr* (*reg_mr)(ibv_pd* domain, void* data, std::size_t bytes, int access) = nullptr;
  // Null in libraries before rdma-core 34.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t address, int file,
                           int access) = nullptr;
  decltype(&ibv_dereg_mr) dereg_mr = nullptr;
  decltype(&ibv_create_cq) create_cq = nullptr;
  decltype(&ibv_destroy_cq) destroy_cq = nullptr;
  decltype(&ibv_create_srq) create_srq = nullptr;
  decltype(&ibv_destroy_srq) destroy_srq = nullptr;
  decltype(&ibv_create_qp) create_qp = nullptr;
  decltype(&ibv_modify_qp) modify_qp = nullptr;
  decltype(&ibv_destroy_qp) destroy_qp = nullptr;
  decltype(&ibv_create_ah) create_ah = nullptr;
  decltype(&ibv_destroy_ah) destroy_ah = nullptr;
  decltype(&ibv_qp_to_qp_ex) qp_to_qp_ex = nullptr;  // null in libraries before rdma-core 24; only EFA needs it
  decltype(&ibv_wc_status_str) wc_status_str = nullptr;
  std::string obstacle;  // why the functions are not there; empty when they are
};

// The same for the whole process, once loaded.
const VerbsLibrary& verbs_library();

}  // namespace mkernel
