#include "net/proxy.h"

#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <deque>
#include <set>
#include <thread>

#include "net/allocation_count.h"
#include "net/test_world.h"

namespace mkernel {
namespace {

constexpr std::uint64_t kTwo32 = std::uint64_t{1} << 32;

LinkModel slow_link() {
  LinkModel link;
  link.bytes_per_ns = 0.5;
  link.latency_ns = 3'000;
  return link;
}
LinkModel jittery_link() {
  LinkModel link = slow_link();
  link.jitter_ns = 20'000;
  return link;
}
LinkModel unordered_link(int pieces) {
  LinkModel link = jittery_link();
  link.unordered = true;
  link.pieces = pieces;
  return link;
}

void expect_all_delivered(TestWorld& world) {
  EXPECT_EQ(world.heaps.wrong, std::vector<std::string>{});
  EXPECT_EQ(world.heaps.open(), 0) << "puts that never arrived";
  EXPECT_EQ(world.heaps.stamps(), world.pushed);
  EXPECT_EQ(world.heaps.landed_bytes(), world.pushed_bytes);
  const ProxyStats total = world.total();
  EXPECT_EQ(total.records, world.pushed);
  EXPECT_EQ(total.posts, world.pushed);
  EXPECT_EQ(total.sent, world.pushed);
  EXPECT_EQ(total.failed, 0);
  EXPECT_EQ(total.bytes, world.pushed_bytes);
  for (std::int32_t rank = 0; rank < world.topo().world(); ++rank) {
    EXPECT_TRUE(world.proxy(rank).idle()) << "rank " << rank;
    EXPECT_FALSE(world.proxy(rank).failure()) << world.proxy(rank).failure()->message();
    EXPECT_EQ(world.proxy(rank).next_event(), kNever);
    EXPECT_EQ(world.network().bytes_sent(rank), world.proxy(rank).stats().bytes);
  }
}

// The contract, for every kind of network.

struct NetworkCase {
  const char* name;
  LinkModel link;
};

class ContractTest : public testing::TestWithParam<std::tuple<NetworkCase, std::uint32_t>> {
 protected:
  TestWorldOptions options() const {
    TestWorldOptions options;
    options.link = std::get<0>(GetParam()).link;
    options.ring_depth = std::get<1>(GetParam());
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Networks, ContractTest,
                         testing::Combine(testing::Values(NetworkCase{"instant", LinkModel{}},
                                                          NetworkCase{"ordered", slow_link()},
                                                          NetworkCase{"jitter", jittery_link()},
                                                          NetworkCase{"unordered1", unordered_link(1)},
                                                          NetworkCase{"unordered2", unordered_link(2)},
                                                          NetworkCase{"unordered3", unordered_link(3)},
                                                          NetworkCase{"unordered4", unordered_link(4)}),
                                          testing::Values(1u, 2u, 4u, 256u)),
                         [](const auto& param_info) {
                           return std::string(std::get<0>(param_info.param).name) + "_depth" +
                                  std::to_string(std::get<1>(param_info.param));
                         });

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
TEST(ProxyTest, HundredThousandSmallAndLargePutsInTurnKeepTheContract) {
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
TEST(ProxyTest, PayloadsOfEveryOddNumberArriveBitForBit) {
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

TEST(ProxyTest, PutsWithoutBytesStillStamp) {
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

// Failing posts.

TEST(ProxyTest, TheKthPostMayFailForTheMomentWhateverKAndOrderStays) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 256))};
  const auto run = [&](std::int64_t k) {
    TestWorld world(source.plan().topo(), {.link = slow_link()});
    world.add_operator(0, source);
    std::map<std::int32_t, std::vector<std::int64_t>> posted;  // by destination: flags in order
    std::int64_t calls = 0;
    world.endpoint(0).fails = [&](std::int64_t call, const Put& put) {
      calls = call;
      if (call == k) return true;
      posted[put.dst_rank].push_back(put.flag);
      return false;
    };
    world.run_epochs(0, 1, 2);
    expect_all_delivered(world);
    EXPECT_EQ(world.total().retries, k > 0 && k <= calls ? 1 : 0);
    return std::pair(posted, calls);
  };
  const auto [expected, calls] = run(0);
  ASSERT_GE(calls, 16);
  for (std::int64_t k = 1; k <= calls; ++k) EXPECT_EQ(run(k).first, expected) << "k = " << k;
}

TEST(ProxyTest, AStuckDestinationHoldsUpOnlyItsOwnRingAndItsTailMovesOnlyIntoTheQueue) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 4, 1, 256, 256))};
  TestWorldOptions options{.link = slow_link(), .ring_depth = 4, .queue_depth = 2};
  options.max_post_failures_ns = 0;
  TestWorld world(source.plan().topo(), options);
  world.add_operator(0, source);
  bool stuck = true;
  world.endpoint(0).fails = [&](std::int64_t, const Put& put) { return stuck && put.dst_rank == 2; };

  std::map<std::int32_t, std::vector<TestWorld::Send>> by_node;
  for (const auto& send : world.sends(0, 0, 1)) by_node[world.put_of(0, 0, send.id, 1).dst_rank].push_back(send);
  ASSERT_GT(by_node[2].size(), 6u);
  std::map<std::int32_t, std::size_t> next;
  const auto push_all = [&](int rounds) {
    for (int i = 0; i < rounds; ++i) {
      for (auto& [node, list] : by_node) {
        while (next[node] < list.size() && world.push(list[next[node]])) ++next[node];
      }
      world.advance();
    }
  };
  push_all(2'000);
  EXPECT_EQ(next[1], by_node[1].size());
  EXPECT_EQ(next[3], by_node[3].size());
  EXPECT_EQ(next[2], 4u + 2u) << "ring and queue are full, and nothing else was taken";
  EXPECT_EQ(world.heaps.open(), 6);
  EXPECT_EQ(world.proxy(0).bytes_to(2), 0);
  EXPECT_FALSE(world.proxy(0).idle());
  EXPECT_FALSE(world.proxy(0).failure()) << "no limit was set";

  stuck = false;
  push_all(2'000);
  world.run_until_quiet();
  EXPECT_EQ(next[2], by_node[2].size());
  expect_all_delivered(world);
}

TEST(ProxyTest, AWindowKeepsOneDestinationFromFillingTheEndpoint) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 512))};
  LinkModel link = slow_link();
  link.latency_ns = 1'000'000;
  link.queue_depth = 6;
  TestWorld world(source.plan().topo(), {.link = link, .ring_depth = 16, .window = 3});
  world.add_operator(0, source);
  std::int64_t in_flight = 0;
  for (const auto& send : world.sends(0, 0, 1)) {
    if (send.id.lane == 0) world.push(send);
  }
  for (int i = 0; i < 5; ++i) world.proxy(0).step(world.now);
  in_flight = world.proxy(0).stats().posts;
  EXPECT_EQ(in_flight, 3);
  // The other destination still finds room, at once.
  ASSERT_TRUE(world.push({0, 0, {1, 0}, 1}));
  world.proxy(0).step(world.now);
  EXPECT_EQ(world.proxy(0).stats().posts, 4);
  EXPECT_EQ(world.proxy(0).stats().retries, 0);
  world.run_until_quiet();
  expect_all_delivered(world);
}

