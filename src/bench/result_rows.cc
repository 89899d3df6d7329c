#include "bench/result_rows.h"

#include <fmt/format.h>

#include <cmath>

namespace mkernel::bench {
namespace {

using Json = nlohmann::ordered_json;

double rounded(double value, double steps_per_unit) {
  return std::isfinite(value) ? std::round(value * steps_per_unit) / steps_per_unit : value;
}
Json rounded(const std::vector<double>& values, double steps_per_unit) {
  Json list = Json::array();
  for (const double value : values) list.push_back(rounded(value, steps_per_unit));
  return list;
}
constexpr double kNanoseconds = 1e3;  // of times in us
constexpr double kRatioSteps = 1e4;

Json tiling_json(const PlanSpec& spec) {
  return {{"bm", spec.tiling.bm},
          {"bn", spec.tiling.bn},
          {"band", spec.tiling.band},
          {"chunk_tiles", spec.tiling.chunk_tiles},
          {"chunk_rows", spec.tiling.chunk_rows}};
}

double teraflops(const PlanSpec& spec, double us) {
  const double flops = 2.0 * static_cast<double>(spec.m) * static_cast<double>(spec.n) * static_cast<double>(spec.k);
  return us > 0 ? flops / us * 1e-6 : 0;
}

Json time_json(const ClusterTime& time) {
  Json json = {{"us", rounded(median(time.us), kNanoseconds)},
               {"rounds_us", rounded(time.us, kNanoseconds)},
               {"calls", time.calls},
               {"host_us", rounded(time.host_us, kNanoseconds)},
               {"clock_mhz", time.clock_mhz}};
  if (!time.checked.empty()) json["checked"] = time.checked;
  return json;
}

Json partition_json(const Partition& p) { return {{"compute", p.compute}, {"intra", p.intra}, {"recv", p.recv}}; }

Json link_json(const LinkRule& rule, const LinkRate& rate) {
  return {{"rule", link_text(rule)},
          {"gigabytes_per_s", rounded(rate.gigabytes_per_s, 1e3)},
          {"latency_us", rate.latency_us}};
}

// Two rows of one comparison: times, and bytes per GPU that the network carries.
std::vector<Row> movement_rows(const std::string& suite, const ClusterProblem& problem) {
  const Topology flat = flat_topology(problem.topo);
  Row time;
  time.suite = suite;
  time.op = op_name(problem.gemm.op);
  time.topology = topology_text(problem.topo.nodes, problem.topo.gpus);
  time.shape = shape_text(problem.gemm.m, problem.gemm.n, problem.gemm.k);
  time.baseline_name = fmt::format("flat movement ({})", topology_text(flat.nodes, flat.gpus));
  Row bytes = time;
  bytes.unit = "bytes";
  return {time, bytes};
}

Json movement_json(const MovementResult& result) {
  return {{"topology", topology_text(result.topo.nodes, result.topo.gpus)},
          {"tiling", tiling_json(result.spec)},
          {"partition", partition_json(result.partition)},
          {"network_bytes", rounded(result.network_bytes, 1)},
          {"plan_bytes", result.plan_bytes},
          {"error", result.error},
          {"time", time_json(result.time)}};
}

Json cluster_detail(const ClusterProblem& problem, const ClusterResult& result) {
  Json times = Json::object();
  for (const ClusterTime& time : result.times) {
    if (!time.us.empty()) times[time.name] = time_json(time);
  }
  Json sweep = Json::array();
  for (const ClusterResult::Swept& swept : result.sweep) {
    sweep.push_back({{"movers", swept.movers}, {"us", rounded(swept.us, kNanoseconds)}});
  }
  Json detail = {{"dtype", dtype_name(result.spec.dtype)},
                 {"partial_dtype", dtype_name(result.spec.partial)},
                 {"sms", result.sms},
                 {"tiling", tiling_json(result.spec)},
                 {"partition", partition_json(result.partition)},
                 {"link", link_json(problem.link, result.link)},
                 {"wire_bytes", result.wire_bytes},
                 {"wire_us", rounded(result.wire_us, kNanoseconds)},
                 {"floor_by_wire", rounded(result.floor_by_wire_us, kNanoseconds)},
                 {"workspace_bytes", result.workspace_bytes},
                 {"error", result.error},
                 {"contestants", times}};
  if (!result.sweep.empty()) detail["sweep"] = sweep;
  return detail;
}

}  // namespace

std::vector<Row> ring_rows(const RingResult& result) {
  constexpr double kRoundTripBarUs = 4;
  constexpr double kRecordsBarPerUs = 1;
  Row trip;
  trip.suite = "command_ring";
  trip.op = "round trip GPU - proxy - GPU";
  trip.topology = topology_text(2, 1);
  trip.shape = "empty puts, " + result.wire;
  trip.ours = median(result.round_trip_us);
  trip.baseline = kRoundTripBarUs;
  trip.baseline_name = "bar";
  trip.ratio = kRoundTripBarUs / trip.ours;
  trip.spread = summarise(result.round_trip_us).spread;
  trip.detail = {{"wire", result.wire},
                 {"rounds_us", rounded(result.round_trip_us, kNanoseconds)},
                 {"p99_us", rounded(result.p99_us, kNanoseconds)}};
  Row rate = trip;
  rate.op = "records per proxy";
  rate.unit = "records/us";
  rate.ours = median(result.records_per_us);
  rate.baseline = kRecordsBarPerUs;
  rate.ratio = rate.ours / kRecordsBarPerUs;
  rate.spread = summarise(result.records_per_us).spread;
  rate.detail = {{"wire", result.wire}, {"rounds_records_per_us", rounded(result.records_per_us, kRatioSteps)}};
  return {trip, rate};
}

std::vector<Row> core_rows(const std::string& suite, const CoreProblem& problem, const CoreResult& result,
                           const std::string& cublas_version) {
  std::vector<Row> rows;
  for (const CorePairing& pairing : result.pairings) {
    const Summary ratio = summarise(pairing.ratios);
    Row row;
    row.suite = suite;
    row.op = "gemm";
    row.topology = topology_text(1, 1);
    row.shape = shape_text(problem.shape.m, problem.shape.n, problem.shape.k);
    row.ours = pairing.ours_us;
    row.baseline = pairing.baseline_us;
    row.baseline_name = pairing.baseline;
    row.ratio = ratio.median;
    row.spread = ratio.spread;
    Json lt = Json::array();
    for (const CoreResult::LtAlgorithm& algorithm : result.lt) {
      lt.push_back({{"algorithm", algorithm.text}, {"ratio_to_gemm_ex", rounded(algorithm.ratio, kRatioSteps)}});
    }
    row.detail = {{"dtype", dtype_name(problem.dtype)},
                  {"b", problem.b_transposed ? "transposed" : "row-major"},
                  {"sms", result.sms},
                  {"tiling", tiling_json(result.spec)},
                  {"ours_tflops", rounded(teraflops(result.spec, pairing.ours_us), 10)},
                  {"baseline_tflops", rounded(teraflops(result.spec, pairing.baseline_us), 10)},
                  {"ratios", rounded(pairing.ratios, kRatioSteps)},
                  {"error", result.error},
                  {"input_sets", result.input_sets},
                  {"launches_per_block", result.launches_per_block},
                  {"clock_mhz", result.clock_mhz},
                  {"cublas", cublas_version},
                  {"cublas_lt", lt}};
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<Row> cluster_rows(const std::string& suite, const ClusterProblem& problem, const ClusterResult& result,
                              const std::string& cublas_version) {
  const ClusterTime* fused = result.find(kFused);
  std::vector<Row> rows;
  if (fused == nullptr || fused->us.empty()) return rows;
  for (const ClusterResult::Comparison* comparison : {&result.sequential, &result.chunked}) {
    if (comparison->ratios.empty()) continue;
    const Summary ratio = summarise(comparison->ratios);
    Row row;
    row.suite = suite;
    row.op = op_name(problem.gemm.op);
    row.topology = topology_text(problem.topo.nodes, problem.topo.gpus);
    row.shape = shape_text(problem.gemm.m, problem.gemm.n, problem.gemm.k);
    row.ours = median(fused->us);
    row.baseline = comparison->baseline_us;
    row.baseline_name = comparison->baseline;
    row.ratio = ratio.median;
    row.floor = result.floor_us;
    row.spread = ratio.spread;
    row.detail = cluster_detail(problem, result);
    row.detail["ratios"] = rounded(comparison->ratios, kRatioSteps);
    row.detail["cublas"] = cublas_version;
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<Row> hierarchy_rows(const std::string& suite, const ClusterProblem& problem,
                                const HierarchyResult& result) {
  std::vector<Row> rows = movement_rows(suite, problem);
  const Summary ratio = summarise(result.ratios);
  Row& time = rows[0];
  time.ours = median(result.hierarchical.time.us);
  time.baseline = median(result.flat.time.us);
  time.ratio = ratio.median;
  time.spread = ratio.spread;
  Row& bytes = rows[1];
  bytes.ours = result.hierarchical.network_bytes;
  bytes.baseline = result.flat.network_bytes;
  bytes.ratio = bytes.ours > 0 ? bytes.baseline / bytes.ours : 0;
  for (Row& row : rows) {
    row.detail = {{"dtype", dtype_name(problem.gemm.dtype)},
                  {"sms", result.sms},
                  {"link", link_json(problem.link, result.link)},
                  {"ratios", rounded(result.ratios, kRatioSteps)},
                  {"hierarchical", movement_json(result.hierarchical)},
                  {"flat", movement_json(result.flat)}};
  }
  return rows;
}

std::vector<Row> simulated_hierarchy_rows(const ClusterProblem& problem, const SimulatedPair& pair) {
  std::vector<Row> rows = movement_rows("sim_hierarchical", problem);
  rows[0].ours = pair.hierarchical_us;
  rows[0].baseline = pair.flat_us;
  rows[1].ours = pair.hierarchical_bytes;
  rows[1].baseline = pair.flat_bytes;
  for (Row& row : rows) {
    row.ratio = row.ours > 0 ? row.baseline / row.ours : 0;
    row.detail = {{"preset", pair.preset}, {"sms", pair.sms}, {"link", link_json(problem.link, pair.link)}};
  }
  return rows;
}

}  // namespace mkernel::bench
