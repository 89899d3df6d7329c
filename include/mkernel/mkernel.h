// mKernel's public C++ API: create a world, create an operator on it, run it on pointers and strides.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mkernel/attention.h"
#include "mkernel/result.h"
#include "mkernel/types.h"

namespace mkernel {

// Where ranks run.
enum class Device : std::uint8_t {
  kHost,  // CPU threads stand for SMs, all ranks in this process
  kSim,   // virtual time, one thread, reproducible from a seed
  kCuda,  // one persistent kernel per rank on a Hopper GPU; with fewer GPUs than ranks several ranks share one
};

// The network between nodes, per GPU and direction.
struct Link {
  double gigabytes_per_s = 0;  // 10^9 bytes per second; 0: as fast as memory allows
  double latency_us = 0;
  bool unordered = false;  // writes may overtake each other (as on AWS EFA)
};

// How many SMs of a rank serve each role first. All zero: chosen from the plan.
struct Partition {
  int compute = 0;
  int intra = 0;
  int recv = 0;
  bool operator==(const Partition&) const = default;
};

// A world of several processes runs one rank in each; processes_from_environment() fills this in. Left alone, all ranks
// are in this process.
struct Processes {
  int rank = -1;          // of this process; -1: all ranks are in it
  int size = 1;           // processes, which must be as many as ranks
  std::string job;        // any text that these processes share and no others do
  std::string address;    // of rank 0: HOST, HOST:PORT or [IP6]:PORT; empty: all processes are on one host
  std::string interface;  // IP address to use on this host; empty: the one that leads to rank 0
  // Between nodes: "libfabric"; "verbs" (RDMA: InfiniBand and RoCE); "verbs-counted" (the same, by a protocol that
  // assumes no order); "efa" (AWS EFA, by that protocol; never run on one).
  std::string network = "libfabric";
  std::string provider = "tcp";  // of libfabric
  double start_s = 60;           // in which all processes must have come
};

// What mpirun, torchrun or srun have told this process, or MKERNEL_RANK, MKERNEL_SIZE, MKERNEL_JOB, MKERNEL_ADDRESS,
// MKERNEL_INTERFACE (or NCCL_SOCKET_IFNAME), MKERNEL_NETWORK, MKERNEL_PROVIDER and MKERNEL_START_S, which come before
// them; docs/cluster.md. Without any of them, and when they speak of one process only, all ranks are in this process.
// Errors: kBadArgument.
Result<Processes> processes_from_environment();

struct WorldOptions {
  int nodes = 1;
  int gpus = 1;  // per node
  Device device = Device::kHost;
  int sms = 0;  // SMs (threads on the host) per rank; 0: 2 on the host, 132 simulated, all there are on GPUs
  Partition partition;
  Link link;
  double deadline_s = 600;  // a wait that lasts longer fails the run
  double warn_s = 30;       // a wait that lasts longer is reported to on_warning, once per wait
  int ring_depth = 256;     // command records in flight per destination node; a power of two, 1 and up
  std::uint64_t seed = 1;   // of the simulator's schedule
  // Device::kCuda with several nodes: moves the network's bytes with the copy engine, not on SMs that no rank has.
  bool copy_engine_wire = false;
  std::function<void(const std::string&)> on_warning;
  Processes processes;  // Device::kHost and kCuda
};

// A matrix of the caller. Strides are in elements and may be any non-negative values that do not overlap for outputs;
// row-major is {.row_stride = cols, .col_stride = 1}, a transposed matrix {.row_stride = 1, .col_stride = rows}.
// `data` may be null when the matrix has no elements. On Device::kCuda it is memory of the rank's GPU.
struct Matrix {
  void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;

  static Matrix row_major(void* data, std::int64_t rows, std::int64_t cols) { return {data, rows, cols, cols, 1}; }
};

// One rank's matrices for one call; their shapes are Operator::a_shape() and so on.
struct GemmArguments {
  Matrix a;
  Matrix b;
  Matrix c;
};

// C (m, n) = A (m, k) * B (k, n) in global sizes; see docs/operators.md for how each operator divides them.
struct GemmOptions {
  Op op = Op::kGemmAllReduce;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Dtype dtype = Dtype::kBf16;
  bool fp32_partials = false;  // sums between GPUs in fp32 instead of `dtype`
  // false: communication and GEMM one after the other on all ranks, for comparison; not on Device::kCuda. In a world of
  // several processes such an operator has run(), not launch().
  bool fused = true;
  // 0: chosen from the sizes.
  int bm = 0;
  int bn = 0;
  int band = 0;
  int chunk_tiles = 0;
  int chunk_rows = 0;
  int copy_rows = 0;
  // Device::kCuda: A and B may have any strides and addresses; takes memory for copies. Without it they must be
  // row-major (B also transposed) with address and pitch multiples of 16 bytes; a row-major matrix whose width is no
  // multiple of 8 elements is copied either way. C may always lie anyhow.
  bool any_layout = false;
};

// One bar of a timeline.
struct TraceEvent {
  std::string name;
  int rank = 0;
  int track = 0;  // SM of the rank; tracks from 1000 on are links to nodes
  double begin_us = 0;
  double end_us = 0;
};

// What a run did, over all ranks.
struct RunReport {
  double time_us = 0;  // from the first launch to the last completion; virtual time on Device::kSim
  std::int64_t tasks = 0;
  std::int64_t network_bytes = 0;
  std::int64_t network_bytes_bound = 0;  // the least that the pattern allows
  std::int64_t workspace_bytes = 0;      // per rank
  Partition partition;
  std::vector<TraceEvent> trace;  // filled when asked for
};

struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  bool operator==(const MatrixShape&) const = default;
};

