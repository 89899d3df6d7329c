#include "net/local/local_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

namespace mkernel {
namespace {

// What a network did to the heaps, in order.
struct Log : Landing {
  struct Entry {
    Nanos when = 0;
    bool stamp = false;
    std::int32_t dst = -1;
    std::int64_t flag = 0;
    std::int64_t begin = 0;
    std::int64_t bytes = 0;
    bool operator==(const Entry&) const = default;
  };
  void land(const Put& put, std::int64_t begin, std::int64_t bytes) override {
    entries.push_back({now, false, put.dst_rank, put.flag, begin, bytes});
  }
  void stamp(std::int32_t rank, std::uint32_t, std::int64_t flag, std::uint32_t) override {
    entries.push_back({now, true, rank, flag, 0, 0});
    if (on_stamp) on_stamp();
  }
  std::vector<Entry> stamps() const {
    std::vector<Entry> result;
    std::copy_if(entries.begin(), entries.end(), std::back_inserter(result), [](const Entry& e) { return e.stamp; });
    return result;
  }
  std::vector<Entry> entries;
  std::function<void()> on_stamp;
  Nanos now = 0;
};

Put make_put(std::int32_t src, std::int32_t dst, std::int64_t bytes, std::int64_t flag) {
  Put put;
  put.id = static_cast<std::uint64_t>(flag);
  put.src_rank = src;
  put.dst_rank = dst;
  put.bytes = bytes;
  put.flag = flag;
  put.value = 1;
  return put;
}

// A network with its log, run to the end of all events.
struct Network {
  Network(std::int32_t world_size, const LinkModel& link, std::int32_t deaf_rank = -1)
      : net(world_size, link, &log, [this](std::int32_t rank, Nanos when) { wakes.emplace_back(rank, when); }),
        world(world_size),
        deaf(deaf_rank) {}

  PostStatus post(const Put& put) { return net.endpoint(put.src_rank)->post(put, log.now); }

  // Polls every endpoint but the deaf one at each event until there is none left, or until `end`.
  void run(Nanos end = kNever) {
    for (;;) {
      Nanos next = kNever;
      for (std::int32_t rank = 0; rank < world; ++rank) {
        if (rank != deaf) next = std::min(next, net.endpoint(rank)->next_event());
      }
      if (next == kNever || next > end) return;
      log.now = std::max(log.now, next);
      for (std::int32_t rank = 0; rank < world; ++rank) {
        if (rank != deaf) poll(rank);
      }
    }
  }
  void poll(std::int32_t rank, std::size_t span = 4) {
    std::vector<TransportEvent> out(span);
    const int count = net.endpoint(rank)->poll(log.now, out);
    for (int i = 0; i < count; ++i) {
      events.push_back(out[static_cast<std::size_t>(i)]);
      event_ranks.push_back(rank);
      event_times.push_back(log.now);
    }
  }
  std::int64_t count(EventKind kind) const {
    return std::count_if(events.begin(), events.end(), [=](const TransportEvent& e) { return e.kind == kind; });
  }

