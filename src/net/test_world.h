// For tests of the network: heaps, rings, proxies and a network for all ranks, driven in virtual time by one thread.
// The heaps check the contract: when a stamp appears, every byte of its put must be there.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "net/libfabric/fabric_endpoint.h"
#include "net/local/local_transport.h"
#include "net/proxy.h"

namespace mkernel {

// Small tiles, so that small matrices still make many puts.
inline PlanSpec small_spec(Op op, std::int32_t nodes, std::int32_t gpus, std::int64_t m, std::int64_t n) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = {nodes, gpus};
  spec.m = m;
  spec.n = n;
  spec.k = 96;
  spec.tiling = {16, 32, 2, 2, 16, 1};
  return spec;
}

// The heaps of all ranks for any number of operators. A put is announced with expect() when its record is pushed;
// violations of the contract are collected in `wrong`.
class CheckedHeaps : public Landing {
 public:
  void add(std::uint32_t op, const HeapLayout& layout, std::int32_t world) {
    auto& heaps = heaps_[op];
    // Garbage, as a heap of the last run would hold (reliability.md, case 5).
    const std::vector<std::uint8_t> garbage(static_cast<std::size_t>(layout.bytes()), 0xff);
    heaps.assign(static_cast<std::size_t>(world), garbage);
  }

  std::uint8_t* heap(std::uint32_t op, std::int32_t rank) {
    return heaps_.at(op).at(static_cast<std::size_t>(rank)).data();
  }

  // From now on `put` may arrive, once; fills its source with `fill(i)` for byte i.
  template <class F>
  void expect(const Put& put, F fill) {
    std::uint8_t* src = heap(put.op, put.src_rank) + put.src_offset;
    for (std::int64_t i = 0; i < put.bytes; ++i) src[i] = fill(i);
    if (direct) {  // nobody tells us what lands: until the put does, the destination differs in every byte
      std::uint8_t* dst = heap(put.op, put.dst_rank) + put.dst_offset;
      for (std::int64_t i = 0; i < put.bytes; ++i) dst[i] = static_cast<std::uint8_t>(~src[i]);
    }
    Expected& expected = expected_[{put.dst_rank, put.op, put.flag}];
    if (expected.open) complain(put, "announced twice");
    expected = {put, 0, true};
    ++open_;
  }

  void land(const Put& put, std::int64_t begin, std::int64_t bytes) override {
    const auto at = expected_.find({put.dst_rank, put.op, put.flag});
    if (at == expected_.end() || !at->second.open) return complain(put, "bytes of a put that nobody announced");
    const Put& want = at->second.put;
    if (std::tie(put.src_rank, put.src_offset, put.dst_offset, put.bytes, put.value, put.epoch) !=
        std::tie(want.src_rank, want.src_offset, want.dst_offset, want.bytes, want.value, want.epoch)) {
      return complain(put, "differs from what was announced");
    }
    if (begin < 0 || bytes < 0 || begin + bytes > put.bytes) return complain(put, "a piece outside the put");
    std::memcpy(heap(put.op, put.dst_rank) + put.dst_offset + begin,
                heap(put.op, put.src_rank) + put.src_offset + begin, static_cast<std::size_t>(bytes));
    at->second.landed += bytes;
    landed_bytes_ += bytes;
  }

  void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override {
    const auto at = expected_.find({rank, op, flag});
    if (at == expected_.end() || !at->second.open) {
      wrong.push_back("a stamp that nobody announced");
      return;
    }
    Expected& expected = at->second;
    const Put& put = expected.put;
    if (value != put.value) complain(put, "a stamp with a wrong value");
    if (direct) landed_bytes_ += put.bytes;
    if (!direct && expected.landed != put.bytes) complain(put, "a stamp before its bytes, or bytes twice");
    if (std::memcmp(heap(op, rank) + put.dst_offset, heap(op, put.src_rank) + put.src_offset,
                    static_cast<std::size_t>(put.bytes)) != 0) {
      complain(put, "a stamp with other bytes than were sent");
    }
    expected.open = false;
    --open_;
    ++stamps_;
    if (on_stamp) on_stamp(put);
  }

