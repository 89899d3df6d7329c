// What a comparison with fp64 comes to, element by element.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "exec/reference.h"

namespace mkernel {

// Sums up what the elements show.
class Verdict {
 public:
  void element(std::int64_t row, std::int64_t col, double value, double want, double bound, bool counts) {
    bound *= 1 + 0x1p-20;
    if (!std::isfinite(want) || !std::isfinite(value)) {
      if (value != want) worst(row, col, std::numeric_limits<double>::infinity());
      return;
    }
    const double error = std::abs(value - want);
    if (counts) {
      errors_ += error * error;
      wants_ += want * want;
      bounds_ += bound * bound;
      report_.max_abs_error = std::max(report_.max_abs_error, error);
    }
    if (error > 0) worst(row, col, error / bound);
  }

  CheckReport report(std::int64_t rows) {
    report_.checked_rows = rows;
    report_.ok = report_.worst_ratio <= 1;
    report_.max_rel_error = wants_ > 0 ? std::sqrt(errors_ / wants_) : 0;
    report_.rel_bound = wants_ > 0 ? std::sqrt(bounds_ / wants_) : 0;
    return report_;
  }

 private:
  void worst(std::int64_t row, std::int64_t col, double ratio) {
    if (ratio <= report_.worst_ratio) return;
    report_.worst_ratio = ratio;
    report_.worst_row = row;
    report_.worst_col = col;
  }

  CheckReport report_;
  double errors_ = 0, wants_ = 0, bounds_ = 0;
};

}  // namespace mkernel
