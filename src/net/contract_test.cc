// The transport contract, through rings and proxies, for every kind of network that the local transport models, and for
// libfabric's tcp on the loopback.
#include <gtest/gtest.h>

#include "net/test_world.h"

namespace mkernel {
namespace {

constexpr std::uint64_t kTwo32 = std::uint64_t{1} << 32;

struct NetworkCase {
  const char* name;
  LinkModel link;
  int fabric_pieces = 0;  // see TestWorldOptions
};

class ContractTest : public testing::TestWithParam<std::tuple<NetworkCase, std::uint32_t>> {
 protected:
  void SetUp() override {
    if (std::get<0>(GetParam()).fabric_pieces == 0) return;
    if (const std::string obstacle = fabric_obstacle(); !obstacle.empty()) GTEST_SKIP() << obstacle;
  }
  TestWorldOptions options() const {
    TestWorldOptions options;
    options.fabric_pieces = std::get<0>(GetParam()).fabric_pieces;
    options.link = std::get<0>(GetParam()).link;
    options.ring_depth = std::get<1>(GetParam());
    return options;
  }
};

std::string case_name(const testing::TestParamInfo<std::tuple<NetworkCase, std::uint32_t>>& param_info) {
  return std::string(std::get<0>(param_info.param).name) + "_depth" + std::to_string(std::get<1>(param_info.param));
}

INSTANTIATE_TEST_SUITE_P(Networks, ContractTest,
                         testing::Combine(testing::Values(NetworkCase{"instant", LinkModel{}},
                                                          NetworkCase{"ordered", slow_link()},
                                                          NetworkCase{"jitter", jittery_link()},
                                                          NetworkCase{"unordered1", unordered_link(1)},
                                                          NetworkCase{"unordered2", unordered_link(2)},
                                                          NetworkCase{"unordered3", unordered_link(3)},
                                                          NetworkCase{"unordered4", unordered_link(4)}),
                                          testing::Values(1u, 2u, 4u, 256u)),
                         case_name);

INSTANTIATE_TEST_SUITE_P(Libfabric, ContractTest,
                         testing::Combine(testing::Values(NetworkCase{"tcp1", LinkModel{}, 1},
                                                          NetworkCase{"tcp3", LinkModel{}, 3}),
                                          testing::Values(1u, 256u)),
                         case_name);

TEST_P(ContractTest, EveryPutOfEveryPlanArrivesOnceAndWholeBeforeItsStamp) {
  const PlanSpec specs[] = {
      small_spec(Op::kGemmReduceScatter, 3, 2, 300, 130), small_spec(Op::kAllGatherGemm, 3, 2, 250, 70),
      small_spec(Op::kGemmAllReduce, 2, 2, 100, 130),     small_spec(Op::kGemmAllReduce, 3, 2, 100, 130),
      small_spec(Op::kGemmReduceScatter, 4, 1, 3, 33),  // fewer rows than ranks
  };
  for (const PlanSpec& spec : specs) {
    SCOPED_TRACE(std::string(op_name(spec.op)) + " on " + std::to_string(spec.topo.nodes) + "x" +
                 std::to_string(spec.topo.gpus));
    const PlanSource source{Plan(spec)};
    for (const std::uint64_t start : {std::uint64_t{1}, kTwo32 - 3}) {
      if (start == 1 && options().fabric_pieces > 0) continue;  // in real time, and worlds take long to connect
      TestWorld world(spec.topo, options());
      world.add_operator(5, source, start - 1);
      world.run_epochs(5, start, 4);
      expect_all_delivered(world);
      for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
        EXPECT_EQ(world.proxy(rank).stats().bytes, 4 * source.plan().network_bytes(rank));
      }
    }
  }
}

TEST_P(ContractTest, NothingIsLostWhenOnePostInAHundredFails) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 2, 600, 260))};
  TestWorldOptions flaky = options();
  flaky.link.again_probability = 0.01;
  TestWorld world(source.plan().topo(), flaky);
  for (std::int32_t rank = 0; world.over_fabric() && rank < world.topo().world(); ++rank) {
    world.endpoint(rank).fails = [](std::int64_t call, const Put&) { return call % 100 == 7; };
  }
  world.add_operator(0, source);
  world.run_epochs(0, 1, 6);
  expect_all_delivered(world);
  EXPECT_GT(world.total().retries, 0);
}

// A plan whose every second put is cut down to 1..16 elements.
class AlternatingSource : public PlanSource {
 public:
  using PlanSource::PlanSource;
  Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const override {
    Task task = PlanSource::task(rank, role, lane, index);
    if (role == Role::kSend && index % 2 == 0) task.length = std::min<std::int64_t>(task.length, 1 + index / 2 % 16);
    return task;
  }
};

