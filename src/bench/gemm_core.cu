#include "bench/gemm_core.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "bench/cublas.h"
#include "bench/device_tools.h"
#include "bench/nvml.h"
#include "exec/cuda/cuda_executor.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "ops/gemm_spec.h"

namespace mkernel::bench {
namespace {

// Inputs take turns until they no longer fit into the L2 cache, of which an H200 has 60 MB (50 in use by one
// partition).
constexpr std::int64_t kMinInputBytes = 200'000'000;
constexpr std::int64_t kMaxInputSets = 8;
constexpr int kMaxGraphLaunches = 256;
constexpr int kSelectionRounds = 2;
constexpr double kMaxError = 1e-2;  // bf16 rounding of K sums in another order stays well below
constexpr double kDeadlineS = 10;

// One way of computing the product, with its launches in a graph.
struct Contestant {
  std::string name;
  std::function<Status(std::size_t set)> launch;
  cudaGraphExec_t graph = nullptr;
  int graph_launches = 0;
  int graphs = 0;  // per block
  double estimate_us = 0;

  int launches() const { return graph_launches * graphs; }
};

// One shape on one executor.
class CoreRun {
 public:
  CoreRun(const CoreOptions& options, const CoreProblem& problem, CudaExecutor& executor, Cublas& cublas,
          Checker& checker, cudaStream_t stream)
      : options_(options),
        problem_(problem),
        executor_(executor),
        cublas_(cublas),
        checker_(checker),
        stream_(stream) {}
  ~CoreRun() {
    for (const Contestant& c : contestants_) {
      if (c.graph != nullptr) cudaGraphExecDestroy(c.graph);
    }
    if (op_ != nullptr) executor_.remove_operator(op_);
  }
  CoreRun(const CoreRun&) = delete;
  CoreRun& operator=(const CoreRun&) = delete;

  Result<CoreResult> run() {
    for (const auto step : {&CoreRun::plan, &CoreRun::make_data, &CoreRun::add_contestants, &CoreRun::check_first,
                            &CoreRun::capture_all, &CoreRun::select_lt, &CoreRun::measure, &CoreRun::check_last}) {
      if (Status status = (this->*step)(); !status.ok()) {
        if (status.error().kind == ErrorKind::kTimeout) executor_.fail(status.error());  // the kernels leave
        return status.error();
      }
    }
    result_.clock_mhz = clock_samples_ == 0 ? 0 : static_cast<int>(clock_sum_ / clock_samples_);
    return std::move(result_);
  }

 private:
  struct Set {
    DeviceBuffer a;
    DeviceBuffer b;
    DeviceBuffer c;
  };

  std::int64_t a_elements() const { return problem_.shape.m * problem_.shape.k; }
  std::int64_t b_elements() const { return problem_.shape.k * problem_.shape.n; }
  std::int64_t c_elements() const { return problem_.shape.m * problem_.shape.n; }
  std::string name() const { return fmt::format("{} x {} x {}", problem_.shape.m, problem_.shape.n, problem_.shape.k); }
  DenseGemm dense() const {
    const Shape& s = problem_.shape;
    return {s.m, s.n, s.k, problem_.dtype, problem_.b_transposed};
  }

  Status plan() {
    const Shape& s = problem_.shape;
    GemmOptions gemm;
    gemm.op = Op::kGemmAllReduce;  // on one rank: the product alone
    gemm.m = s.m;
    gemm.n = s.n;
    gemm.k = s.k;
    gemm.dtype = problem_.dtype;
    gemm.bm = options_.bm;
    gemm.bn = options_.bn;
    gemm.band = options_.band;
    Result<PlanSpec> spec = make_gpu_gemm_spec({1, 1}, gemm, executor_.sms());
    if (!spec.ok()) return spec.error();
    CudaOperatorConfig config;
    config.source = std::make_shared<PlanSource>(Plan(*spec));
    config.any_layout = problem_.b_transposed && s.k % 8 != 0;
    Result<CudaOperator*> op = executor_.add_operator(config);
    if (!op.ok()) return op.error();
    op_ = *op;
    result_.spec = *spec;
    result_.sms = executor_.sms();
    return Ok{};
  }

