#include "exec/cuda/cuda_executor.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/check.h"
#include "exec/abort.h"
#include "exec/cuda/attention_config.h"
#include "exec/cuda/cuda_network.h"
#include "exec/cuda/cuda_operator.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/flight_text.h"
#include "exec/cuda/format.h"
#include "exec/cuda/launch.h"
#include "exec/cuda/pinned_memory.h"
#include "exec/cuda/staged_network.h"
#include "exec/cuda/support_kernels.h"
#include "exec/host/doorbell.h"
#include "exec/host/launch_log.h"
#include "exec/schedule.h"
#include "net/record.h"
#include "plan/print.h"

namespace mkernel {
namespace {

// Per SM of an H200 (2026-12-01): GEMM under power cap, and bytes read plus written by movers beside GEMMs. A mover
// reaches about 40 per ns; more is stated, since the SMs that compute move what is left at the end (GEMM + AllReduce
// with 14 and 13 of 16 SMs computing: 1052 and 1082 us).
constexpr RoleCosts kGpuCosts{5000, 45, 500};
constexpr std::int64_t kMemoryMargin = std::int64_t{512} << 20;  // left to the driver and to everybody else
constexpr std::uint32_t kMaxCudaOperators = kMaxOperators - 1;

Nanos nanos(double seconds) { return static_cast<Nanos>(std::min(seconds, 1e9) * 1e9); }

class Executor : public CudaExecutor {
 public:
  Executor(const CudaExecutorOptions& options, std::unique_ptr<VirtualGpus> gpus)
      : options_(options),
        gpus_(std::move(gpus)),
        log_(options.own_rank < 0 ? options.topo.world() : 1),
        last_(options.topo.world()) {
    for (std::int32_t rank = 0; rank < options.topo.world(); ++rank) {
      if (gpus_->has(rank)) ranks_.push_back(rank);
    }
  }
  ~Executor() override;

  Status start();

  int sms() const override { return gpus_->first().sms; }
  std::uint32_t next_operator() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return operator_count_;
  }
  Result<CudaOperator*> add_operator(const CudaOperatorConfig& config) override;
  void remove_operator(CudaOperator* op) override;
  Status check(CudaOperator* op, std::int32_t rank, const Arguments& arguments) override;
  Status launch(CudaOperator* op, std::int32_t rank, const Arguments& arguments, void* stream,
                std::uint32_t parts) override;
  Status launch_signals(CudaOperator* op, std::int32_t rank, const Arguments& arguments, void* stream) override;
  Status wait(CudaOperator* op, std::int32_t rank) override;
  Result<DeviceTimes> times(CudaOperator* op, std::int32_t rank) override;
  std::string flight_record(std::int32_t rank) override;
  std::int64_t network_bytes(const CudaOperator* op) const override;
  HeapMemory network_heap(const CudaOperator* op) const override { return network_->open_heap(op->number()); }
  void fail(Error error) override;
  Failure& failure() override { return failure_; }

  Result<void*> allocate(std::int32_t rank, std::int64_t bytes) override;
  void release(std::int32_t rank, void* data) override;
  Status copy(std::int32_t rank, void* dst, const void* src, std::int64_t bytes) override;
  std::int64_t free_memory() const override;
  void* stream(std::int32_t rank) const override { return gpus_->rank(rank).stream; }
  Result<void*> new_stream(std::int32_t rank, bool high_priority) override;
  void set_link(double bytes_per_ns, Nanos latency_ns) override {
    if (link_) link_->set_link(bytes_per_ns, latency_ns);
  }

 private:
  // The last launch of a rank, whatever the operator: launches of a rank run one after the other, also on different
  // streams, for two persistent kernels that each hold half of a rank's SMs would wait for each other.
  struct Last {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;  // owned by its operator
  };

