#include "cli/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "cli/format.h"
#include "plan/kv_ring.h"

namespace mkernel::cli {

double Times::median() const {
  MK_CHECK(!us_.empty());
  std::vector<double> sorted = us_;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

double Times::min() const { return *std::min_element(us_.begin(), us_.end()); }
double Times::max() const { return *std::max_element(us_.begin(), us_.end()); }

std::string Times::text() const {
  if (us_.size() == 1) return format_us(us_[0]);
  return fmt::format("{} (median of {}, {} to {})", format_us(median()), us_.size(), format_us(min()),
                     format_us(max()));
}

nlohmann::ordered_json Times::json(const PlanSpec& spec) const {
  return {{"median_us", median()},
          {"min_us", min()},
          {"max_us", max()},
          {"times_us", us_},
          {"flops_per_s", median() > 0 ? flops(spec) / (median() * 1e-6) : 0}};
}

double flops(const PlanSpec& spec) {
  if (attends(spec.op)) {
    const AttentionSpec& a = spec.attention;
    const double pairs = static_cast<double>(a.seq_q) * static_cast<double>(a.seq_k) * (a.mask.causal ? 0.5 : 1.0);
    const double products = spec.op == Op::kRingAttention ? 2 : 5;
    return 2 * products * static_cast<double>(a.batch * a.heads * a.dim) * pairs;
  }
  return 2.0 * static_cast<double>(spec.m) * static_cast<double>(spec.n) * static_cast<double>(spec.k);
}

std::string network_text(const PlanSpec& spec, std::int64_t bytes, std::int64_t bound) {
  const double world = spec.topo.world();
  return fmt::format("{} per GPU over the network, lower bound {}", format_bytes(static_cast<double>(bytes) / world),
                     format_bytes(static_cast<double>(bound) / world));
}

nlohmann::ordered_json network_json(const PlanSpec& spec, std::int64_t bytes, std::int64_t bound) {
  const double world = spec.topo.world();
  return {{"bytes", bytes},
          {"bytes_bound", bound},
          {"bytes_per_gpu", static_cast<double>(bytes) / world},
          {"bytes_bound_per_gpu", static_cast<double>(bound) / world}};
}

nlohmann::ordered_json attention_json(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  const bool backward = spec.op == Op::kRingAttentionBackward;
  KvRing ring;
  ring.make_ring(spec, backward);
  nlohmann::ordered_json tiling = {{"bm", spec.tiling.bm}, {"chunk_rows", spec.tiling.chunk_rows}};
  if (backward) tiling["bn"] = spec.tiling.bn;
  return {{"operator", op_name(spec.op)},
          {"nodes", spec.topo.nodes},
          {"gpus", spec.topo.gpus},
          {"batch", a.batch},
          {"heads", a.heads},
          {"kv_heads", a.kv_heads},
          {"dim", a.dim},
          {"seq_q", a.seq_q},
          {"seq_k", a.seq_k},
          {"causal", a.mask.causal},
          {"window_left", a.mask.left},
          {"window_right", a.mask.right},
          {"zigzag", a.zigzag},
          {"packed", a.packed},
          {"scale", a.scale},
          {"dtype", dtype_name(spec.dtype)},
          {"partial_dtype", dtype_name(spec.partial)},
          {"tiling", tiling},
          {"slot_rounds", ring.depth},
          {"rounds", ring.rounds}};
}

nlohmann::ordered_json spec_json(const PlanSpec& spec) {
  if (attends(spec.op)) return attention_json(spec);
  return {{"operator", op_name(spec.op)},
          {"nodes", spec.topo.nodes},
          {"gpus", spec.topo.gpus},
          {"m", spec.m},
          {"n", spec.n},
          {"k", spec.k},
          {"dtype", dtype_name(spec.dtype)},
          {"partial_dtype", dtype_name(spec.partial)},
          {"tiling",
           {{"bm", spec.tiling.bm},
            {"bn", spec.tiling.bn},
            {"band", spec.tiling.band},
            {"chunk_tiles", spec.tiling.chunk_tiles},
            {"chunk_rows", spec.tiling.chunk_rows},
            {"grid_shards", spec.tiling.grid_shards}}}};
}

nlohmann::ordered_json partition_json(const Partition& partition) {
  return {{"compute", partition.compute}, {"intra", partition.intra}, {"recv", partition.recv}};
}

std::string check_text(const PlanSpec& spec, const CheckReport& check) {
  const AttentionSpec& a = spec.attention;
  const std::int64_t rows = attends(spec.op) ? a.batch * a.heads * a.seq_q : spec.m;
  return fmt::format("max relative error {:.2e}, bound {:.2e}; worst element at {:.2f} of its bound; {} of {} rows",
                     check.max_rel_error, check.rel_bound, check.worst_ratio, check.checked_rows, rows);
}

std::string check_text(const PlanSpec&, const GradientReport& check) {
  return fmt::format(
      "max relative errors {:.2e} of dQ, {:.2e} of dK, {:.2e} of dV; worst element of {} at {:.2f} of its bound; {} "
      "and "
      "{} rows",
      check.dq.max_rel_error, check.dk.max_rel_error, check.dv.max_rel_error, check.worst_name(),
      check.worst().worst_ratio, check.dq.checked_rows, check.dk.checked_rows);
}

nlohmann::ordered_json check_json(const GradientReport& check) {
  return {{"ok", check.ok()},
          {"worst_ratio", check.worst().worst_ratio},
          {"dq", check_json(check.dq)},
          {"dk", check_json(check.dk)},
          {"dv", check_json(check.dv)}};
}

nlohmann::ordered_json check_json(const CheckReport& check) {
  return {{"ok", check.ok},
          {"rows", check.checked_rows},
          {"max_rel_error", check.max_rel_error},
          {"rel_bound", check.rel_bound},
          {"max_abs_error", check.max_abs_error},
          {"worst_ratio", check.worst_ratio},
          {"worst_row", check.worst_row},
          {"worst_col", check.worst_col}};
}

}  // namespace mkernel::cli