  Status make_data() {
    const std::int64_t inputs = 2 * (a_elements() + b_elements());
    const std::int64_t sets = std::clamp<std::int64_t>(ceil_div(kMinInputBytes, inputs), 1, kMaxInputSets);
    const std::int64_t wanted = sets * (inputs + 2 * c_elements()) + 2 * c_elements();
    if (const std::int64_t available = executor_.free_memory(); wanted > available) {
      return Error{ErrorKind::kOutOfMemory,
                   fmt::format("{} needs {} bytes of GPU memory, and {} are available", name(), wanted, available)};
    }
    for (std::int64_t i = 0; i < sets; ++i) {
      Set set;
      const std::pair<DeviceBuffer*, std::int64_t> matrices[] = {
          {&set.a, a_elements()}, {&set.b, b_elements()}, {&set.c, c_elements()}};
      for (const auto& [buffer, elements] : matrices) {
        Result<DeviceBuffer> made = DeviceBuffer::create(2 * elements);
        if (!made.ok()) return made.error();
        *buffer = std::move(*made);
      }
      fill_gaussian(set.a.data(), a_elements(), problem_.dtype, 2 * static_cast<std::uint64_t>(i) + 1, stream_);
      fill_gaussian(set.b.data(), b_elements(), problem_.dtype, 2 * static_cast<std::uint64_t>(i) + 2, stream_);
      sets_.push_back(std::move(set));
    }
    Result<DeviceBuffer> reference = DeviceBuffer::create(2 * c_elements());
    if (!reference.ok()) return reference.error();
    reference_ = std::move(*reference);
    result_.input_sets = static_cast<int>(sets);
    return settle("making the inputs");
  }

  DenseOperands operands(std::size_t set, void* c) const { return {sets_[set].a.data(), sets_[set].b.data(), c}; }

  Status launch_ours(std::size_t set) {
    const Shape& s = problem_.shape;
    GemmArguments arguments;
    arguments.a = Matrix::row_major(sets_[set].a.data(), s.m, s.k);
    arguments.b = problem_.b_transposed ? Matrix{sets_[set].b.data(), s.k, s.n, 1, s.k}
                                        : Matrix::row_major(sets_[set].b.data(), s.k, s.n);
    arguments.c = Matrix::row_major(sets_[set].c.data(), s.m, s.n);
    return executor_.launch(op_, 0, arguments, stream_, kAllParts);
  }

  static constexpr std::size_t kOurs = 0;
  static constexpr std::size_t kGemmEx = 1;
  static constexpr std::size_t kFirstLt = 2;

  Status add_contestants() {
    add("mKernel", [this](std::size_t set) { return launch_ours(set); });
    add("cublasGemmEx", [this](std::size_t set) { return cublas_.gemm(dense(), operands(set, sets_[set].c.data())); });
    Result<std::unique_ptr<LtPlan>> lt = cublas_.plan_lt(dense());
    if (!lt.ok()) return lt.error();
    lt_ = std::move(*lt);
    for (int i = 0; i < lt_->count(); ++i) {
      // The heuristic may propose what then refuses to run.
      if (!cublas_.gemm_lt(*lt_, i, operands(0, sets_[0].c.data())).ok()) continue;
      add(fmt::format("cublasLt (algorithm {} of {})", i + 1, lt_->count()),
          [this, i](std::size_t set) { return cublas_.gemm_lt(*lt_, i, operands(set, sets_[set].c.data())); });
      result_.lt.push_back({lt_->describe(i), 0});
    }
    return settle("the first products");
  }
  void add(std::string contestant, std::function<Status(std::size_t)> launch) {
    Contestant c;
    c.name = std::move(contestant);
    c.launch = std::move(launch);
    contestants_.push_back(std::move(c));
  }

  // --- results ---