TEST(ProxyTest, PostsThatFailForTooLongAreReportedOnceAndOthersGoOn) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 2, 192, 64))};
  TestWorldOptions options{.link = slow_link()};
  options.max_post_failures_ns = 2'000'000'000;
  TestWorld world(source.plan().topo(), options);
  world.add_operator(9, source);
  world.endpoint(1).fails = [](std::int64_t, const Put& put) { return put.dst_rank == 5; };
  Nanos failed_at = 0;
  std::vector<TestWorld::Send> lists[2];
  for (const auto& send : world.sends(9, 1, 7)) lists[send.id.lane].push_back(send);
  std::size_t next[2] = {};
  for (bool moving = true; moving;) {
    for (std::size_t i = 0; i < 2; ++i) {
      while (next[i] < lists[i].size() && world.push(lists[i][next[i]])) ++next[i];
    }
    moving = world.advance();
    if (failed_at == 0 && world.proxy(1).failure()) failed_at = world.now;
  }
  ASSERT_TRUE(world.proxy(1).failure());
  const ProxyFailure& failure = *world.proxy(1).failure();
  EXPECT_FALSE(failure.own_bug);
  EXPECT_EQ(failure.rank, 1);
  EXPECT_EQ(failure.peer, 5);
  EXPECT_EQ(failure.op, 9u);
  EXPECT_EQ(failure.epoch, 7u);
  EXPECT_EQ(world.put_of(9, 1, send_of(source.plan(), failure.task), failure.epoch).dst_rank, 5);
  EXPECT_NE(failure.message().find("rank 1 lost rank 5"), std::string::npos) << failure.message();
  // Retries come at most a millisecond apart.
  EXPECT_GE(failed_at, 2'000'000'000);
  EXPECT_LE(failed_at, 2'003'000'000);
  EXPECT_LE(world.proxy(1).stats().retries, 2'100);
  EXPECT_EQ(world.heaps.wrong, std::vector<std::string>{});
  EXPECT_EQ(world.proxy(1).bytes_to(1), source.plan().network_bytes(1) / 2);
  EXPECT_EQ(world.proxy(1).bytes_to(2), 0);
}

class FatalEndpoint : public Endpoint {
 public:
  PostStatus post(const Put&, Nanos) override {
    ++posts;
    return PostStatus::kFatal;
  }
  int poll(Nanos, std::span<TransportEvent> out) override {
    int count = 0;
    while (!events.empty() && count < static_cast<int>(out.size())) {
      out[static_cast<std::size_t>(count++)] = events.front();
      events.pop_front();
    }
    return count;
  }
  Nanos next_event() const override { return kNever; }
  int arrivals_per_put() const override { return pieces; }

  std::deque<TransportEvent> events;
  int pieces = 0;
  int posts = 0;
};

// One proxy, rank 0 of a 3x1 world, on an endpoint of the test's own.
struct LoneProxy {
  explicit LoneProxy(Endpoint* endpoint, const PlanSource& source, std::uint64_t start_epoch = 1)
      : ring1(8), ring2(8), proxy([&] {
          ProxyConfig config;
          config.topo = source.plan().topo();
          config.rings = {nullptr, &ring1, &ring2};
          config.endpoint = endpoint;
          config.landing = &heaps;
          return config;
        }()) {
    proxy.add_operator(3, &source, HeapLayout(source.plan()), start_epoch);
  }
  CommandRing ring1;
  CommandRing ring2;
  CheckedHeaps heaps;
  Proxy proxy;
};

TEST(ProxyTest, ADestinationThatCannotBeReachedIsReportedAndNotTriedAgain) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 64))};
  FatalEndpoint endpoint;
  LoneProxy lone(&endpoint, source);
  const auto task = static_cast<std::uint32_t>(send_id(source.plan(), {0, 1}));
  ASSERT_TRUE(try_push(lone.ring1.view(), {3, 1, task, 0, 0}));
  ASSERT_TRUE(try_push(lone.ring1.view(), {3, 1, task, 0, 0}));
  EXPECT_TRUE(lone.proxy.step(0));
  EXPECT_FALSE(lone.proxy.step(1));
  EXPECT_EQ(endpoint.posts, 1);
  ASSERT_TRUE(lone.proxy.failure());
  EXPECT_EQ(lone.proxy.failure()->peer, 1);
  EXPECT_EQ(lone.proxy.failure()->task, task);
  EXPECT_EQ(lone.proxy.failure()->epoch, 1u);
  EXPECT_EQ(lone.proxy.stats().posts, 0);
}

