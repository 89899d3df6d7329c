#include "net/proxy.h"

#include <gtest/gtest.h>

#include <set>

#include "net/allocation_count.h"
#include "net/test_world.h"

namespace mkernel {
namespace {

constexpr std::uint64_t kTwo32 = std::uint64_t{1} << 32;

// Epochs.

TEST(ProxyTest, EpochsAreRebuiltFromEightBitsAcrossEveryWrapAndInAnyOrder) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 64))};
  for (const std::uint64_t start : {std::uint64_t{1}, std::uint64_t{250}, kTwo32 - 4, 2 * kTwo32 - 2}) {
    TestWorld world(source.plan().topo(), {.link = slow_link()});
    world.add_operator(0, source, start);
    // The ring of node 1 is always an epoch ahead of that of node 2. expect() checks epoch, parity and value.
    for (std::uint64_t epoch = start; epoch < start + 600; ++epoch) {
      for (std::int64_t i = 0; i < source.count(0, Role::kSend, 0); ++i) {
        ASSERT_TRUE(world.push({0, 0, {0, i}, epoch + 1}));
        world.run_until_quiet();
        ASSERT_TRUE(world.push({0, 0, {1, i}, epoch}));
        world.run_until_quiet();
      }
    }
    expect_all_delivered(world);
  }
}

TEST(ProxyTest, ALateRecordDoesNotSetTheEpochBack) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 64))};
  TestWorld world(source.plan().topo(), {.link = slow_link()});
  world.add_operator(0, source, 290);
  // 340 is within 128 of the highest epoch seen, but not of the last one.
  for (const auto& [lane, epoch] : {std::pair(0, 300), std::pair(1, 200), std::pair(0, 340)}) {
    ASSERT_TRUE(world.push({0, 0, {lane, 0}, static_cast<std::uint64_t>(epoch)}));
    world.run_until_quiet();
  }
  expect_all_delivered(world);
}

// Steps.

TEST(ProxyTest, StepsDoNotAllocate) {
  if (!counts_allocations()) GTEST_SKIP() << "counting allocations needs operator new, which the sanitizer has taken";
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 2, 300, 130))};
  for (const LinkModel& link : {jittery_link(), unordered_link(2)}) {
    for (const bool hinted : {false, true}) {
      TestWorldOptions options{.link = link};
      options.link.again_probability = 0.01;
      options.hinted = hinted;
      TestWorld world(source.plan().topo(), options);
      world.add_operator(0, source);
      std::vector<TestWorld::Send> sends[6];
      for (std::int32_t rank = 0; rank < 6; ++rank) sends[rank] = world.sends(0, rank, 1);
      std::size_t next[6] = {};
      std::int64_t in_steps = 0;
      world.endpoint(0).fails = [](std::int64_t call, const Put&) { return call % 5 == 0; };
      const auto step_all = [&] {
        const std::int64_t before = allocation_count();
        const bool moved = world.advance();
        in_steps += allocation_count() - before;
        return moved;
      };
      for (bool left = true; left;) {
        left = false;
        for (std::int32_t rank = 0; rank < 6; ++rank) {
          if (next[rank] < sends[rank].size()) left = true;
          if (next[rank] < sends[rank].size() && world.push(sends[rank][next[rank]])) ++next[rank];
        }
        step_all();
      }
      world.network().kill(4);
      ASSERT_TRUE(world.push({0, 0, {1, 0}, 2}));  // so that a failure is reported, too
      while (step_all()) {
      }
      EXPECT_TRUE(world.proxy(0).failure());
      EXPECT_GT(world.proxy(0).stats().sent, 0);
      EXPECT_EQ(in_steps, 0);
    }
  }
  const std::int64_t before = allocation_count();
  ::operator delete(::operator new(8));
  EXPECT_EQ(allocation_count() - before, 1) << "the count itself works";
}

TEST(ProxyTest, AProxyThatLooksOnlyWhereHintsPointFindsEveryRecord) {
  const PlanSource source{Plan(small_spec(Op::kGemmAllReduce, 4, 2, 200, 130))};
  TestWorldOptions options{.link = unordered_link(2)};
  options.hinted = true;
  TestWorld world(source.plan().topo(), options);
  world.add_operator(0, source);
  world.run_epochs(0, 1, 4);
  expect_all_delivered(world);
}

TEST(ProxyTest, AStepPutsToEachDestinationInTurnAndFlushesOnce) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 4, 1, 256, 256))};
  TestWorld world(source.plan().topo(), {.link = slow_link(), .ring_depth = 16, .queue_depth = 8, .batch = 8});
  world.add_operator(0, source);
  std::vector<std::int32_t> destinations;
  world.endpoint(0).fails = [&](std::int64_t, const Put& put) {
    destinations.push_back(put.dst_rank);
    return false;
  };
  for (const auto& send : world.sends(0, 0, 1)) {
    if (send.id.index < 6) {
      ASSERT_TRUE(world.push(send));
    }
  }
  world.proxy(0).step(0);
  ASSERT_EQ(destinations.size(), 18u);
  for (std::size_t i = 0; i < destinations.size(); i += 3) {
    EXPECT_EQ(std::set<std::int32_t>(destinations.begin() + i, destinations.begin() + i + 3).size(), 3u) << i;
  }
  EXPECT_EQ(world.proxy(0).stats().batches, 1);
}