  Status check_set(std::size_t set) {
    fill_nan(reference_.data(), c_elements(), stream_);
    if (Status status = cublas_.gemm(dense(), operands(set, reference_.data())); !status.ok()) return status;
    Result<double> error =
        checker_.relative_error(sets_[set].c.data(), reference_.data(), c_elements(), problem_.dtype, stream_);
    if (!error.ok()) return error.error();
    if (!(*error <= kMaxError)) {  // also NaN
      return Error{ErrorKind::kCheckFailed, fmt::format("{}: C differs from cuBLAS' by {} of its norm, more than {}",
                                                        name(), *error, kMaxError)};
    }
    result_.error = std::max(result_.error, *error);
    return Ok{};
  }

  Status check_first() {
    for (std::size_t set = 0; set < sets_.size(); ++set) {
      fill_nan(sets_[set].c.data(), c_elements(), stream_);
      if (Status status = launch_ours(set); !status.ok()) return status;
      if (Status status = settle("our first product"); !status.ok()) return status;
      if (Status status = check_set(set); !status.ok()) return status;
    }
    return Ok{};
  }

  // What the timed graphs computed: the same launches back to back.
  Status check_last() {
    const Contestant& ours = contestants_[kOurs];
    for (const Set& set : sets_) fill_nan(set.c.data(), c_elements(), stream_);
    if (const cudaError_t status = cudaGraphLaunch(ours.graph, stream_); status != cudaSuccess) {
      return cuda_error(status, "replaying our graph");
    }
    if (Status status = settle("our products after timing"); !status.ok()) return status;
    const std::size_t used = std::min(sets_.size(), static_cast<std::size_t>(ours.graph_launches));
    for (std::size_t set = 0; set < used; ++set) {
      if (Status status = check_set(set); !status.ok()) return status;
    }
    return Ok{};
  }

  // --- times ---

  Status capture_all() {
    for (Contestant& c : contestants_) {
      if (Status status = estimate(c); !status.ok()) return status;
      if (Status status = capture(c); !status.ok()) return status;
    }
    result_.launches_per_block = contestants_[kOurs].launches();
    return Ok{};
  }

  Status estimate(Contestant& c) {
    constexpr int kWarm = 2;
    constexpr int kTimed = 3;
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < kWarm + kTimed && status == cudaSuccess; ++i) {
      if (i == kWarm) status = cudaEventRecord(begin_.get(), stream_);
      if (Status launched = c.launch(static_cast<std::size_t>(i) % sets_.size()); !launched.ok()) return launched;
    }
    if (status == cudaSuccess) status = cudaEventRecord(end_.get(), stream_);
    if (status != cudaSuccess) return cuda_error(status, "recording an event");
    if (Status done = settle(c.name); !done.ok()) return done;
    Result<double> us = elapsed_us(begin_.get(), end_.get());
    if (!us.ok()) return us.error();
    c.estimate_us = std::max(*us / kTimed, 1.0);
    const double block_us = options_.block_ms * 1e3;
    c.graph_launches = std::clamp(static_cast<int>(std::ceil(block_us / c.estimate_us)), 1, kMaxGraphLaunches);
    c.graphs = std::max(1, static_cast<int>(std::ceil(block_us / (c.estimate_us * c.graph_launches))));
    return Ok{};
  }

  Status capture(Contestant& c) {
    cudaError_t status = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
    if (status != cudaSuccess) return cuda_error(status, "starting to capture a graph");
    std::optional<Error> failed;
    for (int i = 0; i < c.graph_launches && !failed; ++i) {
      if (Status launched = c.launch(static_cast<std::size_t>(i) % sets_.size()); !launched.ok()) {
        failed = launched.error();
      }
    }
    cudaGraph_t graph = nullptr;
    status = cudaStreamEndCapture(stream_, &graph);
    if (failed) {
      if (graph != nullptr) cudaGraphDestroy(graph);
      return *failed;
    }
    if (status == cudaSuccess) status = cudaGraphInstantiate(&c.graph, graph, 0);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (status == cudaSuccess) status = cudaGraphUpload(c.graph, stream_);
    if (status != cudaSuccess) return cuda_error(status, fmt::format("capturing {}", c.name));
    return Ok{};
  }