  // The network has written it: it must be in the heap, which begins with the flags.
  void stamped(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override {
    std::uint32_t seen = 0;
    std::memcpy(&seen, heap(op, rank) + flag * 4, 4);
    if (seen != value) wrong.push_back("a stamp that was told of and is not there");
    stamp(rank, op, flag, value);
  }

  std::int64_t stamps() const { return stamps_; }
  std::int64_t open() const { return open_; }  // announced, stamp still missing
  std::int64_t landed_bytes() const { return landed_bytes_; }

  bool direct = false;  // the network writes into heaps itself, without land()
  std::vector<std::string> wrong;
  std::function<void(const Put&)> on_stamp;

 private:
  struct Expected {
    Put put;
    std::int64_t landed = 0;
    bool open = false;
  };
  void complain(const Put& put, const char* what) {
    if (wrong.size() > 20) return;
    wrong.push_back("put from " + std::to_string(put.src_rank) + " to " + std::to_string(put.dst_rank) + ", epoch " +
                    std::to_string(put.epoch) + ", flag " + std::to_string(put.flag) + ": " + what);
  }

  std::map<std::uint32_t, std::vector<std::vector<std::uint8_t>>> heaps_;
  std::map<std::tuple<std::int32_t, std::uint32_t, std::int64_t>, Expected> expected_;
  std::int64_t stamps_ = 0;
  std::int64_t open_ = 0;
  std::int64_t landed_bytes_ = 0;
};

// Stands before an endpoint and lets some posts fail for the moment.
class FlakyEndpoint : public Endpoint {
 public:
  explicit FlakyEndpoint(Endpoint* inner) : inner_(inner) {}
  PostStatus post(const Put& put, Nanos now) override {
    return fails && fails(++calls_, put) ? PostStatus::kAgain : inner_->post(put, now);
  }
  void flush(Nanos now) override { inner_->flush(now); }
  int poll(Nanos now, std::span<TransportEvent> events) override { return inner_->poll(now, events); }
  Nanos next_event() const override { return inner_->next_event(); }
  int arrivals_per_put() const override { return inner_->arrivals_per_put(); }

  std::function<bool(std::int64_t call, const Put& put)> fails;

 private:
  Endpoint* inner_;
  std::int64_t calls_ = 0;
};

struct TestWorldOptions {
  LinkModel link;
  // Over libfabric's tcp on the loopback, in real time, with so many pieces per put; 0: over the local network.
  int fabric_pieces = 0;
  // Or over endpoints that this makes, one per rank, in real time too.
  std::function<std::unique_ptr<ProcessEndpoint>(std::int32_t rank, std::int32_t world)> make_endpoint = nullptr;
  std::uint32_t ring_depth = 4;
  std::uint32_t ring_start = 0xfffffffdu;
  int queue_depth = 2;
  int window = 8;
  int batch = 2;
  Nanos max_post_failures_ns = 60'000'000'000;
  bool hinted = false;
};

class TestWorld {
 public:
  TestWorld(const Topology& topo, const TestWorldOptions& options)
      : topo_(topo), options_(options), network_(topo.world(), options.link, &heaps, [this](std::int32_t rank, Nanos) {
          ++wakes;
          MK_CHECK(rank >= 0 && rank < topo_.world());
        }) {
    if (over_fabric()) {
      open_fabric();
      now = real_now();  // from the first step on: a put that is put off counts the time since then
    }
    for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
      auto& rings = rings_.emplace_back();
      ProxyConfig config;
      for (std::int32_t node = 0; node < topo.nodes; ++node) {
        const bool own = node == topo.node_of(rank);
        rings.push_back(own ? nullptr : std::make_unique<CommandRing>(options.ring_depth, options.ring_start));
        config.rings.push_back(rings.back().get());
      }
      endpoints_.push_back(
          std::make_unique<FlakyEndpoint>(over_fabric() ? fabric_[rank].get() : network_.endpoint(rank)));
      config.rank = rank;
      config.topo = topo;
      config.endpoint = endpoints_.back().get();
      config.landing = &heaps;
      config.queue_depth = options.queue_depth;
      config.window = options.window;
      config.batch = options.batch;
      config.max_post_failures_ns = options.max_post_failures_ns;
      config.hinted = options.hinted;
      proxies_.push_back(std::make_unique<Proxy>(config));
    }
  }

  // `source` must outlive the world.
  void add_operator(std::uint32_t op, const PlanSource& source, std::uint64_t start_epoch = 0) {
    operators_[op] = {&source, HeapLayout(source.plan())};
    heaps.add(op, operators_[op].layout, topo_.world());
    for (auto& proxy : proxies_) proxy->add_operator(op, &source, operators_[op].layout, start_epoch);
    for (std::int32_t rank = 0; over_fabric() && rank < topo_.world(); ++rank) {
      fabric_heaps_.resize(fabric_.size());
      fabric_heaps_[rank] =
          fabric_[rank]->add_heap(op, {heaps.heap(op, rank), operators_[op].layout.bytes()}, start_epoch).value();
    }
    for (std::int32_t rank = 0; over_fabric() && rank < topo_.world(); ++rank) {
      for (std::int32_t peer = 0; peer < topo_.world(); ++peer)
        fabric_[rank]->set_remote(op, peer, fabric_heaps_[peer]);
    }
  }
  bool over_fabric() const { return options_.fabric_pieces > 0 || options_.make_endpoint; }