  Status allow_shared_memory();
  Status start_flight_records();
  bool read_control(std::int32_t rank, const DeviceControl* from);
  Status start_network();
  Status check_operator(const CudaOperatorConfig& config) const;
  // Our ranks' place in the log: that of processes knows one only.
  std::int32_t log_rank(std::int32_t rank) const { return options_.own_rank < 0 ? rank : 0; }
  Status check_launch(CudaOperatorImpl& op, std::int32_t rank);
  static cudaError_t start_gemm(CudaOperatorImpl& op, const Matrix& c, const CudaOperatorImpl::Launch& launch,
                                std::uint32_t parts, const VirtualGpu& gpu, cudaStream_t stream);
  static cudaError_t start_attention(CudaOperatorImpl& op, const AttentionArguments& arguments,
                                     const CudaOperatorImpl::Launch& launch, const VirtualGpu& gpu,
                                     cudaStream_t stream);
  std::string name_of(const CudaOperatorImpl& op) const;
  void watch();
  void check_mailbox(CudaOperatorImpl& op, std::int32_t rank);
  static bool is_under_way(CudaOperatorImpl& op, std::int32_t rank);
  bool is_late(CudaOperatorImpl& op, std::int32_t rank, Nanos now);

  const CudaExecutorOptions options_;
  std::unique_ptr<VirtualGpus> gpus_;
  std::vector<std::int32_t> ranks_;         // in this process
  std::unique_ptr<DeviceNetwork> network_;  // null with one node
  CudaNetwork* link_ = nullptr;             // the same, where all ranks are in this process
  DeviceMailbox* mailboxes_ = nullptr;      // mapped host memory; operator-major, by rank
  Failure failure_;

  std::mutex create_mutex_;  // one operator is made at a time; taken before mutex_
  std::mutex mutex_;         // guards what follows
  LaunchLog log_;
  std::vector<Last> last_;
  std::array<std::unique_ptr<CudaOperatorImpl>, kMaxCudaOperators> operators_;
  std::array<std::string, kMaxCudaOperators> names_;
  std::uint32_t operator_count_ = 0;

  // For flight records: memory taken and streams made beforehand, since a hanging kernel would hold up both.
  PinnedMemory read_memory_;  // a DeviceControl
  std::vector<cudaStream_t> read_streams_;
  bool read_hangs_ = false;  // a copy into it is still under way

