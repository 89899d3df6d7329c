// mkernel bench: measures on a GPU and writes what bench/results/ holds.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bench/cluster_cases.h"
#include "bench/command_ring.h"
#include "bench/gemm_core.h"
#include "bench/hierarchy.h"
#include "bench/result_rows.h"
#include "bench/sim_vs_measured.h"
#include "bench/simulated_hierarchy.h"
#include "bench/virtual_cluster.h"
#include "cli/commands.h"

namespace mkernel::cli {
namespace {

constexpr int kCoreRounds = 7;
constexpr int kRingRounds = 7;
constexpr double kCoreBlockMs = 10;
constexpr int kClusterRounds = 3;
constexpr double kClusterBlockMs = 30;
constexpr const char* kOneCase = "single";  // the suite of what was asked for by hand

// Failures of one case, after which the next can be measured. After a timeout the kernels have left.
bool concerns_one_case(ErrorKind kind) {
  return kind == ErrorKind::kCheckFailed || kind == ErrorKind::kOutOfMemory || kind == ErrorKind::kBadArgument ||
         kind == ErrorKind::kTimeout;
}

class BenchSession {
 public:
  BenchSession(const BenchArgs& args, Console& console) : args_(args), console_(console) {}

  ExitCode run() {
    const bool core = args_.what == BenchArgs::What::kGemmCore || args_.suite == "gemm_core";
    const bool simulated = args_.suite == "sim_vs_measured";
    const bool ring = args_.suite == "command_ring";
    const Status status = core                                ? run_core()
                          : simulated                         ? run_simulated()
                          : ring                              ? run_ring()
                          : args_.suite == "hierarchical"     ? run_hierarchies()
                          : args_.suite == "sim_hierarchical" ? run_simulated_hierarchies()
                                                              : run_clusters();
    if (!status) return console_.fail(status.error());
    return worst_;
  }

 private:
  bool is_suite() const { return args_.what == BenchArgs::What::kSuite; }
  bool wanted(const std::string& name) const { return name.find(args_.filter) != std::string::npos; }

  // --- the kernel alone ---

  std::vector<bench::CoreProblem> core_problems() const {
    std::vector<bench::CoreProblem> problems;
    const auto add = [&](const bench::Shape& shape, const char* group) {
      const std::string name = std::string(group) + " " + bench::shape_text(shape.m, shape.n, shape.k);
      if (wanted(name)) problems.push_back({shape, args_.problem.gemm.dtype, args_.b_transposed});
    };
    if (!is_suite()) {
      add({args_.problem.gemm.m, args_.problem.gemm.n, args_.problem.gemm.k}, "");
      return problems;
    }
    for (const bench::Shape& shape : bench::core_shapes()) add(shape, "main");
    for (const bench::Shape& shape : bench::odd_shapes()) add(shape, "odd");
    return problems;
  }

  Status run_core() {
    bench::CoreOptions options;
    options.rounds = args_.rounds > 0 ? args_.rounds : kCoreRounds;
    options.block_ms = args_.block_ms > 0 ? args_.block_ms : kCoreBlockMs;
    options.bm = args_.problem.gemm.bm;
    options.bn = args_.problem.gemm.bn;
    options.band = args_.problem.gemm.band;
    auto made = bench::CoreBench::create(options);
    if (!made) return made.error();
    bench::CoreBench& bench = **made;
    begin(bench.machine(), bench.cublas_version());
    console_.out() << fmt::format("{:<20} {:<30} {:>10} {:>10} {:>7} {:>7} {:>6} {:>9} {:>9} {:>5}\n", "shape",
                                  "baseline", "ours us", "base us", "ratio", "spread", "TF", "error", "tile", "MHz")
                   << std::flush;
    for (const bench::CoreProblem& problem : core_problems()) {
      const std::string name = bench::shape_text(problem.shape.m, problem.shape.n, problem.shape.k);
      std::optional<Progress> progress(std::in_place, console_, "measuring " + name);
      Result<bench::CoreResult> result = bench.run(problem);
      progress.reset();
      if (!result) {
        if (const Status status = failed(name, result.error()); !status) return status;
        continue;
      }
      for (const bench::Row& row :
           bench::core_rows(is_suite() ? "gemm_core" : kOneCase, problem, *result, bench.cublas_version())) {
        console_.out() << fmt::format(
            "{:<20} {:<30} {:>10.2f} {:>10.2f} {:>7.3f} {:>7.3f} {:>6.0f} {:>9.1e} {:>9} {:>5}\n", name,
            row.baseline_name, row.ours, row.baseline, row.ratio, row.spread, row.detail["ours_tflops"].get<double>(),
            result->error, fmt::format("{}x{}", result->spec.tiling.bm, result->spec.tiling.bn), result->clock_mhz);
        rows_.push_back(bench::to_json(row, origin_));
      }
      if (const Status status = save(); !status) return status;
    }
    return Ok{};
  }