// A dead peer.

TEST(ProxyTest, ADeadPeerIsNamedAndNoPutToItCountsAsDelivered) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 2, 600, 256))};
  for (const LinkModel& link : {slow_link(), unordered_link(3)}) {
    for (const Nanos kill_at : {Nanos{0}, Nanos{4'000}, Nanos{30'000}, Nanos{100'000}}) {
      SCOPED_TRACE(std::string(link.unordered ? "unordered" : "ordered") + ", killed at " + std::to_string(kill_at));
      TestWorld world(source.plan().topo(), {.link = link});
      world.add_operator(2, source);
      const std::int32_t dead = 4;  // node 2, gpu 0: its rail is ranks 0, 2, 4
      bool killed = false;
      std::int64_t stamps_of_dead = 0;
      world.heaps.on_stamp = [&](const Put& put) {
        stamps_of_dead += killed && (put.dst_rank == dead || put.src_rank == dead);
      };
      // One list per rank and lane, as a full ring holds up its own lane only.
      std::vector<std::vector<TestWorld::Send>> lists(12);
      for (std::int32_t rank = 0; rank < 6; ++rank) {
        for (const auto& send : world.sends(2, rank, 1)) {
          lists[static_cast<std::size_t>(2 * rank + send.id.lane)].push_back(send);
        }
      }
      std::vector<std::size_t> next(lists.size());
      Nanos first_failure = kNever;
      for (bool moving = true; moving;) {
        if (!killed && world.now >= kill_at) {
          world.network().kill(dead);
          killed = true;
        }
        for (std::size_t i = 0; i < lists.size(); ++i) {
          while (next[i] < lists[i].size() && world.push(lists[i][next[i]])) ++next[i];
        }
        moving = world.advance();
        if (world.proxy(0).failure()) first_failure = std::min(first_failure, world.now);
      }
      EXPECT_EQ(world.heaps.wrong, std::vector<std::string>{});
      EXPECT_EQ(stamps_of_dead, 0);
      for (const std::int32_t rank : {0, 2}) {
        ASSERT_TRUE(world.proxy(rank).failure()) << "rank " << rank;
        EXPECT_EQ(world.proxy(rank).failure()->peer, dead);
        EXPECT_EQ(world.proxy(rank).failure()->rank, rank);
        EXPECT_EQ(world.proxy(rank).failure()->op, 2u);
        EXPECT_EQ(world.proxy(rank).failure()->epoch, 1u);
        EXPECT_GT(world.proxy(rank).stats().failed, 0);
        EXPECT_EQ(world.proxy(rank).stats().sent + world.proxy(rank).stats().failed, world.proxy(rank).stats().posts);
        // The other one of the rail gets all of its puts.
        const std::int32_t other = 2 - rank;
        EXPECT_EQ(world.proxy(rank).bytes_to(source.plan().topo().node_of(other)),
                  source.plan().network_bytes(rank) / 2);
      }
      for (const std::int32_t rank : {1, 3, 5}) EXPECT_FALSE(world.proxy(rank).failure()) << "not of its rail";
      // Detection takes 4 s from the post or from when the put would have arrived.
      EXPECT_GE(first_failure, 4'000'000'000);
      EXPECT_LE(first_failure, 4'000'000'000 + kill_at + 10'000'000);
    }
  }
}

TEST(ProxyTest, DeadRanksDoNotHoldUpTheBytesOfTheLiving) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 4, 1, 400, 256))};
  TestWorld world(source.plan().topo(), {.link = slow_link()});
  world.add_operator(0, source);
  world.network().kill(3);
  std::int64_t living = 0;
  for (std::int32_t rank = 0; rank < 3; ++rank) {
    for (const auto& send : world.sends(0, rank, 1)) {
      if (world.put_of(0, rank, send.id, 1).dst_rank == 3) continue;
      while (!world.push(send)) ASSERT_TRUE(world.advance());
      ++living;
    }
  }
  world.run_until_quiet();
  EXPECT_EQ(world.heaps.stamps(), living);
  EXPECT_LT(world.now, 4'000'000'000) << "nobody waited for the dead one to be detected";
}

