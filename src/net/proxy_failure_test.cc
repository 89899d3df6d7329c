// What a proxy does when posts fail, peers die, or a record or a plan is not as it should be.
#include <gtest/gtest.h>

#include <deque>

#include "net/test_world.h"

namespace mkernel {
namespace {

TEST(ProxyFailureTest, TheKthPostMayFailForTheMomentWhateverKAndOrderStays) {
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

TEST(ProxyFailureTest, AStuckDestinationHoldsUpOnlyItsOwnRingAndItsTailMovesOnlyIntoTheQueue) {
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

TEST(ProxyFailureTest, AFullEndpointIsAskedAgainOnlyAfterACompletion) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 512))};
  LinkModel link = slow_link();
  link.latency_ns = 1'000'000;
  link.queue_depth = 2;
  TestWorld world(source.plan().topo(), {.link = link, .ring_depth = 16});
  world.add_operator(0, source);
  std::int64_t calls = 0;
  world.endpoint(0).fails = [&](std::int64_t call, const Put&) {
    calls = call;
    return false;
  };
  for (const auto& send : world.sends(0, 0, 1)) ASSERT_TRUE(world.push(send));
  for (int i = 0; i < 100; ++i) world.proxy(0).step(world.now);
  EXPECT_EQ(world.proxy(0).stats().posts, 2);
  EXPECT_EQ(calls, 3) << "two are in flight, and one found the endpoint full";
  EXPECT_FALSE(world.proxy(0).failure());
}

TEST(ProxyFailureTest, AnEndpointThatStaysFullForTooLongIsAFailure) {
  const PlanSource source{Plan(small_spec(Op::kGemmReduceScatter, 3, 1, 96, 512))};
  LinkModel link = slow_link();
  link.latency_ns = 1'000'000'000;
  link.queue_depth = 1;
  TestWorldOptions options{.link = link, .ring_depth = 16};
  options.max_post_failures_ns = 1'000;
  TestWorld world(source.plan().topo(), options);
  world.add_operator(0, source);
  for (const auto& send : world.sends(0, 0, 1)) ASSERT_TRUE(world.push(send));
  world.proxy(0).step(world.now);
  EXPECT_LE(world.proxy(0).next_event(), world.now + 1'000);
  world.now += 1'000;
  world.proxy(0).step(world.now);
  ASSERT_TRUE(world.proxy(0).failure());
  EXPECT_NE(world.proxy(0).failure()->message().find("failed for too long"), std::string::npos);
}

TEST(ProxyFailureTest, AWindowKeepsOneDestinationFromFillingTheEndpoint) {
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

TEST(ProxyFailureTest, PostsThatFailForTooLongAreReportedOnceAndOthersGoOn) {
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

TEST(ProxyFailureTest, ADestinationThatCannotBeReachedIsReportedAndNotTriedAgain) {
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

TEST(ProxyFailureTest, ADeadPeerIsNamedAndNoPutToItCountsAsDelivered) {
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

TEST(ProxyFailureTest, DeadRanksDoNotHoldUpTheBytesOfTheLiving) {
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

TEST(ProxyFailureTest, ARecordThatNoCorrectExecutorWritesIsReportedAndNotPosted) {
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

TEST(ProxyFailureTest, ArrivalsAreCountedPerFlagAndEpochAndStrangeOnesAreReported) {
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

}  // namespace
}  // namespace mkernel
