#include "bench/virtual_cluster.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "bench/cluster_data.h"
#include "bench/cluster_session.h"
#include "bench/cluster_ways.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/schedule.h"
#include "ops/gemm_spec.h"

namespace mkernel::bench {
namespace {

constexpr double kMaxError = 1e-2;
constexpr int kLeastCalls = 3;
constexpr int kSweepPasses = 2;
constexpr int kOperatorsPerSession = 60;  // an executor makes 63 over its life

class ClusterRun {
 public:
  ClusterRun(const ClusterOptions& options, const ClusterProblem& problem, ClusterSession& session, int gpu_sms)
      : options_(options), problem_(problem), session_(session), gpu_sms_(gpu_sms) {}

  Result<ClusterResult> run() {
    for (const auto step : {&ClusterRun::make_plan, &ClusterRun::make_data, &ClusterRun::make_ways,
                            &ClusterRun::warm_all, &ClusterRun::set_link, &ClusterRun::sweep, &ClusterRun::estimate_all,
                            &ClusterRun::measure, &ClusterRun::conclude}) {
      if (Status status = (this->*step)(); !status.ok()) return status.error();
    }
    return std::move(result_);
  }

 private:
  // A contestant and what is known of it.
  struct Entry {
    Contestant way;
    ClusterTime time;
    double estimate_us = 0;
  };

  Entry& entry(const std::string& name) {
    return *std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.way.name == name; });
  }

  Status make_plan() {
    if (Status status = validate_partition(problem_.partition, session_.executor->sms()); !status.ok()) return status;
    Result<PlanSpec> spec = make_gpu_gemm_spec(problem_.topo, problem_.gemm, session_.executor->sms());
    if (!spec.ok()) return spec.error();
    source_ = std::make_shared<PlanSource>(Plan(*spec));
    result_.spec = *spec;
    result_.sms = session_.executor->sms();
    for (std::int32_t r = 0; r < problem_.topo.world(); ++r) {
      result_.wire_bytes = std::max(result_.wire_bytes, source_->plan().network_bytes(r));
    }
    return Ok{};
  }

  Status make_data() {
    Result<std::unique_ptr<ClusterData>> data = ClusterData::create(session_, source_->plan());
    if (!data.ok()) return data.error();
    data_ = std::move(*data);
    return data_->make_reference();
  }

  Status make_ways() {
    if (problem_.topo.nodes > 1) session_.executor->set_link(0, 0);
    ways_.emplace(session_, problem_, source_, *data_);
    if (Status status = ways_->prepare(); !status.ok()) return status;
    for (Contestant& way : ways_->contestants()) {
      Entry e;
      e.time.name = way.name;
      e.way = std::move(way);
      entries_.push_back(std::move(e));
    }
    return Ok{};
  }

  // Each once by itself: everything that is loaded or allocated at first use is there before kernels wait for others.
  Status warm_all() {
    for (Entry& e : entries_) {
      if (Status status = check(e); !status.ok()) return status;
      if (Status status = estimate(e); !status.ok()) return status;
    }
    return Ok{};
  }

  // --- results ---

  // One call on a poisoned C, compared with cuBLAS.
  Status check(Entry& e) {
    data_->poison();
    if (Status status = session_.settle("poisoning C"); !status.ok()) return status;
    if (e.way.start) {
      if (Status status = e.way.start(); !status.ok()) return status;
    }
    if (Status status = e.way.call(); !status.ok()) return status;
    if (Status status = session_.settle(e.way.name); !status.ok()) return status;
    if (e.way.pieces.empty()) return Ok{};
    Result<double> error = data_->error(e.way.pieces);
    if (!error.ok()) return error.error();
    e.time.checked = fmt::format("C is off by {:.1e}", *error);
    bool right = *error <= kMaxError;
    if (right && problem_.gemm.op == Op::kGemmAllReduce) {
      Result<bool> equal = data_->equal_bits();
      if (!equal.ok()) return equal.error();
      right = *equal;
      e.time.checked += *equal ? ", same bits on all ranks" : ", and not the same on all ranks";
    }
    if (!right) e.time.checked = "WRONG: " + e.time.checked;
    if (!e.way.must_be_right) return Ok{};
    if (!right) return Error{ErrorKind::kCheckFailed, fmt::format("{}: {}", e.way.name, e.time.checked)};
    result_.error = std::max(result_.error, *error);
    return Ok{};
  }

