// Rings, proxies and the local transport in real threads and real time; ThreadSanitizer watches.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "net/local/local_transport.h"
#include "net/proxy.h"
#include "net/test_world.h"

namespace mkernel {
namespace {

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
TEST(ProxyThreadsTest, EightThreadsPushToOneLaneAndOnlyTheProxyPosts) {
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

TEST(ProxyThreadsTest, AnOperatorMayBeAddedWhileTheProxyRuns) {
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
