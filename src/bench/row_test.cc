#include "bench/row.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "bench/result_rows.h"

namespace mkernel::bench {
namespace {

namespace fs = std::filesystem;

const Origin kOrigin = {{"NVIDIA H200", "580.1", "13.0", 132}, "abc", "mkernel bench x", "2026-12-01T00:00:00Z"};

std::vector<std::string> keys(const nlohmann::ordered_json& json) {
  std::vector<std::string> names;
  for (const auto& [key, value] : json.items()) names.push_back(key);
  return names;
}

// A file in a folder that goes away with the test.
class RowFile : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("mkernel_row_test_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) + "_" +
               std::to_string(reinterpret_cast<std::uintptr_t>(this)));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path file() const { return folder_ / "rows.json"; }
  nlohmann::ordered_json read() const {
    std::ifstream in(file());
    return nlohmann::ordered_json::parse(in);
  }
  fs::path folder_;
};

CoreResult core_result() {
  CoreResult result;
  result.spec.m = 4096;
  result.spec.n = 4096;
  result.spec.k = 4096;
  result.pairings = {{"cublasGemmEx", 200, 210, {1.04, 1.06, 1.05}}, {"cublasLt (algorithm 2 of 6)", 200, 202, {1.01}}};
  return result;
}

ClusterResult cluster_result() {
  ClusterResult result;
  result.floor_us = 900;
  ClusterTime fused;
  fused.name = kFused;
  fused.us = {1000, 1010, 990};
  result.times = {fused};
  result.sequential = {"sequential (cuBLAS, communication)", 1800, {1.8, 1.7, 1.9}};
  return result;
}

TEST(Row, HasTheMembersInTheirOrder) {
  const std::vector<std::string> expected = {
      "suite", "op",     "topology", "shape",  "ours", "baseline", "unit",    "baseline_name", "ratio",
      "floor", "spread", "gpu",      "driver", "cuda", "commit",   "command", "date",          "detail"};
  EXPECT_EQ(keys(to_json(Row{}, kOrigin)), expected);
}

TEST(Row, HasNoFloorWhereThereIsNone) {
  Row row;
  EXPECT_TRUE(to_json(row, kOrigin)["floor"].is_null());
  row.floor = 12.34567;
  EXPECT_EQ(to_json(row, kOrigin)["floor"].dump(), "12.346");
}

TEST(Row, CoreResultsGiveOneRowPerBaseline) {
  const std::vector<Row> rows = core_rows("gemm_core", {{4096, 4096, 4096}, Dtype::kBf16, false}, core_result(), "13");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].shape, "4096x4096x4096");
  EXPECT_EQ(rows[0].topology, "1x1");
  EXPECT_DOUBLE_EQ(rows[0].ratio, 1.05);
  EXPECT_NEAR(rows[0].spread, 0.02 / 1.05, 1e-12);
  EXPECT_EQ(rows[1].baseline_name, "cublasLt (algorithm 2 of 6)");
  EXPECT_NEAR(rows[0].detail["ours_tflops"].get<double>(), 2 * 4096.0 * 4096 * 4096 / 200e6, 0.1);
}

TEST(Row, ClusterResultsLeaveOutABaselineThatDidNotRun) {
  ClusterProblem problem;
  problem.topo = {2, 4};
  problem.gemm.m = problem.gemm.n = problem.gemm.k = 64;
  const std::vector<Row> rows = cluster_rows("small", problem, cluster_result(), "13");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].topology, "2x4");
  EXPECT_EQ(rows[0].ours, 1000);
  EXPECT_DOUBLE_EQ(rows[0].ratio, 1.8);
  EXPECT_EQ(rows[0].floor, 900);
  EXPECT_TRUE(rows[0].detail["contestants"].contains(kFused));
}

TEST_F(RowFile, GrowsByWhatIsAdded) {
  const std::vector<nlohmann::ordered_json> one = {to_json(Row{}, kOrigin)};
  ASSERT_TRUE(append_rows(file(), one));
  ASSERT_TRUE(append_rows(file(), one));
  ASSERT_TRUE(append_rows(file(), {}));
  EXPECT_EQ(read().size(), 2u);
  EXPECT_EQ(read()[1]["gpu"], "NVIDIA H200");
}

TEST_F(RowFile, IsLeftAloneWhenItHoldsSomethingElse) {
  std::ofstream(file()) << "{\"a\": 1}";
  const std::vector<nlohmann::ordered_json> one = {to_json(Row{}, kOrigin)};
  const Status status = append_rows(file(), one);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::kIo);
  EXPECT_EQ(read()["a"], 1);
}

TEST_F(RowFile, ThatCannotBeWrittenIsAnError) {
  EXPECT_FALSE(append_rows(folder_ / "no" / "such" / "folder.json", {}));
}

TEST(Row, DateIsUtcToTheSecond) {
  const std::string now = utc_now();
  ASSERT_EQ(now.size(), 20u);
  EXPECT_EQ(now[10], 'T');
  EXPECT_EQ(now.back(), 'Z');
}

}  // namespace
}  // namespace mkernel::bench
