// Runs plans on GPUs: one persistent kernel per rank and call. All ranks are in this process, or one of them is. No
// CUDA header is needed to use it; in a build without CUDA create() says so.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/owned_file.h"
#include "exec/arguments.h"
#include "exec/cuda/device_task.h"
#include "exec/cuda/launch_parts.h"
#include "exec/host/failure.h"
#include "mkernel/mkernel.h"
#include "mkernel/result.h"
#include "net/local/local_transport.h"
#include "net/process_endpoint.h"
#include "plan/plan.h"

namespace mkernel {

struct CudaExecutorOptions {
  Topology topo;
  int sms = 0;               // per rank; 0: as many as there are
  LinkModel link;            // between nodes
  bool copy_engine = false;  // the network's bytes are moved by the copy engine instead of spare SMs
  int ring_depth = 256;
  double deadline_s = 600;
  double warn_s = 30;
  std::function<void(const std::string&)> on_warning;
  // Where the other ranks run in other processes: ours, our place among the processes of this host, and whom the first
  // failure is told.
  std::int32_t own_rank = -1;
  int local_index = 0;
  ProcessEndpoint* endpoint = nullptr;  // between nodes
  std::function<void(const Error&)> on_failure;
};

// Gives the node's other ranks the file descriptor of our heap and returns theirs, by GPU; `made` is an error where
// there is no heap to give. All of the node's processes call it.
using ShareHeap = std::function<Result<std::vector<SharedFile>>(const Status& made, int file, std::int64_t bytes)>;

struct CudaOperatorConfig {
  std::shared_ptr<const PlanSource> source;
  Partition partition;            // all zero: chosen
  bool any_layout = false;        // takes memory for copies of A and B, so that every stride and address is accepted
  std::uint64_t start_epoch = 0;  // for tests
  std::optional<int> workspace_fill;
  ShareHeap share;  // only where own_rank is given, and there are several GPUs per node
};

// One operator on all ranks. Owned by the executor.
class CudaOperator {
 public:
  virtual ~CudaOperator() = default;
  virtual std::uint32_t number() const = 0;
  virtual const Plan& plan() const = 0;
  virtual Partition partition() const = 0;
  virtual std::int64_t workspace_bytes() const = 0;         // per rank
  virtual std::int64_t tasks(std::int32_t rank) const = 0;  // per call, network writes left out
};

// Thread-safe.
class CudaExecutor {
 public:
  // Errors: kUnsupported (no GPU, no CUDA in this build, ...), kOutOfMemory, kBadArgument (more SMs than there are).
  static Result<std::unique_ptr<CudaExecutor>> create(const CudaExecutorOptions& options);
  // All operators have been removed.
  virtual ~CudaExecutor() = default;

  virtual int sms() const = 0;  // per rank of this process
  // How many operators there have been: the number of the next.
  virtual std::uint32_t next_operator() = 0;
  virtual Result<CudaOperator*> add_operator(const CudaOperatorConfig& config) = 0;
  // Waits for its calls.
  virtual void remove_operator(CudaOperator* op) = 0;

  // What launch() would refuse of a rank's matrices.
  virtual Status check(CudaOperator* op, std::int32_t rank, const Arguments& arguments) = 0;
  // One rank's part of a call, as matrices or, of ring_attention, tensors; on `stream` (a cudaStream_t of the rank's
  // GPU; null: the rank's own stream). `parts` is a mask of launch_parts.h.
  virtual Status launch(CudaOperator* op, std::int32_t rank, const Arguments& arguments, void* stream,
                        std::uint32_t parts) = 0;
  // Raises the signals of all compute tasks, as if something else had computed them. For comparisons.
  virtual Status launch_signals(CudaOperator* op, std::int32_t rank, const Arguments& arguments, void* stream) = 0;
  // All launches of `op` on `rank` are complete. After a failure: the kernels have left.
  virtual Status wait(CudaOperator* op, std::int32_t rank) = 0;

  // When things happened in the last complete call of `op` on `rank`. Nothing is under way.
  virtual Result<DeviceTimes> times(CudaOperator* op, std::int32_t rank) = 0;

  // The last calls of `rank`, one line each; also after a failure, and within 1 s even if a kernel hangs. Of operators
  // that have been removed nothing is known.
  virtual std::string flight_record(std::int32_t rank) = 0;

  virtual std::int64_t network_bytes(const CudaOperator* op) const = 0;  // posted so far, over all ranks here
  // What stands for the operator's heap in the network between processes, to be opened to the others.
  virtual HeapMemory network_heap(const CudaOperator* op) const = 0;
  virtual void fail(Error error) = 0;
  virtual Failure& failure() = 0;

  // Memory on a rank's GPU, for callers without CUDA headers. 256-byte aligned.
  virtual Result<void*> allocate(std::int32_t rank, std::int64_t bytes) = 0;
  virtual void release(std::int32_t rank, void* data) = 0;
  virtual Status copy(std::int32_t rank, void* dst, const void* src, std::int64_t bytes) = 0;  // either may be host
  virtual std::int64_t free_memory() const = 0;  // of the fullest GPU, divided by its ranks
  virtual void* stream(std::int32_t rank) const = 0;
  virtual Result<void*> new_stream(std::int32_t rank, bool high_priority) = 0;
  virtual void set_link(double bytes_per_ns, Nanos latency_ns) = 0;
};

}  // namespace mkernel
