#include "bench/sim_vs_measured.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>

namespace mkernel::bench {
namespace {

nlohmann::ordered_json committed() {
  std::ifstream file(std::string(MKERNEL_SOURCE_DIR) + "/bench/results/virtual_cluster-h200.json");
  return nlohmann::ordered_json::parse(file);
}

TEST(SimVsMeasured, PredictsTheOtherHalfWithin15Percent) {
  const Result<std::vector<MeasuredCase>> cases = read_measured(committed());
  ASSERT_TRUE(cases.ok()) << cases.error().message;
  const CostModel cost = find_preset("h200-virtual").value();
  int predicted = 0;
  for (const MeasuredCase& measured : *cases) {
    const Result<double> us = simulated_us(measured, cost);
    ASSERT_TRUE(us.ok()) << us.error().message;
    if (measured.for_calibration) continue;
    const std::string name = measured.row.op + " " + measured.row.topology + " " + measured.row.shape + " " +
                             measured.row.detail.at("link").at("rule").get<std::string>();
    EXPECT_LT(std::abs(*us / measured.us - 1), 0.15) << name << ": " << *us << " for " << measured.us;
    ++predicted;
  }
  EXPECT_GE(predicted, 23);
}

TEST(SimVsMeasured, CalibrationFindsItsWayBack) {
  Result<std::vector<MeasuredCase>> cases = read_measured(committed());
  ASSERT_TRUE(cases.ok()) << cases.error().message;
  cases->resize(8);
  const CostModel truth = find_preset("h200-virtual").value();
  for (MeasuredCase& measured : *cases) measured.us = simulated_us(measured, truth).value();
  CostModel start = truth;
  start.gemm_efficiency *= 0.7;
  const Result<CostModel> found = calibrate(*cases, start);
  ASSERT_TRUE(found.ok()) << found.error().message;
  for (const MeasuredCase& measured : *cases) {
    if (!measured.for_calibration) continue;
    EXPECT_NEAR(simulated_us(measured, *found).value() / measured.us, 1, 0.03);
  }
}

TEST(SimVsMeasured, RefusesOtherFiles) {
  const auto message = [](const char* text) {
    const Result<std::vector<MeasuredCase>> cases = read_measured(nlohmann::ordered_json::parse(text));
    return cases.ok() ? "" : cases.error().message;
  };
  EXPECT_NE(message("[]").find("there are no results"), std::string::npos);
  EXPECT_NE(message("[{}]").find("these are no results"), std::string::npos);
  EXPECT_NE(message(R"([{"suite": "virtual_cluster"}])").find("these are no results"), std::string::npos);
}

}  // namespace
}  // namespace mkernel::bench