  // Runs blocks of these contestants one after the other without a pause; microseconds per launch of each.
  Result<std::vector<double>> time_blocks(const std::vector<std::size_t>& order) {
    while (events_.size() < order.size() + 1) events_.emplace_back();
    double expected_us = 0;
    cudaError_t status = cudaEventRecord(events_[0].get(), stream_);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Contestant& c = contestants_[order[i]];
      for (int g = 0; g < c.graphs && status == cudaSuccess; ++g) status = cudaGraphLaunch(c.graph, stream_);
      if (status == cudaSuccess) status = cudaEventRecord(events_[i + 1].get(), stream_);
      expected_us += c.estimate_us * c.launches();
    }
    if (status != cudaSuccess) return cuda_error(status, fmt::format("launching the graphs of {}", name()));
    const Status done = wait_for({&stream_, 1}, name(), 2 * kDeadlineS + 10 * expected_us * 1e-6, [this] {
      if (const int mhz = sm_clock_mhz(); mhz > 0) {
        clock_sum_ += mhz;
        ++clock_samples_;
      }
    });
    if (!done.ok()) {
      for (std::size_t i = 0; i < order.size(); ++i) {
        if (cudaEventQuery(events_[i + 1].get()) == cudaSuccess) continue;
        return Error{done.error().kind,
                     fmt::format("{} (while {} ran)", done.error().message, contestants_[order[i]].name)};
      }
      return done.error();
    }
    if (executor_.failure().happened()) return executor_.failure().error();
    std::vector<double> times;
    for (std::size_t i = 0; i < order.size(); ++i) {
      Result<double> us = elapsed_us(events_[i].get(), events_[i + 1].get());
      if (!us.ok()) return us.error();
      times.push_back(*us / contestants_[order[i]].launches());
    }
    return times;
  }