// Our own bugs are reported, not acted upon.

class DamagedSource : public PlanSource {
 public:
  using PlanSource::PlanSource;
  Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const override {
    Task task = PlanSource::task(rank, role, lane, index);
    if (damage) damage(task);
    return task;
  }
  std::function<void(Task&)> damage;
};

TEST(ProxyTest, ARecordThatNoCorrectExecutorWritesIsReportedAndNotPosted) {
  const Plan plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 64));
  const auto tasks = static_cast<std::uint32_t>(plan.count(0, Role::kSend, 0) * plan.lanes(Role::kSend));
  const auto damaged = [](auto change) { return std::function<void(Task&)>(change); };
  const Record first{3, 1, 0, 0, 0};
  const struct {
    const char* text;
    Record record;
    std::function<void(Task&)> damage;
  } cases[] = {
      {"a record names an operator that is not there", {4, 1, 0, 0, 0}, nullptr},
      {"a record names an operator that is not there", {63, 1, 0, 0, 0}, nullptr},
      {"a record names a task out of range", {3, 1, tasks, 0, 0}, nullptr},
      {"a record names a task out of range", {3, 1, kMaxRecordTask - 1, 0, 0}, nullptr},
      {"a record carries a count that its plan has no use for", {3, 1, 0, 1, 0}, nullptr},
      {"a record lies in the ring of another destination", {3, 1, 1, 0, 0}, nullptr},
      {"a record names a task that is no put", first, damaged([](Task& t) { t.action = Action::kCopy; })},
      {"a record names a task that is no put", first, damaged([](Task& t) { t = {}; })},
      {"a put between buffers outside the heap", first, damaged([](Task& t) { t.src = Buffer::kA; })},
      {"a put between buffers outside the heap", first, damaged([](Task& t) { t.dst = Buffer::kC; })},
      {"a put without a stamp for its destination", first,
       damaged([](Task& t) { t.signals[0].reach = Reach::kNobody; })},
      {"a put without a stamp for its destination", first, damaged([](Task& t) { t.signals[0].stamp = false; })},
      {"a put with a flag or a length out of range", first, damaged([](Task& t) { t.signals[0].flag = 1u << 30; })},
      {"a put with a flag or a length out of range", first, damaged([](Task& t) { t.length = -1; })},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.text);
    DamagedSource source{plan};
    source.damage = c.damage;
    FatalEndpoint endpoint;
    LoneProxy lone(&endpoint, source);
    ASSERT_TRUE(try_push(lone.ring1.view(), c.record));
    lone.proxy.step(0);
    ASSERT_TRUE(lone.proxy.failure());
    EXPECT_STREQ(lone.proxy.failure()->text, c.text);
    EXPECT_TRUE(lone.proxy.failure()->own_bug);
    EXPECT_EQ(lone.proxy.failure()->op, c.record.op);
    EXPECT_EQ(lone.proxy.failure()->task, c.record.task);
    EXPECT_EQ(endpoint.posts, 0);
  }
  const PlanSource silent{Plan(small_spec(Op::kGemmReduceScatter, 1, 1, 96, 64))};
  FatalEndpoint endpoint;
  LoneProxy lone(&endpoint, PlanSource(plan));
  lone.proxy.add_operator(6, &silent, HeapLayout(silent.plan()), 0);
  ASSERT_TRUE(try_push(lone.ring1.view(), {6, 1, 0, 0, 0}));
  lone.proxy.step(0);
  ASSERT_TRUE(lone.proxy.failure());
  EXPECT_STREQ(lone.proxy.failure()->text, "a record names a task of a plan that sends nothing");
}