  // --- times ---

  Result<CallTime> time(const Entry& e, int calls) {
    return session_.time({e.way.name, e.way.start, e.way.call, e.way.ends_urgent, calls, e.estimate_us});
  }
  int calls_for(double us, int most) const {
    return std::clamp(static_cast<int>(options_.timed_ms * 1e3 / std::max(us, 1.0)), kLeastCalls, most);
  }

  Status estimate(Entry& e) {
    Result<CallTime> timed = time(e, kLeastCalls);
    if (!timed.ok()) return timed.error();
    e.estimate_us = timed->us;
    e.time.calls = calls_for(timed->us, e.way.most_calls);
    return Ok{};
  }
  Status estimate_all() {
    for (Entry& e : entries_) {
      if (Status status = estimate(e); !status.ok()) return status;
    }
    return Ok{};
  }

  Status set_link() {
    double gemm_us = 0;
    if (problem_.link.kind == LinkRule::Kind::kBalanced) {
      for (const char* name : {kOurGemm, kCublasGemm}) {
        Entry& e = entry(name);
        Result<CallTime> timed = time(e, e.time.calls);
        if (!timed.ok()) return timed.error();
        gemm_us = gemm_us == 0 ? timed->us : std::min(gemm_us, timed->us);
      }
    }
    if (problem_.topo.nodes == 1) return Ok{};
    result_.link = resolve_link(problem_.link, result_.sms, gpu_sms_, result_.wire_bytes, gemm_us);
    result_.wire_us = wire_us(result_.link, result_.wire_bytes);
    session_.executor->set_link(result_.link.gigabytes_per_s, static_cast<Nanos>(result_.link.latency_us * 1e3));
    return Ok{};
  }

  // Which number of SMs for communication is the best; then the fused operator is made with it.
  Status sweep() {
    if (!options_.sweep_partition) return Ok{};
    const int most = result_.sms / 2;
    const auto name = [](int movers) { return fmt::format("fused, {} movers", movers); };
    std::vector<double> sums(static_cast<std::size_t>(most), 0);
    for (int pass = 0; pass < kSweepPasses; ++pass) {
      for (const std::size_t i : balanced_order(sums.size(), pass)) {
        const int movers = static_cast<int>(i) + 1;
        const auto call = [&] { return ways_->call_fused_with(movers); };
        Result<CallTime> first = session_.time({name(movers), {}, call, false, kLeastCalls, 0});
        if (!first.ok()) return first.error();
        const int calls = calls_for(2 * first->us, entry(kFused).way.most_calls);
        Result<CallTime> timed = session_.time({name(movers), {}, call, false, calls, first->us});
        if (!timed.ok()) return timed.error();
        sums[i] += timed->us / kSweepPasses;
      }
    }
    for (int movers = 1; movers <= most; ++movers) {
      result_.sweep.push_back({movers, sums[static_cast<std::size_t>(movers) - 1]});
    }
    const auto best = std::min_element(sums.begin(), sums.end());
    const int movers = static_cast<int>(best - sums.begin()) + 1;
    return ways_->remake_fused({result_.sms - movers, movers, 0});
  }

  Status measure() {
    result_.partition = ways_->fused().partition();
    result_.workspace_bytes = ways_->fused().workspace_bytes();
    for (int round = 0; round < options_.rounds; ++round) {
      for (const std::size_t i : balanced_order(entries_.size(), round)) {
        Entry& e = entries_[i];
        Result<CallTime> timed = time(e, e.time.calls);
        if (!timed.ok()) return timed.error();
        e.time.us.push_back(timed->us);
        e.time.host_us = timed->host_us;
        if (timed->clock_mhz > 0) e.time.clock_mhz = timed->clock_mhz;
        if (round > 0) continue;
        if (Status status = check(e); !status.ok()) return status;
      }
    }
    return Ok{};
  }