  std::atomic<bool> stop_{false};
  std::thread watcher_;
};

Status Executor::start() {
  if (Status status = allow_shared_memory(); !status.ok()) return status;
  const std::size_t boxes = std::size_t{kMaxCudaOperators} * options_.topo.world();
  if (const cudaError_t status = cudaHostAlloc(reinterpret_cast<void**>(&mailboxes_), boxes * sizeof(DeviceMailbox),
                                               cudaHostAllocPortable | cudaHostAllocMapped);
      status != cudaSuccess) {
    return cuda_error(status, "allocating mailboxes in host memory");
  }
  for (std::size_t i = 0; i < boxes; ++i) mailboxes_[i] = {};
  if (Status status = start_flight_records(); !status.ok()) return status;
  if (options_.topo.nodes > 1) {
    if (Status status = start_network(); !status.ok()) return status;
  }
  watcher_ = std::thread([this] { watch(); });
  return Ok{};
}

Status Executor::start_network() {
  const auto on_failure = [this](Error error) { fail(std::move(error)); };
  if (options_.own_rank >= 0) {
    StagedNetworkOptions staged;
    staged.topo = options_.topo;
    staged.rank = options_.own_rank;
    staged.endpoint = options_.endpoint;
    staged.ring_depth = options_.ring_depth;
    staged.max_post_failures_ns = nanos(options_.deadline_s);
    staged.on_failure = on_failure;
    Result<std::unique_ptr<DeviceNetwork>> made = create_staged_network(*gpus_, staged);
    if (!made.ok()) return made.error();
    network_ = std::move(*made);
    return Ok{};
  }
  CudaNetworkOptions network;
  network.topo = options_.topo;
  network.link = options_.link;
  network.ring_depth = options_.ring_depth;
  network.wire = options_.copy_engine ? WireKind::kCopyEngine : WireKind::kAuto;
  network.max_post_failures_ns = nanos(options_.deadline_s);
  network.on_failure = on_failure;
  Result<std::unique_ptr<CudaNetwork>> made = CudaNetwork::create(*gpus_, network);
  if (!made.ok()) return made.error();
  link_ = made->get();
  network_ = std::move(*made);
  return Ok{};
}

Executor::~Executor() {
  for (const auto& op : operators_) MK_CHECK(op == nullptr);
  stop_.store(true);
  if (watcher_.joinable()) watcher_.join();
  network_.reset();
  if (mailboxes_ != nullptr) cudaFreeHost(mailboxes_);
}

Status Executor::allow_shared_memory() {
  const auto allow = [](const auto& entry) -> Status {
    const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(entry.kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
    if (status == cudaSuccess) return Ok{};
    return cuda_error(status, fmt::format("reserving {} bytes of shared memory", entry.shared_bytes));
  };
  for (const int device : gpus_->devices()) {
    DeviceGuard guard(device);
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
      for (const TileShape& shape : kTileShapes) {
        for (const bool k_major : {false, true}) {
          if (Status status = allow(find_kernel(shape, dtype, k_major)); !status.ok()) return status;
        }
      }
      for (const int dim : kAttentionDims) {
        if (Status status = allow(find_attention_kernel(dim, dtype)); !status.ok()) return status;
      }
    }
  }
  return Ok{};
}

std::string Executor::name_of(const CudaOperatorImpl& op) const {
  const PlanSpec& spec = op.plan().spec();
  return fmt::format("operator {} ({} {})", op.number(), op_name(spec.op), shape_text(spec));
}

Status Executor::check_operator(const CudaOperatorConfig& config) const {
  if (failure_.happened()) return failure_.later_error();
  const PlanSpec& spec = config.source->plan().spec();
  if (spec.dtype == Dtype::kFp32) return bad_argument("dtype fp32 has no GPU kernel: bf16 and fp16 are accepted");
  if (spec.topo.gpus > kMaxGpusPerNode) {
    return bad_argument(fmt::format("{} GPUs per node are more than the {} that the kernel has room for",
                                    spec.topo.gpus, kMaxGpusPerNode));
  }
  if (spec.op == Op::kRingAttention) {
    if (Status status = validate_gpu_attention(spec); !status.ok()) return status;
  } else if (find_kernel({spec.tiling.bm, spec.tiling.bn}, spec.dtype, false).kernel == nullptr) {
    return bad_argument(
        fmt::format("tiles of {} x {} have no GPU kernel: 128 x 256, 128 x 128, 64 x 128 and 64 x 64 have",
                    spec.tiling.bm, spec.tiling.bn));
  }
  if (operator_count_ == kMaxCudaOperators) {
    return bad_argument(fmt::format(
        "this world has made {} operators, and no world can make more: create another world", kMaxCudaOperators));
  }
  const std::int64_t wanted = CudaOperatorImpl::bytes_needed(config, ranks_.front(), gpus_->rank(ranks_.front()).sms);
  if (const std::int64_t available = free_memory(); wanted > available) {
    return Error{ErrorKind::kOutOfMemory,
                 fmt::format("{} of {} needs {} bytes of GPU memory per rank, and {} are available", op_name(spec.op),
                             shape_text(spec), wanted, available)};
  }
  return Ok{};
}

Result<CudaOperator*> Executor::add_operator(const CudaOperatorConfig& config) {
  std::lock_guard<std::mutex> creating(create_mutex_);
  const std::uint32_t number = next_operator();
  Partition partition = config.partition;
  if (partition == Partition{}) {
    // Attention copies with a spare warp of every SM.
    const bool attention = config.source->plan().spec().op == Op::kRingAttention;
    partition = attention ? Partition{sms(), 0, 0} : choose_partition(config.source->plan(), sms(), kGpuCosts);
  }
  auto op = std::make_unique<CudaOperatorImpl>(number, config, partition, ranks_.front());
  const Status possible = check_operator(config);
  const Status taken = possible.ok() ? op->take_memory(*gpus_) : possible;
  // Others wait for our memory, so they must hear when there is none.
  if (Status reached = op->reach_peers(*gpus_, taken); !reached.ok()) return reached.error();
  std::vector<const DeviceRing*> rings(static_cast<std::size_t>(options_.topo.world()));
  std::vector<DeviceMailbox*> mailboxes(rings.size());
  for (const std::int32_t rank : ranks_) {
    const auto r = static_cast<std::size_t>(rank);
    if (network_) rings[r] = network_->rings(rank);
    mailboxes[r] = mailboxes_ + std::size_t{number} * rings.size() + r;
  }
  if (Status status = op->fill(*gpus_, rings, mailboxes, options_.deadline_s); !status.ok()) return status.error();

  if (network_) {
    Status added = network_->add_operator(number, config.source, op->layout(), config.start_epoch, op->heaps());
    if (!added.ok()) return added.error();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  names_[number] = name_of(*op);
  operators_[number] = std::move(op);
  ++operator_count_;
  return operators_[number].get();
}

void Executor::remove_operator(CudaOperator* base) {
  auto& op = static_cast<CudaOperatorImpl&>(*base);
  bool equal = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::int32_t rank : ranks_) {
      equal = equal && op.rank(rank).launches == op.rank(ranks_.front()).launches;
    }
  }
  if (!equal) {
    fail({ErrorKind::kAborted,
          names_[op.number()] + " was destroyed when some ranks had launched more of its calls than others"});
  }
  for (const std::int32_t rank : ranks_) {
    const Status status = wait(base, rank);
    (void)status;  // there is nobody left to tell
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const std::int32_t rank : ranks_) {
    Last& last = last_[static_cast<std::size_t>(rank)];
    if (last.done == op.rank(rank).done) last = {};
  }
  if (network_) network_->remove_operator(op.number());
  operators_[op.number()].reset();
}