TEST(ProxyTest, ArrivalsAreCountedPerFlagAndEpochAndStrangeOnesAreReported) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 64))};
  const HeapLayout layout(source.plan());
  const auto flags = static_cast<std::int64_t>(source.plan().flag_count());
  struct StampLog : Landing {
    void land(const Put&, std::int64_t, std::int64_t) override {}
    void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override {
      stamps.emplace_back(rank, op, flag, value);
    }
    std::vector<std::tuple<std::int32_t, std::uint32_t, std::int64_t, std::uint32_t>> stamps;
  };
  const auto arrival = [](std::uint32_t op, std::uint64_t epoch, std::int64_t flag) {
    return TransportEvent{EventKind::kArrived, 1, 0, op, epoch, flag};
  };
  const auto run = [&](const std::vector<TransportEvent>& events) {
    FatalEndpoint endpoint;
    endpoint.pieces = 3;
    endpoint.events.assign(events.begin(), events.end());
    StampLog log;
    CommandRing ring1(2);
    CommandRing ring2(2);
    ProxyConfig config;
    config.topo = source.plan().topo();
    config.rings = {nullptr, &ring1, &ring2};
    config.endpoint = &endpoint;
    config.landing = &log;
    Proxy proxy(config);
    proxy.add_operator(3, &source, layout, 0);
    proxy.step(0);
    return std::pair(log.stamps, proxy.failure() ? proxy.failure()->text : "");
  };
  using Stamps = decltype(StampLog::stamps);
  const std::int64_t even = layout.flag_index(4, 2);
  const std::int64_t odd = layout.flag_index(4, 3);

  // Pieces of two epochs and of another flag in between; the fourth arrival begins anew.
  const auto good =
      run({arrival(3, 2, even), arrival(3, 3, odd), arrival(3, 2, even), arrival(3, 3, odd), arrival(3, 2, even + 1),
           arrival(3, 2, even), arrival(3, 3, odd), arrival(3, 4, even), arrival(3, 4, even), arrival(3, 4, even)});
  EXPECT_EQ(good.first, (Stamps{{0, 3, even, 1}, {0, 3, odd, 2}, {0, 3, even, 2}}));
  EXPECT_STREQ(good.second, "");

  EXPECT_STREQ(run({arrival(3, 2, even), arrival(3, 4, even)}).second, "arrivals of two epochs for one flag");
  EXPECT_STREQ(run({arrival(4, 2, even)}).second, "an arrival for an operator that is not there");
  EXPECT_STREQ(run({arrival(kMaxOperators, 2, even)}).second, "an arrival for an operator number out of range");
  EXPECT_STREQ(run({arrival(3, 2, -1)}).second, "an arrival for a flag out of range");
  EXPECT_STREQ(run({arrival(3, 2, 2 * flags)}).second, "an arrival for a flag out of range");
  EXPECT_STREQ(run({arrival(3, 2, 2 * flags - 1)}).second, "");
}