TEST(ProxyTest, NoRingIsAlwaysTheFirstToBeServed) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 4, 1, 256, 256))};
  TestWorld world(source.plan().topo(), {.link = slow_link()});
  world.add_operator(0, source);
  std::set<std::int32_t> firsts;
  bool first = false;
  world.endpoint(0).fails = [&](std::int64_t, const Put& put) {
    if (std::exchange(first, false)) firsts.insert(put.dst_rank);
    return false;
  };
  for (std::int64_t i = 0; i < 8; ++i) {
    for (std::int32_t lane = 0; lane < 3; ++lane) ASSERT_TRUE(world.push({0, 0, {lane, i}, 1}));
    first = true;
    world.proxy(0).step(world.now);
  }
  EXPECT_EQ(firsts.size(), 3u);
}

TEST(ProxyTest, DestinationsTakeTurnsWhereTheEndpointHasLittleRoom) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 4, 1, 256, 256))};
  LinkModel link = slow_link();
  link.queue_depth = 1;
  TestWorld world(source.plan().topo(), {.link = link, .ring_depth = 16, .queue_depth = 8, .batch = 8});
  world.add_operator(0, source);
  for (std::int64_t i = 0; i < 8; ++i) {
    for (std::int32_t lane = 0; lane < 3; ++lane) ASSERT_TRUE(world.push({0, 0, {lane, i}, 1}));
  }
  while (world.proxy(0).stats().posts < 12) ASSERT_TRUE(world.advance());
  for (std::int32_t node = 1; node < 4; ++node) EXPECT_GT(world.proxy(0).bytes_to(node), 0) << "node " << node;
  world.run_until_quiet();
  expect_all_delivered(world);
}

TEST(ProxyTest, NextEventSaysWhenThereIsWorkAndOnlyThen) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 256))};
  LinkModel link;
  link.latency_ns = 500;
  TestWorld world(source.plan().topo(), {.link = link, .ring_depth = 8, .queue_depth = 4, .batch = 2});
  world.add_operator(0, source);
  Proxy& proxy = world.proxy(0);
  EXPECT_FALSE(proxy.step(100));
  EXPECT_EQ(proxy.next_event(), kNever);
  for (std::int64_t i = 0; i < 3; ++i) ASSERT_TRUE(world.push({0, 0, {0, i}, 1}));
  EXPECT_TRUE(proxy.step(200));
  EXPECT_EQ(proxy.next_event(), 200) << "the batch was full and a record is left";
  EXPECT_TRUE(proxy.step(200));
  EXPECT_EQ(proxy.next_event(), 700);
  EXPECT_FALSE(proxy.step(699));
  EXPECT_TRUE(proxy.step(700));
  EXPECT_EQ(proxy.next_event(), kNever);

  world.endpoint(0).fails = [](std::int64_t, const Put&) { return true; };
  ASSERT_TRUE(world.push({0, 0, {0, 3}, 1}));
  EXPECT_TRUE(proxy.step(1'000));
  EXPECT_EQ(proxy.next_event(), 2'000);
  EXPECT_FALSE(proxy.step(1'999)) << "not before its time";
  EXPECT_EQ(proxy.stats().retries, 1);
  EXPECT_FALSE(proxy.step(2'000));
  EXPECT_EQ(proxy.stats().retries, 2);
  EXPECT_EQ(proxy.next_event(), 4'000);
  world.endpoint(0).fails = nullptr;
  EXPECT_TRUE(proxy.step(4'000));
  EXPECT_EQ(proxy.next_event(), 4'500);
}

TEST(ProxyTest, AfterDropRecordsVanishProducersGoOnAndTheProxyBecomesIdle) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 512))};
  for (const bool hinted : {false, true}) {
    TestWorldOptions options{.link = slow_link(), .ring_depth = 4, .queue_depth = 2, .window = 1};
    options.hinted = hinted;
    TestWorld world(source.plan().topo(), options);
    world.add_operator(0, source);
    for (std::int64_t i = 0; i < 4; ++i) ASSERT_TRUE(world.push({0, 0, {0, i}, 1}));
    world.proxy(0).step(0);
    EXPECT_EQ(world.proxy(0).stats().posts, 1);
    world.proxy(0).drop();
    EXPECT_TRUE(world.ring(0, 1).empty());
    EXPECT_FALSE(world.proxy(0).idle()) << "one put is in flight";
    const RingView view = world.ring(0, 1).view();
    for (std::uint32_t i = 0; i < 100; ++i) {
      ASSERT_TRUE(try_push(view, {63, i, i, i, 0})) << "also records that make no sense";
      world.proxy(0).step(i);
    }
    world.run_until_quiet();
    EXPECT_EQ(world.proxy(0).stats().posts, 1);
    EXPECT_EQ(world.proxy(0).stats().sent, 1);
    EXPECT_TRUE(world.proxy(0).idle());
    EXPECT_FALSE(world.proxy(0).failure());
    EXPECT_EQ(world.proxy(0).next_event(), kNever);
  }
}

}  // namespace
}  // namespace mkernel
