// The simulator against what was measured on a virtual cluster.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/row.h"
#include "exec/sim/cost_model.h"
#include "plan/spec.h"

namespace mkernel::bench {

// A case of the suite virtual_cluster.
struct MeasuredCase {
  Row row;  // the measured one
  Origin origin;
  PlanSpec spec;
  int sms = 0;  // of a rank
  Partition partition;
  double gigabytes_per_s = 0;  // of the link; 0: none
  double latency_us = 0;
  double us = 0;                 // fused
  bool for_calibration = false;  // every second case, by name; the others are predicted
};

// The cases in `rows`, the content of a results file, by name; of repeated ones the last. Errors: kBadArgument when it
// is no such file.
Result<std::vector<MeasuredCase>> read_measured(const nlohmann::ordered_json& rows);

// What the simulator says of a case, in us.
Result<double> simulated_us(const MeasuredCase& measured, const CostModel& cost);

// The figures of `start` that were not known, moved until the cases for calibration are met best (least squares of the
// logarithms).
Result<CostModel> calibrate(const std::vector<MeasuredCase>& cases, CostModel start);

// The figures that calibrate() fits, as lines for the preset in exec/sim/cost_model.cc.
std::string figures_text(const CostModel& cost);

// The row that compares both; `ratio` is simulated / measured.
Row simulated_row(const MeasuredCase& measured, double simulated_us);

}  // namespace mkernel::bench