  // --- fused operators ---

  std::vector<bench::ClusterProblem> suite_cases() const {
    if (args_.suite == "small") return bench::small_cases();
    return args_.suite == "hierarchical" ? bench::hierarchical_cases() : bench::virtual_cluster_cases();
  }

  std::vector<bench::ClusterProblem> cluster_problems() const {
    if (!is_suite()) return {{args_.problem.topo, args_.problem.gemm, args_.link, args_.partition}};
    std::vector<bench::ClusterProblem> problems;
    for (bench::ClusterProblem problem : suite_cases()) {
      if (!wanted(bench::case_name(problem))) continue;
      GemmOptions gemm = args_.problem.gemm;  // all but the operator and the sizes
      gemm.op = problem.gemm.op;
      gemm.m = problem.gemm.m;
      gemm.n = problem.gemm.n;
      gemm.k = problem.gemm.k;
      problem.gemm = gemm;
      problems.push_back(problem);
    }
    return problems;
  }

  Status run_clusters() {
    bench::ClusterOptions options;
    options.rounds = args_.rounds > 0 ? args_.rounds : kClusterRounds;
    options.timed_ms = args_.block_ms > 0 ? args_.block_ms : kClusterBlockMs;
    options.sms = args_.sms;
    options.sweep_partition = args_.sweep_partition;
    const std::vector<bench::ClusterProblem> problems = cluster_problems();
    if (!problems.empty()) options.first = problems[0].topo;
    auto made = bench::ClusterBench::create(options);
    if (!made) return made.error();
    bench::ClusterBench& bench = **made;
    begin(bench.machine(), bench.cublas_version());
    for (const bench::ClusterProblem& problem : problems) {
      const std::string name = bench::case_name(problem);
      std::optional<Progress> progress(std::in_place, console_, "measuring " + name);
      Result<bench::ClusterResult> result = bench.run(problem);
      progress.reset();
      if (!result) {
        if (const Status status = failed(name, result.error()); !status) return status;
        continue;
      }
      show(name, *result);
      const std::string suite = is_suite() ? args_.suite : kOneCase;
      for (const bench::Row& row : bench::cluster_rows(suite, problem, *result, bench.cublas_version())) {
        rows_.push_back(bench::to_json(row, origin_));
      }
      if (const Status status = save(); !status) return status;
    }
    return Ok{};
  }