  // Which of cublasLt's algorithms is the strongest: each between two blocks of cublasGemmEx.
  Status select_lt() {
    const std::size_t count = contestants_.size() - kFirstLt;
    std::vector<std::vector<double>> ratios(count);
    for (int round = 0; round < kSelectionRounds && count > 0; ++round) {
      std::vector<std::size_t> order = {kGemmEx};
      const std::vector<std::size_t> turn = balanced_order(count, round);
      for (const std::size_t lt : turn) order.insert(order.end(), {kFirstLt + lt, kGemmEx});
      Result<std::vector<double>> times = time_blocks(order);
      if (!times.ok()) return times.error();
      for (std::size_t i = 0; i < count; ++i) {
        ratios[turn[i]].push_back(paired_ratio((*times)[2 * i], (*times)[2 * i + 1], (*times)[2 * i + 2]));
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      result_.lt[i].ratio = median(ratios[i]);
      if (best_lt_ == 0 || result_.lt[i].ratio > result_.lt[best_lt_ - kFirstLt].ratio) best_lt_ = kFirstLt + i;
    }
    return Ok{};
  }

  Status measure() {
    std::vector<std::size_t> baselines = {kGemmEx};
    if (best_lt_ != 0) baselines.push_back(best_lt_);
    struct Times {
      std::vector<double> ours;
      std::vector<double> baseline;
      std::vector<double> ratios;
    };
    std::vector<Times> measured(baselines.size());
    for (int round = -1; round < options_.rounds; ++round) {  // the first one warms up
      const std::vector<std::size_t> turn = balanced_order(baselines.size(), round + 1);
      std::vector<std::size_t> order;
      for (const std::size_t b : turn) order.insert(order.end(), {baselines[b], kOurs, baselines[b]});
      Result<std::vector<double>> times = time_blocks(order);
      if (!times.ok()) return times.error();
      for (std::size_t i = 0; i < turn.size() && round >= 0; ++i) {
        const double* const block = times->data() + 3 * i;
        Times& into = measured[turn[i]];
        into.ours.push_back(block[1]);
        into.baseline.insert(into.baseline.end(), {block[0], block[2]});
        into.ratios.push_back(paired_ratio(block[0], block[1], block[2]));
      }
    }
    for (std::size_t b = 0; b < baselines.size(); ++b) {
      result_.pairings.push_back({contestants_[baselines[b]].name, median(measured[b].ours),
                                  median(measured[b].baseline), measured[b].ratios});
    }
    return Ok{};
  }

  Status settle(const std::string& what) {
    if (Status status = wait_for({&stream_, 1}, fmt::format("{}: {}", name(), what), 3 * kDeadlineS); !status.ok()) {
      return status;
    }
    if (executor_.failure().happened()) return executor_.failure().error();
    return Ok{};
  }

  const CoreOptions& options_;
  const CoreProblem& problem_;
  CudaExecutor& executor_;
  Cublas& cublas_;
  Checker& checker_;
  const cudaStream_t stream_;
  CudaOperator* op_ = nullptr;
  std::unique_ptr<LtPlan> lt_;
  std::vector<Set> sets_;
  DeviceBuffer reference_;
  std::vector<Contestant> contestants_;
  std::size_t best_lt_ = 0;  // 0: none
  TimedEvent begin_;
  TimedEvent end_;
  std::vector<TimedEvent> events_;
  double clock_sum_ = 0;
  int clock_samples_ = 0;
  CoreResult result_;
};

class CoreBenchImpl final : public CoreBench {
 public:
  explicit CoreBenchImpl(const CoreOptions& options) : options_(options) {}
  ~CoreBenchImpl() override {
    cublas_.reset();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  Status start() {
    // First: it sets up the CUDA environment of the process, and says what is missing.
    if (Result<std::unique_ptr<CudaExecutor>> probe = new_executor(); !probe.ok()) return probe.error();
    Result<Machine> machine = describe_machine();
    if (!machine.ok()) return machine.error();
    machine_ = std::move(*machine);
    if (const cudaError_t status = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); status != cudaSuccess) {
      return cuda_error(status, "creating a stream");
    }
    Result<DeviceBuffer> workspace = DeviceBuffer::create(kCublasWorkspaceBytes);
    if (!workspace.ok()) return workspace.error();
    workspace_ = std::move(*workspace);
    Result<std::unique_ptr<Cublas>> cublas = Cublas::create(stream_, workspace_.data());
    if (!cublas.ok()) return cublas.error();
    cublas_ = std::move(*cublas);
    Result<Checker> checker = Checker::create();
    if (!checker.ok()) return checker.error();
    checker_ = std::move(*checker);
    return Ok{};
  }

  Result<CoreResult> run(const CoreProblem& problem) override {
    if (problem.shape.m < 1 || problem.shape.n < 1 || problem.shape.k < 1) {
      return bad_argument("a benchmark wants sizes of 1 or more");
    }
    // A fresh one each time: an executor makes a limited number of operators over its life.
    Result<std::unique_ptr<CudaExecutor>> executor = new_executor();
    if (!executor.ok()) return executor.error();
    return CoreRun(options_, problem, **executor, *cublas_, checker_, stream_).run();
  }

  const Machine& machine() const override { return machine_; }
  std::string cublas_version() const override { return cublas_->version(); }

 private:
  static Result<std::unique_ptr<CudaExecutor>> new_executor() {
    CudaExecutorOptions options;
    options.topo = {1, 1};
    options.deadline_s = kDeadlineS;
    return CudaExecutor::create(options);
  }

  const CoreOptions options_;
  Machine machine_;
  cudaStream_t stream_ = nullptr;
  DeviceBuffer workspace_;
  std::unique_ptr<Cublas> cublas_;
  Checker checker_;
};

}  // namespace

Result<std::unique_ptr<CoreBench>> CoreBench::create(const CoreOptions& options) {
  auto made = std::make_unique<CoreBenchImpl>(options);
  if (Status status = made->start(); !status.ok()) return status.error();
  return std::unique_ptr<CoreBench>(std::move(made));
}

}  // namespace mkernel::bench