Status Executor::check_launch(CudaOperatorImpl& op, std::int32_t rank) {
  if (failure_.happened()) return failure_.later_error();
  if (log_.too_far_ahead(log_rank(rank))) {
    return bad_argument(fmt::format("rank {} is {} launches ahead of rank {}, and no more are accepted", rank,
                                    LaunchLog::kCapacity, log_.slowest_rank()));
  }
  if (const auto other = log_.note(log_rank(rank), op.number())) {
    const Error error = bad_argument(fmt::format(
        "launch {} of rank {} is {}, but rank {} made its launch {} with {}: all ranks must launch the same operators "
        "in the same order",
        log_.count(log_rank(rank)) + 1, rank, names_[op.number()], other->rank, log_.count(log_rank(rank)) + 1,
        names_[other->op]));
    fail(error);  // the other rank's call can never end
    return error;
  }
  return Ok{};
}

cudaError_t Executor::start_gemm(CudaOperatorImpl& op, const Matrix& c, const CudaOperatorImpl::Launch& launch,
                                 std::uint32_t parts, const VirtualGpu& gpu, cudaStream_t stream) {
  const Overlap overlap = op.plan().topo().world() == 1 ? Overlap::kPrevious : Overlap::kNone;
  cudaError_t status = launch_repack(launch.copy_a, launch.copy_b, stream, overlap);
  if (status != cudaSuccess) return status;
  status = mkernel::launch(launch.kernel.kernel, static_cast<unsigned>(gpu.sms), kThreads,
                           static_cast<std::size_t>(launch.kernel.shared_bytes), stream, overlap, launch.call);
  if (launch.deliver_c && (parts & kPartLast) != 0) {
    launch_deliver(device_matrix(c), launch.call.c_matrix, c.rows, c.cols, stream);
  }
  return status;
}

cudaError_t Executor::start_attention(CudaOperatorImpl& op, const AttentionArguments& arguments,
                                      const CudaOperatorImpl::Launch& launch, const VirtualGpu& gpu,
                                      cudaStream_t stream) {
  const cudaError_t status = upload_ends(op.plan(), arguments, launch.attention_call, stream);
  if (status != cudaSuccess) return status;
  const AttentionEntry& entry = launch.attention_kernel;
  return mkernel::launch(entry.kernel, static_cast<unsigned>(gpu.sms), kAttentionThreads,
                         static_cast<std::size_t>(entry.shared_bytes), stream, Overlap::kNone, launch.attention_call);
}

