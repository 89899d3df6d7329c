#include "bench/sim_vs_measured.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "exec/sim/simulator.h"
#include "ops/gemm_spec.h"
#include "plan/plan.h"

namespace mkernel::bench {
namespace {

// The figures of a cost model that nobody could measure alone.
struct Figure {
  const char* name;
  double (*get)(const CostModel&);
  void (*set)(CostModel&, double);
};
#define MK_FIGURE(member)                                                                                            \
  {                                                                                                                  \
#member,                                                                                                         \
        [](const CostModel& c) { return static_cast<double>(c.member); },                                            \
                                                                       [](CostModel & c,                             \
                                                                          double value) { assign(c.member, value); } \
  }
void assign(double& to, double value) { to = value; }
void assign(Nanos& to, double value) { to = std::llround(value); }
const Figure kFigures[] = {MK_FIGURE(gemm_efficiency), MK_FIGURE(tile_ns), MK_FIGURE(memory_bytes_per_ns),
                           MK_FIGURE(sm_bytes_per_ns), MK_FIGURE(move_ns), MK_FIGURE(wire_bytes_per_ns),
                           MK_FIGURE(wire_ns)};
#undef MK_FIGURE
constexpr std::size_t kFigureCount = std::size(kFigures);
using Vector = std::array<double, kFigureCount>;

constexpr int kSteps = 40;                // of the fit, at most
constexpr double kDerivativeStep = 0.03;  // of a figure: a simulation is a staircase
constexpr double kLeastGain = 1e-5;       // of the sum of squares, relative: then the fit ends
constexpr double kFirstDamping = 1e-2;
constexpr double kMostDamping = 1e6;

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

// Logarithms of simulated / measured of the cases for calibration.
Result<std::vector<double>> residuals(const std::vector<MeasuredCase>& cases, const CostModel& cost) {
  std::vector<double> result;
  for (const MeasuredCase& measured : cases) {
    if (!measured.for_calibration) continue;
    const Result<double> us = simulated_us(measured, cost);
    if (!us.ok()) return us.error();
    result.push_back(std::log(*us / measured.us));
  }
  return result;
}
double sum_of_squares(const std::vector<double>& values) {
  return std::inner_product(values.begin(), values.end(), values.begin(), 0.0);
}

// `start` with each figure times exp(its component).
CostModel moved(const CostModel& start, const Vector& step) {
  CostModel cost = start;
  for (std::size_t i = 0; i < kFigureCount; ++i) kFigures[i].set(cost, kFigures[i].get(start) * std::exp(step[i]));
  return cost;
}

// Solves a * x = b for a symmetric positive definite `a`, by Cholesky.
Vector solve(std::array<Vector, kFigureCount> a, Vector b) {
  for (std::size_t i = 0; i < kFigureCount; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = a[i][j];
      for (std::size_t k = 0; k < j; ++k) sum -= a[i][k] * a[j][k];
      a[i][j] = i == j ? std::sqrt(std::max(sum, 1e-12)) : sum / a[j][j];
    }
    for (std::size_t k = 0; k < i; ++k) b[i] -= a[i][k] * b[k];
    b[i] /= a[i][i];
  }
  for (std::size_t i = kFigureCount; i-- > 0;) {
    for (std::size_t k = i + 1; k < kFigureCount; ++k) b[i] -= a[k][i] * b[k];
    b[i] /= a[i][i];
  }
  return b;
}

// How the residuals change with the logarithms of the figures: one column per figure.
Result<std::array<std::vector<double>, kFigureCount>> derivatives(const std::vector<MeasuredCase>& cases,
                                                                  const CostModel& at) {
  std::array<std::vector<double>, kFigureCount> columns;
  for (std::size_t i = 0; i < kFigureCount; ++i) {
    std::array<std::vector<double>, 2> sides;
    for (const int side : {0, 1}) {
      Vector step{};
      step[i] = side == 0 ? -kDerivativeStep : kDerivativeStep;
      Result<std::vector<double>> found = residuals(cases, moved(at, step));
      if (!found.ok()) return found.error();
      sides[static_cast<std::size_t>(side)] = std::move(*found);
    }
    for (std::size_t r = 0; r < sides[0].size(); ++r) {
      columns[i].push_back((sides[1][r] - sides[0][r]) / (2 * kDerivativeStep));
    }
  }
  return columns;
}

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

// Levenberg and Marquardt: steps towards where a straight line through the derivatives says the least squares are,
// shorter when that does not help.
Result<CostModel> calibrate(const std::vector<MeasuredCase>& cases, CostModel start) {
  CostModel best = start;
  Result<std::vector<double>> at = residuals(cases, best);
  if (!at.ok()) return at.error();
  double damping = kFirstDamping;
  for (int pass = 0; pass < kSteps; ++pass) {
    const auto columns = derivatives(cases, best);
    if (!columns.ok()) return columns.error();
    const double before = sum_of_squares(*at);
    double after = before;
    for (; damping < kMostDamping && after >= before; damping *= 4) {
      std::array<Vector, kFigureCount> normal{};
      Vector gradient{};
      for (std::size_t i = 0; i < kFigureCount; ++i) {
        const auto& column = (*columns)[i];
        gradient[i] = -std::inner_product(column.begin(), column.end(), at->begin(), 0.0);
        for (std::size_t j = 0; j < kFigureCount; ++j) {
          normal[i][j] = std::inner_product(column.begin(), column.end(), (*columns)[j].begin(), 0.0);
        }
        normal[i][i] += damping;
      }
      const CostModel tried = moved(best, solve(normal, gradient));
      Result<std::vector<double>> found = residuals(cases, tried);
      if (!found.ok()) return found.error();
      if (sum_of_squares(*found) >= before) continue;
      after = sum_of_squares(*found);
      best = tried;
      at = std::move(found);
      damping /= 16;
    }
    if (before - after <= kLeastGain * before) break;
  }
  return best;
}

std::string figures_text(const CostModel& cost) {
  std::string text;
  for (const Figure& figure : kFigures) text += fmt::format("  cost.{} = {:.4g};\n", figure.name, figure.get(cost));
  return text;
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
