#include "bench/shapes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "bench/cluster_cases.h"
#include "exec/cuda/kernel_config.h"
#include "ops/gemm_spec.h"

namespace mkernel::bench {
namespace {

TEST(BenchShapes, NoOddShapeIsAMultipleOfTheLargestTileInAllSizes) {
  for (const Shape& shape : odd_shapes()) {
    const TileShape& tile = kTileShapes[0];
    EXPECT_FALSE(shape.m % tile.bm == 0 && shape.n % tile.bn == 0 && shape.k % kBlockK == 0)
        << shape.m << " x " << shape.n << " x " << shape.k;
  }
}

TEST(BenchShapes, OddShapesAreThirtyDifferentOnes) {
  std::set<std::string> names;
  for (const Shape& s : odd_shapes()) {
    names.insert(std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k));
  }
  EXPECT_EQ(names.size(), 30u);
  const auto has = [](auto test) { return std::ranges::any_of(odd_shapes(), test); };
  EXPECT_TRUE(has([](const Shape& s) { return s.n % 8 != 0; }));
  EXPECT_TRUE(has([](const Shape& s) { return s.k % 8 != 0; }));
  EXPECT_TRUE(has([](const Shape& s) { return s.k < 64; }));
  for (const std::int64_t m : {1, 16, 64, 128}) EXPECT_TRUE(has([=](const Shape& s) { return s.m == m; })) << m;
}

TEST(BenchShapes, CoreShapesAreThoseOfTheIssue) {
  const std::vector<Shape> shapes = core_shapes();
  EXPECT_EQ(shapes.size(), 13u);
  for (const Shape& wanted : {Shape{8192, 8192, 8192}, Shape{2048, 128, 2048}, Shape{2048, 2048, 128},
                              Shape{32768, 2048, 32768}, Shape{32768, 32768, 2048}}) {
    EXPECT_EQ(std::ranges::count(shapes, wanted), 1);
  }
}

TEST(ClusterCases, EveryCaseHasAPlanAndANameOfItsOwn) {
  for (const auto& cases : {virtual_cluster_cases(), small_cases()}) {
    std::set<std::string> names;
    for (const ClusterProblem& problem : cases) {
      EXPECT_TRUE(make_gpu_gemm_spec(problem.topo, problem.gemm, 16)) << case_name(problem);
      EXPECT_TRUE(names.insert(case_name(problem)).second) << case_name(problem);
    }
    for (int op = 0; op < kGemmOpCount; ++op) {
      EXPECT_TRUE(
          std::ranges::any_of(cases, [=](const ClusterProblem& p) { return static_cast<int>(p.gemm.op) == op; }));
    }
  }
}

TEST(ClusterCases, CoverTheTopologiesAndBothLinks) {
  std::set<std::string> seen;
  for (const ClusterProblem& p : virtual_cluster_cases()) {
    seen.insert(std::to_string(p.topo.nodes) + "x" + std::to_string(p.topo.gpus) + " " + link_text(p.link));
  }
  for (const char* topology : {"2x4", "2x2", "4x2", "3x2"}) {
    EXPECT_EQ(seen.count(std::string(topology) + " scaled"), 1u) << topology;
    EXPECT_EQ(seen.count(std::string(topology) + " balanced"), 1u) << topology;
  }
  EXPECT_EQ(seen.count("1x8 none"), 1u);
}

}  // namespace
}  // namespace mkernel::bench
