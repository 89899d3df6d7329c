#include "bench/sim_vs_measured.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <span>

#include "exec/sim/simulator.h"
#include "ops/gemm_spec.h"
#include "plan/plan.h"

namespace mkernel::bench {
namespace {

constexpr int kPasses = 6;
constexpr double kSteps[] = {0.7, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25, 1.4};

Result<MeasuredCase> read_case(const nlohmann::ordered_json& json) {
  MeasuredCase measured;
  Row& row = measured.row;
  row.op = json.at("op");
  row.topology = json.at("topology");
  row.shape = json.at("shape");
  measured.origin = {{json.at("gpu"), json.at("driver"), json.at("cuda"), 0}, json.at("commit"), "", ""};
  const auto& detail = json.at("detail");
  measured.sms = detail.at("sms");
  const auto& partition = detail.at("partition");
  measured.partition = {partition.at("compute"), partition.at("intra"), partition.at("recv")};
  row.detail["link"] = detail.at("link");
  measured.gigabytes_per_s = detail.at("link").value("gigabytes_per_s", 0.0);
  measured.latency_us = detail.at("link").value("latency_us", 0.0);
  measured.us = detail.at("contestants").at("fused").at("us");

  Topology topo;
  GemmOptions gemm;
  long long m = 0;
  long long n = 0;
  long long k = 0;
  bool known = false;
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
    if (row.op != op_name(op)) continue;
    gemm.op = op;
    known = true;
  }
  if (!known || std::sscanf(row.topology.c_str(), "%dx%d", &topo.nodes, &topo.gpus) != 2 ||
      std::sscanf(row.shape.c_str(), "%lldx%lldx%lld", &m, &n, &k) != 3) {
    return bad_argument(
        fmt::format("a row is of {} {} {}, which is no case of a virtual cluster", row.op, row.topology, row.shape));
  }
  gemm.m = m;
  gemm.n = n;
  gemm.k = k;
  Result<PlanSpec> spec = make_gpu_gemm_spec(topo, gemm, measured.sms);
  if (!spec.ok()) return spec.error();
  measured.spec = *spec;
  return measured;
}

// Root mean square of the logarithms of simulated / measured over the cases for calibration.
Result<double> misfit(const std::vector<MeasuredCase>& cases, const CostModel& cost) {
  double sum = 0;
  int count = 0;
  for (const MeasuredCase& measured : cases) {
    if (!measured.for_calibration) continue;
    const Result<double> us = simulated_us(measured, cost);
    if (!us.ok()) return us.error();
    sum += std::pow(std::log(*us / measured.us), 2);
    ++count;
  }
  return std::sqrt(sum / std::max(count, 1));
}

void scale(Nanos& value, double factor) { value = std::llround(static_cast<double>(value) * factor); }

}  // namespace

Result<std::vector<MeasuredCase>> read_measured(const nlohmann::ordered_json& rows) {
  std::map<std::string, MeasuredCase> cases;
  try {
    for (const auto& json : rows) {
      if (json.at("suite") != "virtual_cluster") continue;
      Result<MeasuredCase> measured = read_case(json);
      if (!measured.ok()) return measured.error();
      const Row& row = measured->row;
      const std::string rule = row.detail["link"].value("rule", "");
      cases[fmt::format("{} {} {} {}", row.op, row.topology, row.shape, rule)] = std::move(*measured);
    }
  } catch (const nlohmann::json::exception& error) {
    return bad_argument(fmt::format("these are no results of `mkernel bench suite virtual_cluster`: {}", error.what()));
  }
  if (cases.empty()) return bad_argument("there are no results of `mkernel bench suite virtual_cluster`");
  std::vector<MeasuredCase> sorted;
  for (auto& [name, measured] : cases) {
    measured.for_calibration = sorted.size() % 2 == 0;
    sorted.push_back(std::move(measured));
  }
  return sorted;
}

Result<double> simulated_us(const MeasuredCase& measured, const CostModel& cost) {
  const PlanSource source{Plan(measured.spec)};
  SimOptions options;
  options.topo = measured.spec.topo;
  options.sms = measured.sms;
  options.partition = measured.partition;
  options.cost = cost;
  if (measured.gigabytes_per_s > 0) {
    options.cost.net_bytes_per_ns = measured.gigabytes_per_s;
    options.cost.net_ns = std::llround(measured.latency_us * 1e3);
  }
  options.data = false;
  const PlanSource* const operators[] = {&source};
  const SimCall calls[] = {{}};
  const SimReport report = simulate(options, operators, calls);
  if (report.error) return *report.error;
  return static_cast<double>(report.time_ns) * 1e-3;
}

Result<CostModel> calibrate(const std::vector<MeasuredCase>& cases, CostModel start) {
  static constexpr void (*kMoves[])(CostModel&, double) = {
      [](CostModel& c, double f) { c.gemm_efficiency *= f; },  [](CostModel& c, double f) { scale(c.tile_ns, f); },
      [](CostModel& c, double f) { c.gathered_tile *= f; },    [](CostModel& c, double f) { c.sm_bytes_per_ns *= f; },
      [](CostModel& c, double f) { scale(c.move_ns, f); },     [](CostModel& c, double f) { scale(c.record_ns, f); },
      [](CostModel& c, double f) { c.wire_bytes_per_ns *= f; }};
  CostModel best = start;
  Result<double> least = misfit(cases, best);
  for (int pass = 0; pass < kPasses; ++pass) {
    for (const double step : kSteps) {
      for (const auto move : kMoves) {
        if (!least.ok()) return least.error();
        CostModel tried = best;
        move(tried, step);
        const Result<double> found = misfit(cases, tried);
        if (!found.ok()) return found.error();
        if (*found >= *least) continue;
        best = tried;
        least = found;
      }
    }
  }
  return best;
}

Row simulated_row(const MeasuredCase& measured, double simulated_us) {
  Row row = measured.row;
  row.suite = "sim_vs_measured";
  row.ours = measured.us;
  row.baseline = simulated_us;
  row.baseline_name = "simulator, preset h200-virtual";
  row.ratio = simulated_us / measured.us;
  row.detail["half"] = measured.for_calibration ? "calibration" : "prediction";
  row.detail["measured_commit"] = measured.origin.commit;
  return row;
}

}  // namespace mkernel::bench
