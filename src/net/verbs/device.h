// An RDMA device that is open: which port, which GID, and what it can do.
#pragma once
#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>

#include "mkernel/result.h"
#include "net/verbs/library.h"
#include "net/verbs/nic_choice.h"

namespace mkernel {

// Owns an object of libibverbs; `destroy` is the function of the library that ends it.
template <class T>
struct DestroyVerbs {
  int (*destroy)(T*) = nullptr;
  void operator()(T* object) const { destroy(object); }
};
template <class T>
using VerbsObject = std::unique_ptr<T, DestroyVerbs<T>>;

struct VerbsDevice {
  const VerbsLibrary* library = nullptr;
  Nic nic;
  // Closed from the bottom up.
  VerbsObject<ibv_context> context{nullptr};
  VerbsObject<ibv_pd> domain{nullptr};
  ibv_device_attr attributes = {};
  ibv_port_attr port = {};
  int gid_index = 0;
  ibv_gid gid = {};

  // A sentence that begins with the port's name and ends with what errno says.
  Error error(const char* step, int code) const;
};

// Opens a port. `gid_index` -1: chosen. Errors: kUnsupported when the device or a GID is not there, kIo when it does
// not open.
Result<VerbsDevice> open_device(const VerbsLibrary& library, const std::string& sysfs, const Nic& nic, int gid_index);

}  // namespace mkernel