Status Executor::launch(CudaOperator* base, std::int32_t rank, const Arguments& arguments, void* user_stream,
                        std::uint32_t parts) {
  auto& op = static_cast<CudaOperatorImpl&>(*base);
  const VirtualGpu& gpu = gpus_->rank(rank);
  auto* const stream = user_stream != nullptr ? static_cast<cudaStream_t>(user_stream) : gpu.stream;
  Result<CudaOperatorImpl::Launch> prepared = op.prepare(rank, arguments, parts);
  if (!prepared.ok()) return prepared.error();
  CudaOperatorImpl::Launch& launch = *prepared;

  std::lock_guard<std::mutex> lock(mutex_);
  DeviceGuard guard(gpu.device);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t status = cudaStreamIsCapturing(stream, &capture);
  if (status != cudaSuccess) return cuda_error(status, fmt::format("launching on a stream of rank {}", rank));
  const bool capturing = capture != cudaStreamCaptureStatusNone;
  if (capturing && op.plan().spec().attention.packed) {
    return Error{
        ErrorKind::kUnsupported,
        "packed sequences cannot be captured in a graph: each replay would read cu_seqlens from the memory of a "
        "call that is over"};
  }
  // A captured launch happens later and any number of times: then the caller sees to the order.
  if (!capturing && (parts & kPartLast) != 0) {
    if (Status checked = check_launch(op, rank); !checked.ok()) return checked;
  } else if (failure_.happened()) {
    return failure_.later_error();
  }
  Last& last = last_[static_cast<std::size_t>(rank)];
  if (!capturing && last.done != nullptr && last.stream != stream) {
    status = cudaStreamWaitEvent(stream, last.done, 0);
    if (status != cudaSuccess) return cuda_error(status, fmt::format("ordering a launch of rank {}", rank));
  }
  if (network_ && !capturing) network_->wake();
  if (op.is_attention()) {
    status = start_attention(op, std::get<AttentionArguments>(arguments), launch, gpu, stream);
  } else {
    status = start_gemm(op, std::get<GemmArguments>(arguments).c, launch, parts, gpu, stream);
  }
  if (const cudaError_t other = cudaGetLastError(); status == cudaSuccess) status = other;
  if (status == cudaSuccess && !capturing) {
    CudaOperatorImpl::Rank& self = op.rank(rank);
    status = cudaEventRecord(self.done, stream);
    last = {stream, self.done};
    if ((parts & kPartLast) != 0) ++self.launches;
    self.launched_ns = steady_now();
    self.warned = false;
  }
  if (status != cudaSuccess) {
    const Error error = cuda_error(status, fmt::format("launching {} on rank {}", names_[op.number()], rank));
    fail(error);
    return error;
  }
  return Ok{};
}

Status Executor::launch_signals(CudaOperator* base, std::int32_t rank, const Arguments& arguments, void* user_stream) {
  auto& op = static_cast<CudaOperatorImpl&>(*base);
  const VirtualGpu& gpu = gpus_->rank(rank);
  auto* const stream = user_stream != nullptr ? static_cast<cudaStream_t>(user_stream) : gpu.stream;
  const Result<CudaOperatorImpl::Launch> prepared = op.prepare(rank, arguments, kPartCompute);
  if (!prepared.ok()) return prepared.error();
  DeviceGuard guard(gpu.device);
  launch_raise_signals(prepared->call, op.rank(rank).table.lanes[0].count, stream);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return cuda_error(status, "launching a kernel that raises signals");
  return Ok{};
}

