// Which part of which GPU each rank runs on. One rank per GPU where there are enough; else several ranks share a GPU,
// each in a green context with SMs of its own (a virtual cluster).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "mkernel/result.h"
#include "plan/topology.h"

namespace mkernel {

struct VirtualGpuOptions {
  Topology topo;
  int sms = 0;        // per rank; 0: as many as there are
  int spare_sms = 0;  // SMs per GPU, at least, that no rank gets (for the wire), where ranks share a GPU
  // Where the other ranks run in other processes: ours, and our place among the processes of this host, which take the
  // GPUs in turn. Several may get the same: then the driver lets their kernels run in turn, some ms each.
  std::int32_t own_rank = -1;
  int local_index = 0;
};

// What one rank owns.
struct VirtualGpu {
  int device = 0;
  int sms = 0;                    // SMs that a kernel on `stream` can use
  bool shared = false;            // the GPU is divided: `stream` belongs to a green context
  cudaStream_t stream = nullptr;  // non-blocking; confined to the rank's SMs
};

// Owns contexts and streams. Thread-safe after creation.
class VirtualGpus {
 public:
  // Loads all kernels of this program eagerly, since a kernel that is loaded while another one spins waits for it.
  // Errors: kBadArgument (more SMs wanted than there are, and how many there are), kUnsupported (no GPU, not sm_90, a
  // driver without green contexts), naming what is missing.
  static Result<std::unique_ptr<VirtualGpus>> create(const VirtualGpuOptions& options);
  virtual ~VirtualGpus() = default;

  // Whether it runs in this process.
  virtual bool has(std::int32_t rank) const = 0;
  virtual const VirtualGpu& rank(std::int32_t rank) const = 0;  // has(rank)
  virtual const VirtualGpu& first() const = 0;                  // of this process's ranks
  // Another stream on the rank's SMs; `high_priority` for communication kernels of baselines. Destroyed with *this.
  virtual Result<cudaStream_t> new_stream(std::int32_t rank, bool high_priority) = 0;
  // A stream confined to the SMs of `device` that no rank owns; null when there is none.
  virtual cudaStream_t spare_stream(int device) const = 0;
  virtual int spare_sms(int device) const = 0;
  virtual const std::vector<int>& devices() const = 0;  // in use, ascending
};

}  // namespace mkernel
