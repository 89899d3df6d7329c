#include "bench/statistics.h"

#include <algorithm>

#include "base/check.h"

namespace mkernel::bench {

double median(std::span<const double> values) {
  MK_CHECK(!values.empty());
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const std::size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

Summary summarise(std::span<const double> per_round) {
  Summary summary;
  summary.median = median(per_round);
  const auto [low, high] = std::minmax_element(per_round.begin(), per_round.end());
  summary.spread = summary.median == 0 ? 0 : (*high - *low) / summary.median;
  return summary;
}

double paired_ratio(double baseline_before, double ours, double baseline_after) {
  MK_CHECK(ours > 0);
  return (baseline_before + baseline_after) / 2 / ours;
}

std::vector<std::size_t> balanced_order(std::size_t count, int round) {
  // From the middle outwards, 0 1 -1 2 -2 ..., neighbours are 1, -2, 3, -4, ... apart, which are all different modulo
  // an even count; every round adds one to all.
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t away = i % 2 == 1 ? (i + 1) / 2 : count - i / 2;
    order[i] = (away + static_cast<std::size_t>(round)) % count;
  }
  if (count % 2 == 1 && round % 2 == 1) std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace mkernel::bench