Status Executor::wait(CudaOperator* base, std::int32_t rank) {
  auto& op = static_cast<CudaOperatorImpl&>(*base);
  CudaOperatorImpl::Rank& self = op.rank(rank);
  if (self.launched_ns != 0) {
    const Nanos begin = steady_now();
    for (;;) {
      const cudaError_t status = cudaEventQuery(self.done);
      if (status == cudaSuccess) break;
      if (status != cudaErrorNotReady) {
        fail(cuda_error(status, fmt::format("running {} on rank {}", names_[op.number()], rank)));
        break;
      }
      // Kernels end within microseconds or take long; a sleep costs some 60 us.
      if (steady_now() - begin > 1'000'000) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  check_mailbox(op, rank);  // a kernel that has left early has said why, and the watcher may not have looked yet
  if (!failure_.happened()) return Ok{};
  return std::exchange(self.failure_told, true) ? failure_.later_error() : failure_.error();
}

Result<DeviceTimes> Executor::times(CudaOperator* base, std::int32_t rank) {
  const DeviceControl* from = static_cast<CudaOperatorImpl&>(*base).rank(rank).device.control;
  std::uint64_t epoch = 0;
  DeviceTimes times;
  if (Status status = copy(rank, &epoch, &from->epoch, sizeof(epoch)); !status.ok()) return status.error();
  if (Status status = copy(rank, &times, &from->of(epoch), sizeof(times)); !status.ok()) return status.error();
  return times;
}

// --- flight records ---

Status Executor::start_flight_records() {
  Result<PinnedMemory> memory = PinnedMemory::create(sizeof(DeviceControl));
  if (!memory.ok()) return memory.error();
  read_memory_ = std::move(*memory);
  read_streams_.resize(static_cast<std::size_t>(options_.topo.world()));
  for (const std::int32_t rank : ranks_) {
    Result<cudaStream_t> stream = gpus_->new_stream(rank, false);
    if (!stream.ok()) return stream.error();
    read_streams_[static_cast<std::size_t>(rank)] = *stream;
  }
  return Ok{};
}

// Beside whatever runs on the rank. False when the GPU does not answer, or has nothing more to say after a crash.
bool Executor::read_control(std::int32_t rank, const DeviceControl* from) {
  constexpr Nanos kPatience = 500'000'000;
  if (read_hangs_) return false;
  DeviceGuard guard(gpus_->rank(rank).device);
  const cudaStream_t stream = read_streams_[static_cast<std::size_t>(rank)];
  const Nanos begin = steady_now();
  cudaError_t status = cudaMemcpyAsync(read_memory_.host(), from, sizeof(*from), cudaMemcpyDeviceToHost, stream);
  if (status == cudaSuccess) {
    while ((status = cudaStreamQuery(stream)) == cudaErrorNotReady && steady_now() - begin < kPatience) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  read_hangs_ = status == cudaErrorNotReady;
  return status == cudaSuccess;
}

std::string Executor::flight_record(std::int32_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<GpuCall> calls;
  std::string failure = failure_.happened() ? failure_.error().message : "";
  for (std::uint32_t number = 0; number < operator_count_; ++number) {
    CudaOperatorImpl* op = operators_[number].get();
    if (op == nullptr) continue;
    const CudaOperatorImpl::Rank& self = op->rank(rank);
    if (!read_control(rank, self.device.control)) {
      failure += failure.empty() ? "the GPU does not answer" : "; the GPU does not answer";
      break;
    }
    const std::uint64_t start_epoch = op->config().start_epoch;
    append_calls(*reinterpret_cast<const DeviceControl*>(read_memory_.host()), names_[number], start_epoch,
                 start_epoch + self.launches, calls);
  }
  return flight_text(std::move(calls), failure);
}

std::int64_t Executor::network_bytes(const CudaOperator* op) const {
  return network_ ? network_->operator_bytes(op->number()) : 0;
}

Status Executor::check(CudaOperator* base, std::int32_t rank, const Arguments& arguments) {
  const auto prepared = static_cast<CudaOperatorImpl&>(*base).prepare(rank, arguments, kAllParts);
  if (!prepared.ok()) return prepared.error();
  return Ok{};
}

void Executor::fail(Error error) {
  const Error told = error;
  if (!failure_.set(std::move(error))) return;
  const std::size_t boxes = std::size_t{kMaxCudaOperators} * options_.topo.world();
  for (std::size_t i = 0; i < boxes; ++i) {
    std::atomic_ref<std::uint32_t>(mailboxes_[i].leave).store(1, std::memory_order_release);
  }
  if (options_.on_failure) options_.on_failure(told);
}

// --- the watcher: what kernels cannot tell the caller themselves ---

void Executor::watch() {
  bool dropped = false;
  while (!stop_.load()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (failure_.happened() && network_ && !std::exchange(dropped, true)) network_->drop();
    std::vector<std::string> warnings;
    bool under_way = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Nanos now = steady_now();
      for (std::uint32_t number = 0; number < operator_count_; ++number) {
        CudaOperatorImpl* op = operators_[number].get();
        for (const std::int32_t rank : ranks_) {
          if (op == nullptr) break;
          check_mailbox(*op, rank);
          under_way = under_way || is_under_way(*op, rank);
          if (!is_late(*op, rank, now)) continue;
          warnings.push_back(fmt::format(
              "rank {} has been in {} for {:.1f} s; it fails after {:.1f} s without progress", rank, names_[number],
              static_cast<double>(now - op->rank(rank).launched_ns) * 1e-9, options_.deadline_s));
        }
      }
    }
    if (under_way && network_ && !dropped) network_->wake();
    for (const std::string& warning : warnings) {
      if (options_.on_warning) options_.on_warning(warning);
    }
  }
}

void Executor::check_mailbox(CudaOperatorImpl& op, std::int32_t rank) {
  DeviceAbort& from = op.rank(rank).device.mailbox->abort;
  // order: the record's fields come with the state; pairs with the kernel's st_release_sys().
  if (std::atomic_ref<std::uint32_t>(from.state).load(std::memory_order_acquire) != 2 || failure_.happened()) return;
  if (from.kind == static_cast<std::uint32_t>(DeviceAbortKind::kRingFull)) {
    fail({ErrorKind::kTimeout,
          fmt::format("rank {} waited {:.1f} s in {} (operator {}), epoch {}, in role send task {}, for room in the "
                      "command ring to node {}: its network takes no more records",
                      rank, static_cast<double>(from.waited_ns) * 1e-9, op_name(op.plan().spec().op), op.number(),
                      from.epoch, from.task, from.lane)});
    return;
  }
  AbortRecord record;
  record.rank = rank;
  record.op = op.number();
  record.epoch = from.epoch;
  record.role = static_cast<Role>(from.role);
  record.lane = static_cast<std::int32_t>(from.lane);
  record.task = from.task == kNoTask ? -1 : static_cast<std::int64_t>(from.task);
  record.flag = from.flag;
  record.wanted = from.wanted;
  record.seen = from.seen;
  record.waited_s = static_cast<double>(from.waited_ns) * 1e-9;
  record.peer = op.plan().flag_name(rank, record.flag).sender;
  fail({ErrorKind::kTimeout, describe(op.plan(), record)});
}

bool Executor::is_under_way(CudaOperatorImpl& op, std::int32_t rank) {
  CudaOperatorImpl::Rank& self = op.rank(rank);
  return self.launched_ns != 0 && cudaEventQuery(self.done) == cudaErrorNotReady;
}

// Once per launch.
bool Executor::is_late(CudaOperatorImpl& op, std::int32_t rank, Nanos now) {
  CudaOperatorImpl::Rank& self = op.rank(rank);
  if (self.warned || self.launched_ns == 0 || now - self.launched_ns < nanos(options_.warn_s)) return false;
  if (!is_under_way(op, rank)) return false;
  self.warned = true;
  return true;
}

// --- memory ---

Result<void*> Executor::allocate(std::int32_t rank, std::int64_t bytes) {
  DeviceGuard guard(gpus_->rank(rank).device);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)));
  if (status != cudaSuccess) return cuda_error(status, fmt::format("allocating {} bytes for rank {}", bytes, rank));
  return data;
}