  Proxy& proxy(std::int32_t rank) { return *proxies_[static_cast<std::size_t>(rank)]; }
  CommandRing& ring(std::int32_t rank, std::int32_t node) {
    return *rings_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(node)];
  }
  FlakyEndpoint& endpoint(std::int32_t rank) { return *endpoints_[static_cast<std::size_t>(rank)]; }
  LocalNetwork& network() { return network_; }
  const Topology& topo() const { return topo_; }
  const HeapLayout& layout(std::uint32_t op) const { return operators_.at(op).layout; }

  // The put that a send task stands for, worked out apart from the proxy.
  Put put_of(std::uint32_t op, std::int32_t rank, SendId id, std::uint64_t epoch) const {
    const auto& [source, layout] = operators_.at(op);
    const Task task = source->task(rank, Role::kSend, id.lane, id.index);
    Put put;
    put.src_rank = rank;
    put.dst_rank = task.peer;
    put.op = op;
    put.epoch = epoch;
    put.src_offset = layout.offset(task.src, task.src_offset, epoch);
    put.dst_offset = layout.offset(task.dst, task.dst_offset, epoch);
    put.bytes = task.length * dtype_bytes(source->plan().buffer_dtype(task.src));
    put.flag = layout.flag_index(task.signals[0].flag, epoch);
    put.value = static_cast<std::uint32_t>((epoch + 1) >> 1);
    return put;
  }

  // One send task that is to be pushed.
  struct Send {
    std::uint32_t op = 0;
    std::int32_t rank = 0;
    SendId id;
    std::uint64_t epoch = 0;
  };

  // All send tasks of an epoch of `op` on one rank, lanes interleaved.
  std::vector<Send> sends(std::uint32_t op, std::int32_t rank, std::uint64_t epoch) const {
    const PlanSource& source = *operators_.at(op).source;
    std::vector<Send> result;
    const std::int32_t lanes = source.plan().lanes(Role::kSend);
    for (std::int64_t index = 0, left = 1; left > 0; ++index) {
      left = 0;
      for (std::int32_t lane = 0; lane < lanes; ++lane) {
        if (index >= source.count(rank, Role::kSend, lane)) continue;
        ++left;
        if (source.task(rank, Role::kSend, lane, index).action == Action::kNone) continue;
        result.push_back({op, rank, {lane, index}, epoch});
      }
    }
    return result;
  }

  // Pushes one record; false when its ring is full. The payload depends on epoch and place, but not on the destination:
  // some plans send the same bytes to several nodes.
  bool push(const Send& send) {
    const std::int64_t offset = put_of(send.op, send.rank, send.id, send.epoch).src_offset;
    const std::uint64_t seed = (send.epoch * 64 + send.op) * 1'000'003 + static_cast<std::uint64_t>(send.rank) * 7'919 +
                               static_cast<std::uint64_t>(offset);
    return push(send, [seed](std::int64_t i) {
      return static_cast<std::uint8_t>((seed + static_cast<std::uint64_t>(i)) * 0x9e3779b97f4a7c15ull >> 56);
    });
  }
  template <class F>
  bool push(const Send& send, F fill) {
    const PlanSource& source = *operators_.at(send.op).source;
    const Put put = put_of(send.op, send.rank, send.id, send.epoch);
    const std::int32_t node = topo_.node_of(put.dst_rank);
    const auto position = try_reserve(ring(send.rank, node).view());
    if (!position) return false;
    heaps.expect(put, fill);
    pushed_bytes += put.bytes;
    ++pushed;
    const auto task = static_cast<std::uint32_t>(send_id(source.plan(), send.id));
    publish(ring(send.rank, node).view(), *position,
            {send.op, static_cast<std::uint32_t>(send.epoch & 0xff), task, 0, 0});
    proxy(send.rank).ring_filled(node);
    return true;
  }

  // Steps the proxies that have something to do, then moves time on to the next event. False when there is none.
  bool advance() {
    bool worked = false;
    for (std::int32_t rank = 0; rank < topo_.world(); ++rank) worked |= proxy(rank).step(now);
    if (over_fabric()) return advance_real_time(worked);
    if (worked) return true;
    Nanos next = kNever;
    for (const auto& proxy : proxies_) next = std::min(next, proxy->next_event());
    if (next == kNever) return false;
    now = std::max(now, next);
    return true;
  }
  void run_until_quiet() {
    while (advance()) {
    }
  }

  // Pushes everything, as fast as rings allow, each list in its order, and runs until nothing moves.
  void run(std::vector<std::vector<Send>> lists) {
    std::vector<std::size_t> next(lists.size());
    bool all_pushed = false;
    while (!all_pushed) {
      all_pushed = true;
      for (std::size_t i = 0; i < lists.size(); ++i) {
        while (next[i] < lists[i].size() && push(lists[i][next[i]])) ++next[i];
        all_pushed &= next[i] == lists[i].size();
      }
      if (!advance() && !all_pushed) return;
    }
    run_until_quiet();
  }

  // Runs both parities, then both again with fresh data, for `epochs` in all, an even number.
  void run_epochs(std::uint32_t op, std::uint64_t first, std::uint64_t epochs) {
    for (std::uint64_t epoch = first; epoch < first + epochs; epoch += 2) {
      std::vector<std::vector<Send>> lists;
      for (std::int32_t rank = 0; rank < topo_.world(); ++rank) {
        lists.push_back(sends(op, rank, epoch));
        const std::vector<Send> second = sends(op, rank, epoch + 1);
        lists.back().insert(lists.back().end(), second.begin(), second.end());
      }
      run(std::move(lists));
    }
  }

  // Sum over all proxies.
  ProxyStats total() const {
    ProxyStats sum;
    for (const auto& proxy : proxies_) {
      sum.records += proxy->stats().records;
      sum.posts += proxy->stats().posts;
      sum.bytes += proxy->stats().bytes;
      sum.batches += proxy->stats().batches;
      sum.retries += proxy->stats().retries;
      sum.sent += proxy->stats().sent;
      sum.failed += proxy->stats().failed;
      sum.arrivals += proxy->stats().arrivals;
    }
    return sum;
  }

  CheckedHeaps heaps;
  Nanos now = 1'000;
  std::int64_t pushed = 0;
  std::int64_t pushed_bytes = 0;
  std::int64_t wakes = 0;

 private:
  struct Operator {
    const PlanSource* source = nullptr;
    HeapLayout layout;
  };

  void open_fabric() {
    heaps.direct = true;
    FabricOptions fabric;
    fabric.local_address = "127.0.0.1";
    fabric.pieces = options_.fabric_pieces;
    for (std::int32_t rank = 0; rank < topo_.world(); ++rank) {
      fabric_.push_back(options_.make_endpoint ? options_.make_endpoint(rank, topo_.world())
                                               : create_fabric_endpoint(rank, topo_.world(), fabric).value());
    }
    for (std::int32_t rank = 0; rank < topo_.world(); ++rank) {
      for (std::int32_t peer = 0; peer < topo_.world(); ++peer) {
        if (peer != rank) MK_CHECK(fabric_[rank]->connect(peer, fabric_[peer]->address()).ok());
      }
    }
  }
  static Nanos real_now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
  // False when all is quiet, or nothing has moved for far too long.
  bool advance_real_time(bool worked) {
    const Nanos last = now;
    now = real_now();
    if (worked) {
      quiet_ns_ = 0;
      return true;
    }
    bool idle = heaps.open() == 0;
    for (const auto& proxy : proxies_) idle = idle && proxy->idle();
    quiet_ns_ += now - last;
    return !idle && quiet_ns_ < kLongestQuietNs;
  }
  static constexpr Nanos kLongestQuietNs = 20'000'000'000;

  Topology topo_;
  TestWorldOptions options_;
  LocalNetwork network_;
  std::vector<std::unique_ptr<ProcessEndpoint>> fabric_;
  std::vector<RemoteHeap> fabric_heaps_;  // of the operator that was added last
  Nanos quiet_ns_ = 0;
  std::vector<std::vector<std::unique_ptr<CommandRing>>> rings_;
  std::vector<std::unique_ptr<FlakyEndpoint>> endpoints_;
  std::vector<std::unique_ptr<Proxy>> proxies_;
  std::map<std::uint32_t, Operator> operators_;
};

inline LinkModel slow_link() {
  LinkModel link;
  link.bytes_per_ns = 0.5;
  link.latency_ns = 3'000;
  return link;
}
inline LinkModel jittery_link() {
  LinkModel link = slow_link();
  link.jitter_ns = 20'000;
  return link;
}
inline LinkModel unordered_link(int pieces) {
  LinkModel link = jittery_link();
  link.unordered = true;
  link.pieces = pieces;
  return link;
}

inline void expect_all_delivered(TestWorld& world) {
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
    if (world.over_fabric()) continue;
    EXPECT_EQ(world.proxy(rank).next_event(), kNever);
    EXPECT_EQ(world.network().bytes_sent(rank), world.proxy(rank).stats().bytes);
  }
}

}  // namespace mkernel