  Log log;
  std::vector<std::pair<std::int32_t, Nanos>> wakes;
  LocalNetwork net;
  std::int32_t world;
  std::int32_t deaf;
  std::vector<TransportEvent> events;
  std::vector<std::int32_t> event_ranks;
  std::vector<Nanos> event_times;
};

std::vector<Nanos> stamp_times(const Network& network) {
  std::vector<Nanos> times;
  for (const Log::Entry& entry : network.log.stamps()) times.push_back(entry.when);
  return times;
}

LinkModel link_of(double bytes_per_ns, Nanos latency_ns) {
  LinkModel link;
  link.bytes_per_ns = bytes_per_ns;
  link.latency_ns = latency_ns;
  return link;
}

// Figures of the model.

TEST(LocalTransportTest, APutTakesItsWireTimePlusLatency) {
  Network network(2, link_of(50, 3'000));
  network.log.now = 1'000;
  ASSERT_EQ(network.post(make_put(0, 1, 500'000, 7)), PostStatus::kPosted);
  EXPECT_EQ(network.net.endpoint(0)->next_event(), 1'000 + 10'000 + 3'000);
  network.run();
  const std::vector<Log::Entry> bytes_then_stamp = {{14'000, false, 1, 7, 0, 500'000}, {14'000, true, 1, 7, 0, 0}};
  EXPECT_EQ(network.log.entries, bytes_then_stamp);
  ASSERT_EQ(network.events.size(), 1u);
  EXPECT_EQ(network.events[0].kind, EventKind::kSent);
  EXPECT_EQ(network.events[0].id, 7u);
  EXPECT_EQ(network.events[0].peer, 1);
  EXPECT_EQ(network.event_ranks[0], 0);
  EXPECT_EQ(network.net.bytes_sent(0), 500'000);
  EXPECT_EQ(network.net.bytes_sent(1), 0);
}

TEST(LocalTransportTest, ALongRunReachesTheBandwidthAndPaysLatencyOnce) {
  LinkModel link = link_of(50, 3'000);
  Network network(2, link);
  for (std::int64_t i = 0; i < 100; ++i) ASSERT_EQ(network.post(make_put(0, 1, 524'288, i)), PostStatus::kPosted);
  network.run();
  const Nanos wire = 10'486;  // 524288 / 50 = 10485.76, rounded up
  const std::vector<Nanos> times = stamp_times(network);
  ASSERT_EQ(times.size(), 100u);
  for (std::size_t i = 0; i < times.size(); ++i) EXPECT_EQ(times[i], static_cast<Nanos>(i + 1) * wire + 3'000);
}

TEST(LocalTransportTest, OneSenderSharesItsEgressAmongItsDestinations) {
  Network network(4, link_of(1, 100));
  for (std::int32_t dst = 1; dst < 4; ++dst) network.post(make_put(0, dst, 1'000, dst));
  network.run();
  EXPECT_EQ(stamp_times(network), (std::vector<Nanos>{1'100, 2'100, 3'100}));
}

TEST(LocalTransportTest, OneReceiverSharesItsIngressAmongItsSenders) {
  Network network(4, link_of(1, 100));
  for (std::int32_t src = 1; src < 4; ++src) network.post(make_put(src, 0, 1'000, src));
  network.run();
  EXPECT_EQ(stamp_times(network), (std::vector<Nanos>{1'100, 2'100, 3'100}));
}

// Booked when they were posted, the puts of rank 0 that wait for their egress would hold up those of rank 1 that do
// not.
TEST(LocalTransportTest, APutThatWaitsForItsEgressHoldsUpNobodyElse) {
  Network network(3, link_of(1, 100));
  for (std::int32_t src = 0; src < 3; ++src) {
    for (const std::int32_t step : {1, 2}) {
      for (int i = 0; i < 4; ++i) network.post(make_put(src, (src + step) % 3, 1'000, src));
    }
  }
  network.run();
  // Every rank sends and receives 8,000 bytes, the whole time.
  EXPECT_EQ(network.log.stamps().size(), 24u);
  EXPECT_EQ(stamp_times(network).back(), 8'100);
}

TEST(LocalTransportTest, ACopierBesideTheLinkWorksOnPutsInOrderFromTheMomentTheyArePosted) {
  LinkModel link = link_of(1, 100);
  link.copy_ns = 50;
  link.copy_bytes_per_ns = 2;
  Network fast(2, link);  // the copier is: what it does hides behind the link
  for (std::int64_t i = 0; i < 3; ++i) fast.post(make_put(0, 1, 1'000, i));
  fast.run();
  EXPECT_EQ(stamp_times(fast), (std::vector<Nanos>{1'100, 2'100, 3'100}));
  link.copy_bytes_per_ns = 0.5;
  Network slow(2, link);
  for (std::int64_t i = 0; i < 3; ++i) slow.post(make_put(0, 1, 1'000, i));
  slow.run();
  EXPECT_EQ(stamp_times(slow), (std::vector<Nanos>{2'050, 4'100, 6'150}));
}

TEST(LocalTransportTest, DisjointPairsAndBothDirectionsDoNotDisturbEachOther) {
  Network network(4, link_of(1, 100));
  network.post(make_put(0, 1, 1'000, 0));
  network.post(make_put(1, 0, 1'000, 1));
  network.post(make_put(2, 3, 1'000, 2));
  network.post(make_put(3, 2, 1'000, 3));
  network.run();
  EXPECT_EQ(stamp_times(network), (std::vector<Nanos>{1'100, 1'100, 1'100, 1'100}));
}

TEST(LocalTransportTest, EveryPostCostsItsSenderPostTime) {
  LinkModel link = link_of(1, 100);
  link.post_ns = 40;
  Network network(3, link);
  network.post(make_put(0, 1, 0, 0));
  network.post(make_put(0, 2, 1'000, 1));
  network.post(make_put(0, 1, 0, 2));
  network.run();
  EXPECT_EQ(stamp_times(network), (std::vector<Nanos>{140, 1'180, 1'220}));
}

TEST(LocalTransportTest, AnUnlimitedLinkPaysLatencyOnlyAndKeepsOrder) {
  Network network(2, link_of(0, 10));
  for (std::int64_t i = 0; i < 5; ++i) network.post(make_put(0, 1, std::int64_t{1} << (40 - i), i));
  network.run();
  std::vector<std::int64_t> flags;
  for (const Log::Entry& entry : network.log.stamps()) {
    EXPECT_EQ(entry.when, 10);
    flags.push_back(entry.flag);
  }
  EXPECT_EQ(flags, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(LocalTransportTest, EmptyPutsStampWithoutLandingAnything) {
  Network network(2, link_of(1, 10));
  network.post(make_put(0, 1, 0, 3));
  network.run();
  EXPECT_EQ(network.log.entries, (std::vector<Log::Entry>{{10, true, 1, 3, 0, 0}}));
  EXPECT_EQ(network.count(EventKind::kSent), 1);
}

TEST(LocalTransportTest, NothingHappensBeforeItsTime) {
  Network network(2, link_of(1, 10));
  network.post(make_put(0, 1, 100, 0));
  network.log.now = 109;
  network.poll(0);
  EXPECT_TRUE(network.log.entries.empty());
  network.log.now = 110;
  network.poll(0);
  EXPECT_EQ(network.log.stamps().size(), 1u);
  EXPECT_EQ(network.net.endpoint(0)->next_event(), kNever);
}

// Order.

TEST(LocalTransportTest, JitterNeverReordersOnePairButDoesReorderPairs) {
  LinkModel link = link_of(10, 100);
  link.jitter_ns = 5'000;
  int pairs_reordered = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    link.seed = seed;
    Network network(4, link);
    // Flags count the posts of all ranks.
    for (std::int64_t i = 0; i < 120; ++i) {
      const auto src = static_cast<std::int32_t>(i % 3);
      network.post(make_put(src, static_cast<std::int32_t>((src + 1 + i / 3 % 3) % 4), i % 2 == 0 ? 10 : 4'000, i));
    }
    network.run();
    std::map<std::pair<std::int64_t, std::int32_t>, std::int64_t> last;  // by source and destination
    std::map<std::int32_t, std::int64_t> last_at;
    for (const Log::Entry& entry : network.log.stamps()) {
      const auto pair = std::pair(entry.flag % 3, entry.dst);
      EXPECT_LT(last.contains(pair) ? last[pair] : -1, entry.flag);
      last[pair] = entry.flag;
      pairs_reordered += last_at.contains(entry.dst) && last_at[entry.dst] > entry.flag;
      last_at[entry.dst] = entry.flag;
    }
    EXPECT_EQ(network.log.stamps().size(), 120u);
  }
  EXPECT_GT(pairs_reordered, 20);
}

TEST(LocalTransportTest, UnorderedPutsAndPiecesOvertakeEachOtherAndRaiseOneArrivalEach) {
  LinkModel link = link_of(10, 100);
  link.unordered = true;
  link.pieces = 4;
  link.jitter_ns = 5'000;
  Network network(2, link);
  EXPECT_EQ(network.net.endpoint(0)->arrivals_per_put(), 4);
  constexpr std::int64_t kBytes = 1'003;
  for (std::int64_t i = 0; i < 50; ++i) {
    Put put = make_put(0, 1, kBytes, i);
    put.epoch = 1'000 + static_cast<std::uint64_t>(i);
    put.op = 9;
    ASSERT_EQ(network.post(put), PostStatus::kPosted);
  }
  network.run();

  EXPECT_TRUE(network.log.stamps().empty()) << "the destination's user publishes, not the network";
  std::map<std::int64_t, std::set<std::pair<std::int64_t, std::int64_t>>> pieces;
  int pieces_reordered = 0;
  int puts_reordered = 0;
  std::int64_t last_flag = -1;
  for (const Log::Entry& entry : network.log.entries) {
    auto& of_put = pieces[entry.flag];
    pieces_reordered += !of_put.empty() && of_put.rbegin()->first > entry.begin;
    puts_reordered += entry.flag < last_flag;
    last_flag = entry.flag;
    of_put.emplace(entry.begin, entry.bytes);
  }
  for (const auto& [flag, of_put] : pieces) {
    std::int64_t at = 0;
    for (const auto& [begin, bytes] : of_put) {
      EXPECT_EQ(begin, at);
      at += bytes;
    }
    EXPECT_EQ(at, kBytes) << "flag " << flag;
  }
  EXPECT_GT(pieces_reordered, 10);
  EXPECT_GT(puts_reordered, 10);

  std::map<std::int64_t, int> arrivals;
  for (std::size_t i = 0; i < network.events.size(); ++i) {
    const TransportEvent& event = network.events[i];
    EXPECT_EQ(network.event_ranks[i], event.kind == EventKind::kArrived ? 1 : 0);
    if (event.kind != EventKind::kArrived) continue;
    ++arrivals[event.flag];
    EXPECT_EQ(event.op, 9u);
    EXPECT_EQ(event.epoch, 1'000 + static_cast<std::uint64_t>(event.flag));
    EXPECT_EQ(event.peer, 0);
  }
  EXPECT_EQ(arrivals.size(), 50u);
  for (const auto& [flag, count] : arrivals) EXPECT_EQ(count, 4);
  EXPECT_EQ(network.count(EventKind::kSent), 50);
  EXPECT_EQ(network.wakes.size(), 200u);
  for (const auto& [rank, when] : network.wakes) EXPECT_EQ(rank, 1);
}

TEST(LocalTransportTest, PutsSmallerThanTheirPiecesStillRaiseEveryArrival) {
  LinkModel link = link_of(1, 10);
  link.unordered = true;
  link.pieces = 4;
  Network network(2, link);
  network.post(make_put(0, 1, 0, 0));
  network.post(make_put(0, 1, 3, 1));
  network.run();
  EXPECT_EQ(network.count(EventKind::kArrived), 8);
  EXPECT_EQ(network.log.entries.size(), 3u) << "three pieces of one byte";
}

TEST(LocalTransportTest, AnArrivalComesAfterItsBytesAndWakesTheDestination) {
  LinkModel link = link_of(1, 10);
  link.unordered = true;
  Network network(2, link);
  network.post(make_put(0, 1, 100, 5));
  EXPECT_EQ(network.net.endpoint(1)->next_event(), kNever);
  network.log.now = 110;
  network.poll(1);
  EXPECT_TRUE(network.events.empty());
  network.poll(0);
  EXPECT_EQ(network.log.entries.size(), 1u);
  EXPECT_EQ(network.wakes, (std::vector<std::pair<std::int32_t, Nanos>>{{1, 110}}));
  EXPECT_EQ(network.net.endpoint(1)->next_event(), 110);
  network.poll(1);
  EXPECT_EQ(network.net.endpoint(1)->next_event(), kNever);
  ASSERT_EQ(network.events.size(), 2u);
  EXPECT_EQ(network.events[1].kind, EventKind::kArrived);
  EXPECT_EQ(network.events[1].flag, 5);
}

TEST(LocalTransportTest, ADestinationThatDoesNotPollLosesNoArrivals) {
  LinkModel link = link_of(0, 10);
  link.unordered = true;
  link.pieces = 3;
  link.arrival_depth = 4;
  Network network(2, link, /*deaf_rank=*/1);
  for (std::int64_t i = 0; i < 10; ++i) network.post(make_put(0, 1, 300, i));
  network.run(1'000'000);
  EXPECT_EQ(network.count(EventKind::kSent), 1) << "three pieces of four are those of the first put";
  EXPECT_LT(network.log.now, 1'000'001);
  network.deaf = -1;
  network.run();
  EXPECT_EQ(network.count(EventKind::kArrived), 30);
  EXPECT_EQ(network.count(EventKind::kSent), 10);
  EXPECT_EQ(network.log.entries.size(), 30u) << "no piece lands twice";
}

TEST(LocalTransportTest, AShortSpanOfEventsLosesNone) {
  Network network(2, link_of(0, 10));
  for (std::int64_t i = 0; i < 7; ++i) network.post(make_put(0, 1, 1, i));
  network.log.now = 10;
  for (std::size_t i = 1; i <= 7; ++i) {
    EXPECT_EQ(network.net.endpoint(0)->next_event(), 10);
    network.poll(0, 1);
    EXPECT_EQ(network.events.size(), i);
  }
  EXPECT_EQ(network.net.endpoint(0)->next_event(), kNever);
}

TEST(LocalTransportTest, TheSameSeedGivesTheSameScheduleAndAnotherSeedAnother) {
  LinkModel link = link_of(10, 100);
  link.jitter_ns = 1'000;
  link.again_probability = 0.2;
  const auto run = [&](std::uint64_t seed, bool unordered) {
    link.seed = seed;
    link.unordered = unordered;
    link.pieces = 2;
    Network network(3, link);
    for (std::int64_t i = 0; i < 60; ++i) {
      network.post(make_put(static_cast<std::int32_t>(i % 3), static_cast<std::int32_t>((i + 1) % 3), 100, i));
    }
    network.run();
    return network.log.entries;
  };
  for (const bool unordered : {false, true}) {
    EXPECT_EQ(run(5, unordered), run(5, unordered));
    EXPECT_NE(run(5, unordered), run(6, unordered));
    EXPECT_NE(run(5, unordered), run(5 + (std::uint64_t{1} << 32), unordered));
  }
}

// Failing posts.

TEST(LocalTransportTest, AFullEndpointSaysAgainUntilACompletionHasBeenPolled) {
  LinkModel link = link_of(1, 10);
  link.queue_depth = 3;
  Network network(2, link);
  for (std::int64_t i = 0; i < 3; ++i) ASSERT_EQ(network.post(make_put(0, 1, 100, i)), PostStatus::kPosted);
  ASSERT_EQ(network.post(make_put(0, 1, 100, 3)), PostStatus::kFull);
  EXPECT_EQ(network.net.bytes_sent(0), 300);
  ASSERT_EQ(network.post(make_put(1, 0, 100, 9)), PostStatus::kPosted) << "other endpoints have room";
  network.run(110);
  ASSERT_EQ(network.post(make_put(0, 1, 100, 3)), PostStatus::kPosted);
  ASSERT_EQ(network.post(make_put(0, 1, 100, 4)), PostStatus::kFull);
}

TEST(LocalTransportTest, PostsFailForTheMomentAsOftenAsAskedFor) {
  LinkModel link = link_of(0, 0);
  link.again_probability = 0.01;
  Network network(2, link);
  int again = 0;
  constexpr int kPosts = 100'000;
  for (int i = 0; i < kPosts; ++i) {
    again += network.post(make_put(0, 1, 1, i)) == PostStatus::kAgain;
    network.poll(0);
  }
  // Binomial: mean 1,000, standard deviation sqrt(100,000 * 0.01 * 0.99) = 31.5; five of them either way.
  EXPECT_NEAR(again, 1'000, 5 * 31.5);
  EXPECT_EQ(network.count(EventKind::kSent), kPosts - again);
}

// Death.

TEST(LocalTransportTest, PutsToADeadRankFailAfterDetectionAndNeverArrive) {
  for (const bool unordered : {false, true}) {
    LinkModel link = link_of(1, 10);
    link.unordered = unordered;
    link.pieces = 2;
    Network network(3, link);
    network.post(make_put(0, 1, 100, 0));  // due at 110, arrives
    network.post(make_put(0, 1, 100, 1));  // due at 210, in flight
    network.run(150);
    const std::size_t before = network.log.entries.size();
    network.net.kill(1);
    network.log.now = 160;
    network.post(make_put(0, 1, 100, 2));
    network.post(make_put(0, 2, 100, 3));
    network.run();
    std::map<std::uint64_t, std::pair<EventKind, Nanos>> ends;
    for (std::size_t i = 0; i < network.events.size(); ++i) {
      if (network.events[i].kind == EventKind::kArrived) continue;
      EXPECT_FALSE(ends.contains(network.events[i].id)) << "one completion per put";
      ends[network.events[i].id] = {network.events[i].kind, network.event_times[i]};
    }
    ASSERT_EQ(ends.size(), 4u);
    EXPECT_EQ(ends[0].first, EventKind::kSent);
    EXPECT_EQ(ends[1], std::pair(EventKind::kFailed, Nanos{4'000'000'210}));
    EXPECT_EQ(ends[2], std::pair(EventKind::kFailed, Nanos{4'000'000'160}));
    EXPECT_EQ(ends[3].first, EventKind::kSent);
    for (std::size_t i = before; i < network.log.entries.size(); ++i) EXPECT_NE(network.log.entries[i].dst, 1);
    if (!unordered) {
      EXPECT_EQ(network.log.stamps().size(), 2u);
    }
    for (const TransportEvent& event : network.events) {
      EXPECT_TRUE(event.kind != EventKind::kFailed || event.peer == 1);
    }
  }
}

TEST(LocalTransportTest, NothingOfADeadSenderArrivesAndItsEndpointIsSilent) {
  Network network(2, link_of(1, 10));
  network.post(make_put(0, 1, 100, 0));
  network.net.kill(0);
  EXPECT_EQ(network.net.endpoint(0)->next_event(), kNever);
  network.log.now = 1'000;
  network.poll(0);
  EXPECT_TRUE(network.events.empty());
  EXPECT_TRUE(network.log.entries.empty());
  EXPECT_EQ(network.post(make_put(0, 1, 100, 0)), PostStatus::kFatal);
}

TEST(LocalTransportTest, FailedPutsGiveTheirPlaceInTheQueueBack) {
  LinkModel link = link_of(1, 10);
  link.queue_depth = 2;
  link.unordered = true;
  link.pieces = 4;
  Network network(2, link);
  network.net.kill(1);
  for (int round = 0; round < 5; ++round) {
    ASSERT_EQ(network.post(make_put(0, 1, 100, 0)), PostStatus::kPosted);
    ASSERT_EQ(network.post(make_put(0, 1, 100, 1)), PostStatus::kPosted);
    ASSERT_EQ(network.post(make_put(0, 1, 100, 2)), PostStatus::kFull);
    network.run();
  }
  EXPECT_EQ(network.count(EventKind::kFailed), 10);
}

// Threads.

TEST(LocalTransportTest, ManySendersInThreadsBookOneReceiverWithoutLosingTime) {
  constexpr std::int32_t kSenders = 6;
  constexpr std::int64_t kPuts = 2'000;
  struct Counter : Landing {
    void land(const Put&, std::int64_t, std::int64_t bytes) override { landed += bytes; }
    void stamp(std::int32_t, std::uint32_t, std::int64_t, std::uint32_t) override { ++stamps; }
    std::atomic<std::int64_t> landed = 0;
    std::atomic<std::int64_t> stamps = 0;
  };
  for (const bool unordered : {false, true}) {
    Counter counter;
    LinkModel link = link_of(1, 50);
    link.unordered = unordered;
    link.arrival_depth = 16;
    LocalNetwork net(kSenders + 1, link, &counter);
    std::atomic<std::int32_t> running = kSenders;
    std::atomic<Nanos> last_arrival = 0;
    std::int64_t arrivals = 0;
    std::vector<std::thread> threads;
    for (std::int32_t src = 1; src <= kSenders; ++src) {
      threads.emplace_back([&, src] {
        Endpoint* endpoint = net.endpoint(src);
        Nanos now = 0;
        std::int64_t sent = 0;
        for (std::int64_t posted = 0; sent < kPuts;) {
          while (posted < kPuts && endpoint->post(make_put(src, 0, 100, posted), now) == PostStatus::kPosted) ++posted;
          now = std::max(now, endpoint->next_event());
          TransportEvent events[8];
          sent += endpoint->poll(now, events);
          std::this_thread::yield();
        }
        Nanos seen = last_arrival.load();
        while (seen < now && !last_arrival.compare_exchange_weak(seen, now)) {
        }
        --running;
      });
    }
    std::thread receiver([&] {
      TransportEvent events[8];
      for (bool last = false; !last;) {
        last = running.load() == 0;
        while (const int count = net.endpoint(0)->poll(0, events)) arrivals += count;
        std::this_thread::yield();
      }
    });
    for (std::thread& thread : threads) thread.join();
    receiver.join();
    EXPECT_EQ(counter.landed.load(), 100 * kSenders * kPuts);
    EXPECT_EQ(counter.stamps.load(), unordered ? 0 : kSenders * kPuts);
    EXPECT_EQ(arrivals, unordered ? kSenders * kPuts : 0);
    // Each put holds the receiver's link for 100 ns, so the last one cannot be earlier.
    EXPECT_GE(last_arrival.load(), 100 * kSenders * kPuts + 50);
  }
}

// Our own bugs.

TEST(LocalTransportDeathTest, TwoUsersOfOneEndpointAtOnceAreABug) {
  Network network(2, link_of(1, 10));
  network.post(make_put(0, 1, 1, 0));
  // A stamp is written from within poll(): whoever posts from there is a second user.
  network.log.on_stamp = [&] { network.net.endpoint(0)->post(make_put(0, 1, 1, 0), 0); };
  EXPECT_DEATH(network.run(), "mkernel bug");
}

TEST(LocalTransportDeathTest, PutsOfAnotherRankOrToNobodyOrOfNegativeSizeAreBugs) {
  Network network(2, link_of(1, 10));
  EXPECT_DEATH(network.net.endpoint(1)->post(make_put(0, 1, 1, 0), 0), "mkernel bug");
  EXPECT_DEATH(network.post(make_put(0, 2, 1, 0)), "mkernel bug");
  EXPECT_DEATH(network.post(make_put(0, -1, 1, 0)), "mkernel bug");
  EXPECT_DEATH(network.post(make_put(0, 1, -1, 0)), "mkernel bug");
}

}  // namespace
}  // namespace mkernel