  void show(const std::string& name, const bench::ClusterResult& result) {
    std::ostream& out = console_.out();
    const bench::ClusterTime& fused = *result.find(bench::kFused);
    const double fused_us = bench::median(fused.us);
    const Partition& p = result.partition;
    out << fmt::format("{}: {} SMs ({},{},{}), tiles {}x{}, link {:.2f} GB/s {} us, wire {:.1f} us, error {:.1e}\n",
                       name, result.sms, p.compute, p.intra, p.recv, result.spec.tiling.bm, result.spec.tiling.bn,
                       result.link.gigabytes_per_s, result.link.latency_us, result.wire_us, result.error);
    for (const bench::ClusterTime& time : result.times) {
      if (time.us.empty()) continue;
      const double us = bench::median(time.us);
      out << fmt::format(
          "  {:<32} {:>10.1f} us  spread {:>5.3f}  x fused {:>6.3f}  launch {:>6.1f} us  {:>4} MHz  {}\n", time.name,
          us, bench::summarise(time.us).spread, us / fused_us, time.host_us, time.clock_mhz, time.checked);
    }
    for (const bench::ClusterResult::Swept& swept : result.sweep) {
      out << fmt::format("  {:<32} {:>10.1f} us\n", fmt::format("fused, {} movers", swept.movers), swept.us);
    }
    out << fmt::format("  floor {:.1f} us (by wire {:.1f} us), fused / floor {:.3f} (by wire {:.3f})", result.floor_us,
                       result.floor_by_wire_us, fused_us / result.floor_us, fused_us / result.floor_by_wire_us);
    for (const auto* comparison : {&result.sequential, &result.chunked}) {
      if (comparison->ratios.empty()) continue;
      out << fmt::format(", {} / fused {:.3f}", comparison->baseline, bench::summarise(comparison->ratios).median);
    }
    out << "\n" << std::flush;
  }

  // --- hierarchical against flat movement ---

  Status run_hierarchies() {
    bench::HierarchyOptions options;
    options.rounds = args_.rounds > 0 ? args_.rounds : kClusterRounds;
    options.timed_ms = args_.block_ms > 0 ? args_.block_ms : kClusterBlockMs;
    options.sms = args_.sms;
    const std::vector<bench::ClusterProblem> problems = cluster_problems();
    if (!problems.empty()) options.first = problems[0].topo;
    auto made = bench::HierarchyBench::create(options);
    if (!made) return made.error();
    bench::HierarchyBench& bench = **made;
    begin(bench.machine(), "");
    for (const bench::ClusterProblem& problem : problems) {
      const std::string name = bench::case_name(problem);
      std::optional<Progress> progress(std::in_place, console_, "measuring " + name);
      Result<bench::HierarchyResult> result = bench.run(problem);
      progress.reset();
      if (!result) {
        if (const Status status = failed(name, result.error()); !status) return status;
        continue;
      }
      for (const bench::Row& row : bench::hierarchy_rows(args_.suite, problem, *result)) add_movement_row(name, row);
      if (const Status status = save(); !status) return status;
    }
    return Ok{};
  }

  Status run_simulated_hierarchies() {
    for (const bench::SimulatedCase& simulated : bench::simulated_hierarchy_cases()) {
      const std::string name = simulated.preset + " " + bench::case_name(simulated.problem);
      if (!wanted(name)) continue;
      const Result<bench::SimulatedPair> pair = bench::simulate_hierarchy(simulated);
      if (!pair) return pair.error();
      origin_ = {{"simulator", "", "", 0}, args_.commit, args_.command, bench::utc_now()};
      for (const bench::Row& row : bench::simulated_hierarchy_rows(simulated.problem, *pair)) {
        add_movement_row(name, row);
      }
    }
    return save();
  }

  void add_movement_row(const std::string& name, const bench::Row& row) {
    console_.out() << fmt::format("{:<56} {:>11.1f} {:<5}  {} {:>11.1f}  ratio {:.3f}  spread {:.3f}\n", name, row.ours,
                                  row.unit, row.baseline_name, row.baseline, row.ratio, row.spread);
    rows_.push_back(bench::to_json(row, origin_));
  }

  // --- the command ring alone ---