// All ranks of a job, in this process or in one process each. In the second case all processes create the same worlds
// and operators and destroy them in the same order, and those calls wait for each other. Movable, thread-safe. Its
// threads live on until its last operator is gone too.
class World {
 public:
  // Errors: kBadArgument, kOutOfMemory (no more memory or threads for so many ranks and SMs), kUnsupported (no GPU);
  // with several processes also kIo, kTimeout (some did not come, and who) and kPeerLost.
  static Result<World> create(const WorldOptions& options);
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  int size() const;
  // The rank that this process runs; -1 when it runs all.
  int rank() const;
  const WorldOptions& options() const;
  // Makes every rank leave every call with an error that quotes `reason`. The world cannot be used afterwards.
  void abort(const std::string& reason);
  // The last 1024 operations of a rank, one line each, oldest first; also after a failure. On Device::kCuda an
  // operation is a call of an operator that still exists, replays of graphs included. Empty on Device::kSim and for a
  // rank that does not exist or runs in another process.
  std::string flight_record(int rank) const;

  // Memory that `rank` can work on, aligned to 256 bytes: on its GPU, or on the host. Errors: kOutOfMemory,
  // kBadArgument. Whoever allocates releases, before the world is gone.
  Result<void*> allocate(int rank, std::int64_t bytes);
  void release(int rank, void* data);
  // Copies between such memory and the host's, or within either. Errors: kAborted when a kernel has crashed.
  Status copy(int rank, void* dst, const void* src, std::int64_t bytes);
  // Device::kCuda: the cudaStream_t on which launches of `rank` run when they name none; else null.
  void* stream(int rank) const;

  class Impl;
  // For mKernel's own parts and tests.
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  explicit World(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// A fused operator with its workspace on every rank. A world makes at most 63 of them over its life.
class Operator {
 public:
  // Errors: kBadArgument, kOutOfMemory.
  static Result<Operator> create(World& world, const GemmOptions& options);
  // The same, and kUnsupported on Device::kCuda for what its kernel has not got: scales that are not positive, few
  // slots.
  static Result<Operator> create(World& world, const AttentionOptions& options);
  // The same, for gradients. Errors: also kUnsupported on Device::kCuda, which has no kernel for it yet, and where
  // `fused` is false, which only `mkernel sim` can show.
  static Result<Operator> create(World& world, const AttentionBackwardOptions& options);
  Operator(Operator&&) noexcept;
  Operator& operator=(Operator&&) noexcept;
  ~Operator();

  MatrixShape a_shape(int rank) const;
  MatrixShape b_shape(int rank) const;
  MatrixShape c_shape(int rank) const;
  // ring_attention and its backward: a rank's tokens of Q and O, and of K and V; see sequence_parts() for which. Else
  // 0.
  std::int64_t q_tokens(int rank) const;
  std::int64_t kv_tokens(int rank) const;
  std::int64_t workspace_bytes() const;

  // Runs all ranks and returns when every rank's C is final. `arguments` has one entry per rank; with several processes
  // all of them call it, each with the one entry of its rank.
  // Errors: kBadArgument before anything starts; kTimeout, kPeerLost, kAborted afterwards.
  Result<RunReport> run(std::span<const GemmArguments> arguments, bool trace = false);
  Result<RunReport> run(std::span<const AttentionArguments> arguments, bool trace = false);
  Result<RunReport> run(std::span<const AttentionBackwardArguments> arguments, bool trace = false);

  // Not on Device::kSim: one rank's part of a call, to be made from any thread of the process that runs the rank. Calls
  // of a rank run in the order of launch; ranks need no barrier between them. The matrices must stay valid until wait()
  // has returned, or the operator is destroyed. On Device::kCuda `stream` is a cudaStream_t of the rank's GPU (null:
  // World::stream()), and the launch may be captured in a CUDA graph; then whoever replays it launches all ranks in the
  // same order.
  Status launch(int rank, const GemmArguments& arguments, void* stream = nullptr);
  Status launch(int rank, const AttentionArguments& arguments, void* stream = nullptr);
  Status launch(int rank, const AttentionBackwardArguments& arguments, void* stream = nullptr);
  // Waits for all launches of this rank.
  Status wait(int rank);

  class Impl;

 private:
  explicit Operator(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace mkernel
