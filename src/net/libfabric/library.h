// libfabric, loaded when it is first asked for: its providers' libraries take 0.2 s to start (measured with Debian
// 12's, 2026-12-01), which a program that needs no network should not pay.
#pragma once
#include <rdma/fabric.h>

#include <string>

namespace mkernel {

// The functions that libfabric exports and we call; all others are inline and go through the objects.
struct FabricLibrary {
  decltype(&fi_getinfo) getinfo = nullptr;
  decltype(&fi_freeinfo) freeinfo = nullptr;
  decltype(&fi_dupinfo) dupinfo = nullptr;
  decltype(&fi_fabric) fabric = nullptr;
  decltype(&fi_strerror) strerror = nullptr;
  std::string obstacle;  // why the functions are not there; empty when they are
};

// The same for the whole process, once loaded.
const FabricLibrary& fabric_library();

}  // namespace mkernel