  ClusterResult::Comparison compare(const std::string& title, const ClusterTime& baseline, const ClusterTime& fused) {
    ClusterResult::Comparison comparison;
    comparison.baseline = title;
    comparison.baseline_us = median(baseline.us);
    for (std::size_t i = 0; i < fused.us.size(); ++i) comparison.ratios.push_back(baseline.us[i] / fused.us[i]);
    return comparison;
  }

  Status conclude() {
    const ClusterTime& fused = entry(kFused).time;
    const ClusterTime& sequential = entry(kSequential).time;
    const ClusterTime* chunked = nullptr;
    for (const Entry& e : entries_) {
      const bool is_chunked = e.way.name.starts_with("chunked");
      if (is_chunked && (chunked == nullptr || median(e.time.us) < median(chunked->us))) chunked = &e.time;
    }
    result_.sequential = compare("sequential (cuBLAS, communication)", sequential, fused);
    if (chunked != nullptr) result_.chunked = compare(chunked->name, *chunked, fused);
    const double ours = median(entry(kOurGemm).time.us);
    const double cublas = median(entry(kCublasGemm).time.us);
    const double moves = median(entry(kCommunication).time.us);
    result_.floor_us = floor_us(ours, cublas, moves, result_.wire_us);
    result_.floor_by_wire_us = floor_us(ours, cublas, 0, result_.wire_us);
    for (Entry& e : entries_) result_.times.push_back(e.time);
    return Ok{};
  }

  const ClusterOptions& options_;
  const ClusterProblem& problem_;
  ClusterSession& session_;
  const int gpu_sms_;
  std::shared_ptr<const PlanSource> source_;
  std::unique_ptr<ClusterData> data_;
  std::optional<ClusterWays> ways_;  // after data_: its operators go first
  std::vector<Entry> entries_;
  ClusterResult result_;
};

class ClusterBenchImpl final : public ClusterBench {
 public:
  explicit ClusterBenchImpl(const ClusterOptions& options) : options_(options) {}

  // Makes the session of the first topology, which says what is missing.
  Status start() {
    if (Status status = use(options_.first); !status.ok()) return status;
    Result<Machine> machine = describe_machine();
    if (!machine.ok()) return machine.error();
    machine_ = std::move(*machine);
    cublas_version_ = session_->ranks[0].cublas->version();
    return Ok{};
  }

  Result<ClusterResult> run(const ClusterProblem& problem) override {
    if (problem.topo.world() < 2) return bad_argument("a virtual cluster has two ranks or more");
    if (problem.topo.world() > Checker::kMaxParts) {
      return bad_argument(fmt::format("{} ranks are more than the {} that this benchmark checks", problem.topo.world(),
                                      Checker::kMaxParts));
    }
    if (Status status = use(problem.topo); !status.ok()) return status.error();
    Result<ClusterResult> result = ClusterRun(options_, problem, *session_, machine_.sms).run();
    if (session_->executor->failure().happened()) session_.reset();
    return result;
  }

  const Machine& machine() const override { return machine_; }
  std::string cublas_version() const override { return cublas_version_; }

 private:
  Status use(const Topology& topo) {
    const bool fits = session_ && session_->topo.nodes == topo.nodes && session_->topo.gpus == topo.gpus &&
                      session_->operators_made + ClusterWays::kMostOperators <= kOperatorsPerSession;
    if (fits) return Ok{};
    session_.reset();
    Result<std::unique_ptr<ClusterSession>> session = ClusterSession::create(topo, options_.sms);
    if (!session.ok()) return session.error();
    session_ = std::move(*session);
    return Ok{};
  }

  const ClusterOptions options_;
  Machine machine_;
  std::string cublas_version_;
  std::unique_ptr<ClusterSession> session_;
};

}  // namespace

Result<std::unique_ptr<ClusterBench>> ClusterBench::create(const ClusterOptions& options) {
  auto made = std::make_unique<ClusterBenchImpl>(options);
  if (Status status = made->start(); !status.ok()) return status.error();
  return std::unique_ptr<ClusterBench>(std::move(made));
}

}  // namespace mkernel::bench