TEST(ProxyDeathTest, ACompletionOfAPutThatWasNeverPostedIsABug) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 64))};
  FatalEndpoint endpoint;
  LoneProxy lone(&endpoint, source);
  endpoint.events.push_back({EventKind::kSent, 1, encode({3, 1, 0, 1, 0}), 3, 1, 0});
  EXPECT_DEATH(lone.proxy.step(0), "mkernel bug");
}

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

TEST(ProxyTest, ABatchHasOneDestinationAndEveryPostBelongsToOne) {
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
  std::int64_t runs = 0;
  for (std::size_t i = 0; i < destinations.size(); ++i) runs += i == 0 || destinations[i] != destinations[i - 1];
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(world.proxy(0).stats().batches, 3);
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

TEST(ProxyTest, SeveralOperatorsShareOneWorld) {
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

// Threads.

// Heaps for threads: plain bytes, atomic flags. ThreadSanitizer sees a race if a stamp comes without its bytes.
class SharedHeaps : public Landing {
 public:
  SharedHeaps(std::int32_t world, const HeapLayout& layout, std::uint32_t flag_count)
      : bytes_(static_cast<std::size_t>(world), std::vector<std::uint8_t>(static_cast<std::size_t>(layout.bytes()))) {
    for (std::int32_t rank = 0; rank < world; ++rank) {
      flags_.push_back(std::make_unique<std::atomic<std::uint32_t>[]>(2 * std::size_t{flag_count}));
    }
  }
  std::uint8_t* heap(std::int32_t rank) { return bytes_[static_cast<std::size_t>(rank)].data(); }
  std::atomic<std::uint32_t>& flag(std::int32_t rank, std::int64_t index) {
    return flags_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(index)];
  }
  void land(const Put& put, std::int64_t begin, std::int64_t bytes) override {
    std::memcpy(heap(put.dst_rank) + put.dst_offset + begin, heap(put.src_rank) + put.src_offset + begin,
                static_cast<std::size_t>(bytes));
  }
  void stamp(std::int32_t rank, std::uint32_t, std::int64_t index, std::uint32_t value) override {
    // order: the put's bytes; pairs with the acquire in ThreadsTest.
    flag(rank, index).store(value, std::memory_order_release);
  }

 private:
  std::vector<std::vector<std::uint8_t>> bytes_;
  std::vector<std::unique_ptr<std::atomic<std::uint32_t>[]>> flags_;
};

class ThreadsTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Orders, ThreadsTest, testing::Bool(),
                         [](const auto& param_info) { return param_info.param ? "unordered" : "ordered"; });