void Executor::release(std::int32_t rank, void* data) {
  DeviceGuard guard(gpus_->rank(rank).device);
  cudaFree(data);
}

Status Executor::copy(std::int32_t rank, void* dst, const void* src, std::int64_t bytes) {
  const VirtualGpu& gpu = gpus_->rank(rank);
  DeviceGuard guard(gpu.device);
  cudaError_t status = cudaMemcpyAsync(dst, src, static_cast<std::size_t>(bytes), cudaMemcpyDefault, gpu.stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(gpu.stream);
  if (status != cudaSuccess) return cuda_error(status, fmt::format("copying {} bytes for rank {}", bytes, rank));
  return Ok{};
}

std::int64_t Executor::free_memory() const {
  std::int64_t least = kNever;
  for (const int device : gpus_->devices()) {
    DeviceGuard guard(device);
    std::size_t free = 0;
    std::size_t total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) continue;
    std::int64_t ranks = 0;
    for (const std::int32_t rank : ranks_) ranks += gpus_->rank(rank).device == device;
    least = std::min(least, (static_cast<std::int64_t>(free) - kMemoryMargin) / std::max<std::int64_t>(ranks, 1));
  }
  return std::max<std::int64_t>(least, 0);
}

Result<void*> Executor::new_stream(std::int32_t rank, bool high_priority) {
  Result<cudaStream_t> stream = gpus_->new_stream(rank, high_priority);
  if (!stream.ok()) return stream.error();
  return static_cast<void*>(*stream);
}

}  // namespace

Result<std::unique_ptr<CudaExecutor>> CudaExecutor::create(const CudaExecutorOptions& options) {
  VirtualGpuOptions gpu_options;
  gpu_options.topo = options.topo;
  gpu_options.sms = options.sms;
  gpu_options.own_rank = options.own_rank;
  gpu_options.local_index = options.local_index;
  gpu_options.spare_sms = options.topo.nodes > 1 && !options.copy_engine ? 1 : 0;
  Result<std::unique_ptr<VirtualGpus>> gpus = VirtualGpus::create(gpu_options);
  if (!gpus.ok()) return gpus.error();
  auto executor = std::make_unique<Executor>(options, std::move(*gpus));
  if (Status status = executor->start(); !status.ok()) return status.error();
  return std::unique_ptr<CudaExecutor>(std::move(executor));
}

}  // namespace mkernel
