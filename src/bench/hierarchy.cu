#include "bench/hierarchy.h"

#include <algorithm>
#include <array>
#include <utility>

#include "bench/cluster_data.h"
#include "bench/cluster_session.h"
#include "exec/cuda/format.h"
#include "ops/gemm_spec.h"

namespace mkernel::bench {
namespace {

constexpr double kMaxError = 1e-2;  // as the suite virtual_cluster
constexpr int kLeastCalls = 3;
constexpr int kMostCalls = 60;            // a stream takes about a thousand commands ahead
constexpr int kOperatorsPerSession = 60;  // an executor makes 63 over its life

// The fused operator in one world.
class Movement {
 public:
  Movement(ClusterSession& session, const char* name) : session_(session) { result_.time.name = name; }
  ~Movement() {
    if (op_ != nullptr) session_.executor->remove_operator(op_);  // waits for its calls
  }
  Movement(const Movement&) = delete;
  Movement& operator=(const Movement&) = delete;

  Status prepare(const GemmOptions& gemm) {
    Result<PlanSpec> spec = make_gpu_gemm_spec(session_.topo, gemm, session_.executor->sms());
    if (!spec.ok()) return spec.error();
    result_.topo = session_.topo;
    result_.spec = *spec;
    source_ = std::make_shared<PlanSource>(Plan(*spec));
    for (std::int32_t r = 0; r < session_.world(); ++r) {
      result_.plan_bytes = std::max(result_.plan_bytes, source_->plan().network_bytes(r));
    }
    Result<std::unique_ptr<ClusterData>> data = ClusterData::create(session_, source_->plan());
    if (!data.ok()) return data.error();
    data_ = std::move(*data);
    if (Status status = data_->make_reference(); !status.ok()) return status;
    CudaOperatorConfig config;
    config.source = source_;
    Result<CudaOperator*> op = session_.executor->add_operator(config);
    if (!op.ok()) return op.error();
    ++session_.operators_made;
    op_ = *op;
    result_.partition = op_->partition();
    return Ok{};
  }

  void set_link(const LinkRate& link) {
    session_.executor->set_link(link.gigabytes_per_s, static_cast<Nanos>(link.latency_us * 1e3));
  }

  // One call on a poisoned C, compared with cuBLAS.
  Status check() {
    data_->poison();
    if (Status status = session_.settle("poisoning C"); !status.ok()) return status;
    if (Status status = call(); !status.ok()) return status;
    if (Status status = session_.settle(result_.time.name); !status.ok()) return status;
    Result<double> error = data_->error(data_->whole());
    if (!error.ok()) return error.error();
    if (!(*error <= kMaxError)) {
      return Error{ErrorKind::kCheckFailed, fmt::format("{}: C is off by {:.1e}", result_.time.name, *error)};
    }
    result_.error = std::max(result_.error, *error);
    result_.time.checked = fmt::format("C is off by {:.1e}", result_.error);
    return Ok{};
  }

  Status estimate(double timed_ms) {
    Result<CallTime> timed = time(kLeastCalls);
    if (!timed.ok()) return timed.error();
    estimate_us_ = timed->us;
    result_.time.calls =
        std::clamp(static_cast<int>(timed_ms * 1e3 / std::max(timed->us, 1.0)), kLeastCalls, kMostCalls);
    return Ok{};
  }

  // Adds a round; returns its time in us.
  Result<double> measure() {
    const std::int64_t before = session_.executor->network_bytes(op_);
    Result<CallTime> timed = time(result_.time.calls);
    if (!timed.ok()) return timed.error();
    const auto posted = static_cast<double>(session_.executor->network_bytes(op_) - before);
    result_.network_bytes = posted / (result_.time.calls + 1) / session_.world();
    result_.time.us.push_back(timed->us);
    result_.time.host_us = timed->host_us;
    result_.time.clock_mhz = timed->clock_mhz;
    return timed->us;
  }

  const MovementResult& result() const { return result_; }

 private:
  Status call() {
    for (std::int32_t r = 0; r < session_.world(); ++r) {
      Status status = session_.executor->launch(op_, r, data_->arguments(r),
                                                session_.ranks[static_cast<std::size_t>(r)].stream, kAllParts);
      if (!status.ok()) return status;
    }
    return Ok{};
  }
  Result<CallTime> time(int calls) {
    return session_.time({result_.time.name, {}, [this] { return call(); }, false, calls, estimate_us_});
  }