// Three ranks, each with a proxy thread and three threads that push its records; ranks know of each other's epochs by
// arrivals alone.
TEST_P(ThreadsTest, RanksInThreadsSeeWholePayloadsWheneverTheySeeAStamp) {
  constexpr std::uint64_t kEpochs = 12;
  constexpr std::int32_t kPushers = 3;
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 192, 96))};
  const Topology topo = source.plan().topo();
  const HeapLayout layout(source.plan());
  SharedHeaps heaps(topo.world(), layout, source.plan().flag_count());
  LinkModel link;
  link.bytes_per_ns = 2;
  link.latency_ns = 2'000;
  link.jitter_ns = 5'000;
  link.unordered = GetParam();
  link.pieces = 3;
  LocalNetwork network(topo.world(), link, &heaps);

  const auto pattern = [](std::int32_t src, std::int32_t dst, std::int64_t chunk, std::uint64_t epoch) {
    return static_cast<std::uint8_t>(epoch * 41 + static_cast<std::uint64_t>(src * 7 + dst * 13 + chunk * 3));
  };
  const auto now = [] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  const auto put_bytes = [&](const Task& task) {
    return static_cast<std::size_t>(task.length * dtype_bytes(source.plan().buffer_dtype(task.src)));
  };
  std::atomic<int> wrong = 0;
  std::atomic<int> ranks_running = topo.world();
  const auto run_rank = [&](std::int32_t rank) {
    std::vector<std::unique_ptr<CommandRing>> rings;
    ProxyConfig config;
    config.rank = rank;
    config.topo = topo;
    for (std::int32_t node = 0; node < topo.nodes; ++node) {
      rings.push_back(std::make_unique<CommandRing>(2, 0xfffffff0u));
      config.rings.push_back(rings.back().get());
    }
    config.endpoint = network.endpoint(rank);
    config.landing = &heaps;
    Proxy proxy(config);
    proxy.add_operator(0, &source, layout, 1);
    std::thread proxy_thread([&] {
      while (ranks_running.load() > 0 || !proxy.idle()) {
        if (!proxy.step(now())) std::this_thread::yield();
      }
      wrong += proxy.failure().has_value();
    });
    const std::int32_t lanes = source.plan().lanes(Role::kSend);
    const std::int64_t chunks = source.count(rank, Role::kSend, 0);
    // A rank goes on when all its threads have read all arrivals, so it is never two epochs ahead of another.
    std::barrier epoch_read(kPushers);
    const auto push_some = [&](std::int32_t thread) {
      for (std::uint64_t epoch = 1; epoch <= kEpochs; ++epoch) {
        for (std::int64_t id = thread; id < lanes * chunks; id += kPushers) {
          const SendId send = send_of(source.plan(), id);
          const Task task = source.task(rank, Role::kSend, send.lane, send.index);
          std::memset(heaps.heap(rank) + layout.offset(task.src, task.src_offset, epoch),
                      pattern(rank, task.peer, send.index, epoch), put_bytes(task));
          const RingView view = rings[static_cast<std::size_t>(topo.node_of(task.peer))]->view();
          const Record record{0, static_cast<std::uint32_t>(epoch & 0xff), static_cast<std::uint32_t>(id), 0, 0};
          while (!try_push(view, record)) std::this_thread::yield();
        }
        for (std::int32_t peer = 0; peer < topo.world(); ++peer) {
          if (peer == rank) continue;
          for (std::int64_t id = 0; id < lanes * chunks; ++id) {
            const SendId send = send_of(source.plan(), id);
            const Task task = source.task(peer, Role::kSend, send.lane, send.index);
            if (task.peer != rank) continue;
            const auto& flag = heaps.flag(rank, layout.flag_index(task.signals[0].flag, epoch));
            // order: the put's bytes; pairs with SharedHeaps::stamp().
            while (!flag_reached(flag.load(std::memory_order_acquire), use_of_epoch(epoch))) std::this_thread::yield();
            const std::uint8_t* at = heaps.heap(rank) + layout.offset(task.dst, task.dst_offset, epoch);
            const std::uint8_t want = pattern(peer, rank, send.index, epoch);
            for (std::size_t i = 0; i < put_bytes(task); ++i) wrong += at[i] != want;
          }
        }
        epoch_read.arrive_and_wait();
      }
    };
    std::vector<std::thread> pushers;
    for (std::int32_t thread = 0; thread < kPushers; ++thread) pushers.emplace_back(push_some, thread);
    for (std::thread& pusher : pushers) pusher.join();
    --ranks_running;
    proxy_thread.join();
  };
  std::vector<std::thread> ranks;
  for (std::int32_t rank = 0; rank < topo.world(); ++rank) ranks.emplace_back(run_rank, rank);
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(wrong.load(), 0);
  for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
    EXPECT_EQ(network.bytes_sent(rank), static_cast<std::int64_t>(kEpochs) * source.plan().network_bytes(rank));
  }
}