// reliability.md, case 7.
TEST(PayloadTest, HundredThousandSmallAndLargePutsInTurnKeepTheContract) {
  PlanSpec spec = small_spec(Op::kGemmReduceScatter, 3, 1, 3 * 64, 32 * 32);
  spec.tiling.chunk_tiles = 8;  // 8 KiB
  const AlternatingSource source{Plan(spec)};
  const auto chunks = source.count(0, Role::kSend, 0);
  const std::int64_t per_epoch = 3 * 2 * chunks;
  for (const LinkModel& link : {jittery_link(), unordered_link(3)}) {
    TestWorldOptions options;
    options.link = link;
    TestWorld world(spec.topo, options);
    world.add_operator(1, source);
    std::int64_t small = 0;
    std::int64_t large = 0;
    world.heaps.on_stamp = [&](const Put& put) { ++(put.bytes <= 32 ? small : large); };
    const auto epochs = static_cast<std::uint64_t>(50'000 / per_epoch + 1);
    world.run_epochs(1, 1, epochs + epochs % 2);
    expect_all_delivered(world);
    EXPECT_GE(small + large, 50'000);
    EXPECT_EQ(small, large);
  }
}

// reliability.md, case 8: bytes are bytes, whatever they would mean as numbers.
TEST(PayloadTest, PayloadsOfEveryOddNumberArriveBitForBit) {
  const std::vector<std::uint16_t> odd = {0x8000, 0x0000, 0x0001, 0x8001, 0x7f80, 0xff80, 0x7f81, 0xff81,
                                          0x7fc0, 0xffff, 0x7fff, 0x7c00, 0xfc00, 0x7c01, 0x7e00, 0x03ff};
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 2, 1, 128, 64))};
  for (const LinkModel& link : {slow_link(), unordered_link(4)}) {
    TestWorldOptions options;
    options.link = link;
    TestWorld world(source.plan().topo(), options);
    world.add_operator(0, source);
    std::uint64_t epoch = 1;
    const auto run_filled = [&](auto fill) {
      for (const TestWorld::Send& send : world.sends(0, 0, epoch)) {
        while (!world.push(send, fill)) world.advance();
      }
      world.run_until_quiet();
      ++epoch;
    };
    for (const std::uint16_t bits : odd) {
      run_filled([&](std::int64_t i) { return static_cast<std::uint8_t>(i % 2 == 0 ? bits : bits >> 8); });
    }
    run_filled([](std::int64_t) { return std::uint8_t{0xff}; });
    run_filled([](std::int64_t) { return std::uint8_t{0}; });
    // All 65,536 patterns in turn, 2 bytes each.
    for (std::int64_t base = 0; base < 65'536; base += 1'024) {
      run_filled([&](std::int64_t i) {
        const std::int64_t bits = base + i / 2 % 1'024;
        return static_cast<std::uint8_t>(i % 2 == 0 ? bits : bits >> 8);
      });
    }
    expect_all_delivered(world);
  }
}

TEST(PayloadTest, PutsWithoutBytesStillStamp) {
  // 1 row over 6 ranks: five shards are empty, their chunks are sent all the same.
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 2, 1, 64))};
  for (const LinkModel& link : {slow_link(), unordered_link(1), unordered_link(4)}) {
    TestWorldOptions options;
    options.link = link;
    TestWorld world(source.plan().topo(), options);
    world.add_operator(0, source);
    std::int64_t empty = 0;
    world.heaps.on_stamp = [&](const Put& put) { empty += put.bytes == 0; };
    world.run_epochs(0, 1, 2);
    expect_all_delivered(world);
    EXPECT_GT(empty, 0);
  }
}

TEST(PayloadTest, SeveralOperatorsShareOneWorld) {
  const PlanSource a{Plan(small_spec(Op::kGemmReduceScatter, 3, 2, 200, 130))};
  const PlanSource b{Plan(small_spec(Op::kAllGatherGemm, 3, 2, 100, 130))};
  const PlanSource c{Plan(small_spec(Op::kGemmAllReduce, 3, 2, 100, 130))};
  for (const LinkModel& link : {jittery_link(), unordered_link(4)}) {
    TestWorldOptions options{.link = link};
    options.ring_depth = 1;
    TestWorld world(a.plan().topo(), options);
    world.add_operator(0, a, 40);
    world.add_operator(31, b, kTwo32 - 1);
    world.add_operator(63, c);
    std::vector<std::vector<TestWorld::Send>> lists;
    for (std::int32_t rank = 0; rank < 6; ++rank) {
      lists.push_back(world.sends(0, rank, 41));
      lists.push_back(world.sends(31, rank, kTwo32));
      lists.push_back(world.sends(63, rank, 1));
    }
    world.run(std::move(lists));
    expect_all_delivered(world);
  }
}

}  // namespace
}  // namespace mkernel