  ClusterSession& session_;
  std::shared_ptr<const PlanSource> source_;
  std::unique_ptr<ClusterData> data_;
  CudaOperator* op_ = nullptr;
  double estimate_us_ = 0;
  MovementResult result_;
};

class HierarchyBenchImpl final : public HierarchyBench {
 public:
  explicit HierarchyBenchImpl(const HierarchyOptions& options) : options_(options) {}

  // The sessions first: making them sets what CUDA must find before its first call.
  Status start() {
    if (Status status = use(options_.first); !status.ok()) return status;
    Result<Machine> machine = describe_machine();
    if (!machine.ok()) return machine.error();
    machine_ = std::move(*machine);
    return Ok{};
  }

  Result<HierarchyResult> run(const ClusterProblem& problem) override {
    if (problem.topo.nodes < 2 || problem.topo.gpus < 2) {
      return bad_argument("hierarchical and flat movement differ only with several nodes of several GPUs");
    }
    if (Status status = use(problem.topo); !status.ok()) return status.error();
    Result<HierarchyResult> result = compare(problem);
    for (std::unique_ptr<ClusterSession>* session : {&hierarchical_, &flat_}) {
      if ((*session)->executor->failure().happened()) session->reset();
    }
    return result;
  }

  const Machine& machine() const override { return machine_; }

 private:
  // Both worlds are there at once, with contexts of their own on the same SMs; only one has work at a time.
  Status use(const Topology& topo) {
    if (Status status = use(hierarchical_, topo); !status.ok()) return status;
    return use(flat_, flat_topology(topo));
  }
  Status use(std::unique_ptr<ClusterSession>& session, const Topology& topo) const {
    const bool fits = session && session->topo.nodes == topo.nodes && session->topo.gpus == topo.gpus &&
                      session->operators_made < kOperatorsPerSession;
    if (fits) return Ok{};
    session.reset();
    Result<std::unique_ptr<ClusterSession>> made = ClusterSession::create(topo, options_.sms, SessionStreams::kOwn);
    if (!made.ok()) return made.error();
    session = std::move(*made);
    return Ok{};
  }

  Result<HierarchyResult> compare(const ClusterProblem& problem) {
    Movement hierarchical(*hierarchical_, "hierarchical");
    Movement flat(*flat_, "flat");
    const std::array<Movement*, 2> both = {&hierarchical, &flat};
    HierarchyResult result;
    result.sms = hierarchical_->executor->sms();
    for (Movement* movement : both) {
      if (Status status = movement->prepare(problem.gemm); !status.ok()) return status.error();
    }
    // Of the same kind for both; a balanced one would depend on the world.
    result.link = resolve_link(problem.link, result.sms, machine_.sms, hierarchical.result().plan_bytes, 0);
    for (Movement* movement : both) {
      movement->set_link(result.link);
      if (Status status = movement->check(); !status.ok()) return status.error();
      if (Status status = movement->estimate(options_.timed_ms); !status.ok()) return status.error();
    }
    for (int round = 0; round < options_.rounds; ++round) {
      std::array<double, 2> us = {};
      for (const std::size_t i : balanced_order(both.size(), round)) {
        Result<double> measured = both[i]->measure();
        if (!measured.ok()) return measured.error();
        us[i] = *measured;
      }
      result.ratios.push_back(us[1] / us[0]);
    }
    for (Movement* movement : both) {
      if (Status status = movement->check(); !status.ok()) return status.error();
    }
    result.hierarchical = hierarchical.result();
    result.flat = flat.result();
    return result;
  }

  const HierarchyOptions options_;
  Machine machine_;
  std::unique_ptr<ClusterSession> hierarchical_;
  std::unique_ptr<ClusterSession> flat_;
};

}  // namespace

Result<std::unique_ptr<HierarchyBench>> HierarchyBench::create(const HierarchyOptions& options) {
  auto made = std::make_unique<HierarchyBenchImpl>(options);
  if (Status status = made->start(); !status.ok()) return status.error();
  return std::unique_ptr<HierarchyBench>(std::move(made));
}

}  // namespace mkernel::bench
