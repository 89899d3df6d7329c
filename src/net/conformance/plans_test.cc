// The contract through rings and proxies, for the puts of real plans, over every network between processes.
// src/net/contract_test.cc has the same for the local one.
#include <gtest/gtest.h>

#include "net/conformance/networks.h"
#include "net/test_world.h"

namespace mkernel {
namespace {

std::vector<NetworkKind> kinds_that_tell() {
  std::vector<NetworkKind> kinds;
  for (const NetworkKind& kind : network_kinds()) {
    // Without `notify` nobody says when a stamp has come, which is when these tests look at the bytes.
    if (kind.family != NetworkKind::Family::kLocal && kind.notify) kinds.push_back(kind);
  }
  return kinds;
}

class PlansTest : public testing::TestWithParam<NetworkKind> {
 protected:
  void SetUp() override {
    if (const std::string obstacle = network_obstacle(GetParam()); !obstacle.empty()) GTEST_SKIP() << obstacle;
  }
  TestWorldOptions options(std::uint32_t ring_depth) const {
    TestWorldOptions options;
    options.ring_depth = ring_depth;
    options.make_endpoint = [](std::int32_t rank, std::int32_t world) {
      return make_endpoint(GetParam(), rank, world, 32);
    };
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Networks, PlansTest, testing::ValuesIn(kinds_that_tell()),
                         [](const auto& param) { return network_name(param.param); });

TEST_P(PlansTest, EveryPutOfEveryPlanArrivesOnceAndWholeBeforeItsStamp) {
  for (const PlanSpec& spec :
       {small_spec(Op::kGemmReduceScatter, 3, 2, 300, 130), small_spec(Op::kAllGatherGemm, 3, 1, 250, 70),
        small_spec(Op::kGemmAllReduce, 2, 2, 100, 130), small_spec(Op::kGemmAllReduce, 3, 1, 100, 130)}) {
    SCOPED_TRACE(std::string(op_name(spec.op)) + " on " + std::to_string(spec.topo.nodes) + "x" +
                 std::to_string(spec.topo.gpus));
    const PlanSource source{Plan(spec)};
    for (const std::uint32_t ring_depth : {1u, 64u}) {
      const std::uint64_t start = (std::uint64_t{1} << 32) - 3;
      TestWorld world(spec.topo, options(ring_depth));
      world.add_operator(5, source, start - 1);
      world.run_epochs(5, start, 4);
      expect_all_delivered(world);
    }
  }
}

TEST_P(PlansTest, NothingIsLostWhenOnePostInSevenFails) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 300, 130))};
  TestWorld world(source.plan().topo(), options(4));
  for (std::int32_t rank = 0; rank < world.topo().world(); ++rank) {
    world.endpoint(rank).fails = [](std::int64_t call, const Put&) { return call % 7 == 3; };
  }
  world.add_operator(0, source);
  world.run_epochs(0, 1, 6);
  expect_all_delivered(world);
  EXPECT_GT(world.total().retries, 0);
}

}  // namespace
}  // namespace mkernel