// Notes who posts, and in which order.
class PosterLog : public Endpoint {
 public:
  PostStatus post(const Put& put, Nanos) override {
    posters.insert(std::this_thread::get_id());
    done.push_back({EventKind::kSent, put.dst_rank, put.id, put.op, put.epoch, put.flag});
    posts.push_back(decode(put.id).task);
    return PostStatus::kPosted;
  }
  int poll(Nanos, std::span<TransportEvent> events) override {
    int count = 0;
    for (; !done.empty() && count < static_cast<int>(events.size()); ++count) {
      events[static_cast<std::size_t>(count)] = done.front();
      done.pop_front();
    }
    return count;
  }
  Nanos next_event() const override { return done.empty() ? kNever : 0; }
  int arrivals_per_put() const override { return 0; }

  std::set<std::thread::id> posters;
  std::vector<std::uint32_t> posts;
  std::deque<TransportEvent> done;
};

// reliability.md, case 13.
TEST(ProxyTest, EightThreadsPushToOneLaneAndOnlyTheProxyPosts) {
  constexpr std::uint32_t kThreads = 8;
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 2, 1, 1'024, 1'024))};
  const auto tasks = static_cast<std::uint32_t>(source.count(0, Role::kSend, 0));
  ASSERT_GE(tasks, 100u);
  PosterLog log;
  CommandRing ring(2, 0xfffffff0u);
  ProxyConfig config;
  config.topo = source.plan().topo();
  config.rings = {nullptr, &ring};
  config.endpoint = &log;
  Proxy proxy(config);
  proxy.add_operator(0, &source, HeapLayout(source.plan()), 0);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint32_t task = t; task < tasks; task += kThreads) {
        while (!try_push(ring.view(), {0, 1, task, 0, 0})) std::this_thread::yield();
      }
    });
  }
  while (proxy.stats().sent < tasks) {
    if (!proxy.step(0)) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log.posters, std::set{std::this_thread::get_id()});
  EXPECT_FALSE(proxy.failure());
  EXPECT_TRUE(proxy.idle());
  std::vector<std::vector<std::uint32_t>> by_thread(kThreads);
  for (const std::uint32_t task : log.posts) by_thread[task % kThreads].push_back(task);
  ASSERT_EQ(log.posts.size(), tasks);
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    EXPECT_TRUE(std::is_sorted(by_thread[t].begin(), by_thread[t].end()));
    EXPECT_EQ(std::set(by_thread[t].begin(), by_thread[t].end()).size(), by_thread[t].size()) << "none twice";
  }
}

TEST(ProxyTest, AnOperatorMayBeAddedWhileTheProxyRuns) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 2, 1, 64, 64))};
  const HeapLayout layout(source.plan());
  SharedHeaps heaps(2, layout, source.plan().flag_count());
  LocalNetwork network(2, LinkModel{}, &heaps);
  CommandRing ring(2);
  ProxyConfig config;
  config.topo = source.plan().topo();
  config.rings = {nullptr, &ring};
  config.endpoint = network.endpoint(0);
  Proxy proxy(config);
  std::atomic<bool> stop = false;
  Nanos now = 0;
  std::thread thread([&] {
    while (!stop || !proxy.idle()) {
      if (!proxy.step(++now)) std::this_thread::yield();
    }
  });
  for (std::uint32_t op = 0; op < 20; ++op) {
    proxy.add_operator(op, &source, layout, 0);
    while (!try_push(ring.view(), {op, 1, 0, 0, 0})) std::this_thread::yield();
  }
  stop = true;
  thread.join();
  EXPECT_FALSE(proxy.failure());
  EXPECT_EQ(proxy.stats().sent, 20);
}

}  // namespace
}  // namespace mkernel