  Status run_ring() {
    bench::Machine machine;
    bench::RingOptions options;
    options.rounds = args_.rounds > 0 ? args_.rounds : kRingRounds;
    const auto results = bench::measure_command_ring(options, machine);
    if (!results) return results.error();
    origin_ = {machine, args_.commit, args_.command, bench::utc_now()};
    for (const bench::RingResult& result : *results) {
      for (const bench::Row& row : bench::ring_rows(result)) {
        console_.out() << fmt::format("{:<12} {:<28} {:>8.3f} {}  bar {:g}  spread {:.3f}\n", result.wire, row.op,
                                      row.ours, row.unit, row.baseline, row.spread);
        rows_.push_back(bench::to_json(row, origin_));
      }
    }
    return save();
  }

  // --- the simulator, on any machine ---

  Result<std::vector<bench::MeasuredCase>> measured_cases() const {
    std::ifstream file(args_.measured);
    if (!file) return bad_argument(fmt::format("--measured is {}: it cannot be read", quote(args_.measured.string())));
    const auto json = nlohmann::ordered_json::parse(file, nullptr, false);
    Result<std::vector<bench::MeasuredCase>> cases = bench::read_measured(json);
    if (cases) return cases;
    return bad_argument(fmt::format("--measured is {}: {}", quote(args_.measured.string()), cases.error().message));
  }

  Status run_simulated() {
    const Result<std::vector<bench::MeasuredCase>> cases = measured_cases();
    if (!cases) return cases.error();
    Result<CostModel> cost = find_preset("h200-virtual");
    if (args_.calibrate) {
      cost = bench::calibrate(*cases, *cost);
      if (!cost) return cost.error();
      console_.out() << "calibrated, for virtual_cluster() in src/exec/sim/cost_model.cc:\n"
                     << bench::figures_text(*cost);
    }
    for (const bench::MeasuredCase& measured : *cases) {
      const bench::Row& from = measured.row;
      const std::string name =
          fmt::format("{} {} {} {}", from.op, from.topology, from.shape, from.detail["link"].value("rule", ""));
      if (!wanted(name)) continue;
      const Result<double> us = bench::simulated_us(measured, *cost);
      if (!us) return us.error();
      const bench::Row row = bench::simulated_row(measured, *us);
      console_.out() << fmt::format("{:<56} measured {:>8.1f} us, simulated {:>8.1f} us, {:+5.1f} %  {}\n", name,
                                    row.ours, row.baseline, 100 * (row.ratio - 1),
                                    row.detail["half"].get<std::string>());
      origin_ = {measured.origin.machine, args_.commit, args_.command, bench::utc_now()};
      rows_.push_back(bench::to_json(row, origin_));
    }
    return save();
  }

  // --- common ---

  void begin(const bench::Machine& machine, const std::string& cublas) {
    origin_ = {machine, args_.commit, args_.command, bench::utc_now()};
    console_.note(fmt::format("{}, driver {}, CUDA {}, cuBLAS {}", machine.gpu, machine.driver, machine.cuda, cublas));
  }

  // An error that ends the session, or a note about a case that is left out.
  Status failed(const std::string& name, const Error& error) {
    if (!is_suite() || !concerns_one_case(error.kind)) return error;
    console_.note(fmt::format("mkernel: {}: left out: {}", name, error.message));
    worst_ = std::max(worst_, error.kind == ErrorKind::kTimeout ? ExitCode::kRunFailed : ExitCode::kCheckFailed);
    return Ok{};
  }

  // After each case, so that what was measured survives what comes later.
  Status save() {
    console_.out() << std::flush;
    const Status status = args_.json.empty() ? Status(Ok{}) : bench::append_rows(args_.json, rows_);
    rows_.clear();
    return status;
  }

  const BenchArgs& args_;
  Console& console_;
  bench::Origin origin_;
  std::vector<nlohmann::ordered_json> rows_;
  ExitCode worst_ = ExitCode::kGood;
};

}  // namespace

ExitCode bench_command(const BenchArgs& args, Console& console) { return BenchSession(args, console).run(); }

}  // namespace mkernel::cli
