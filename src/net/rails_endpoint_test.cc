// Rails over endpoints that do as they are told. What networks do with them the conformance suite asks.
#include "net/rails_endpoint.h"

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <map>

#include "net/address_bytes.h"
#include "net/test_world.h"

namespace mkernel {
namespace {

// Remembers what it is asked, and completes puts when the test says so.
class ToldEndpoint final : public ProcessEndpoint {
 public:
  explicit ToldEndpoint(std::string name) : address_("at " + name), name_(std::move(name)) {}

  const std::string& address() const override { return address_; }
  Status connect(std::int32_t, std::string_view address) override {
    connected = address;
    if (refuses) return Error{ErrorKind::kIo, name_ + " refuses"};
    return Ok{};
  }
  Result<RemoteHeap> add_heap(std::uint32_t op, const HeapMemory&, std::uint64_t) override {
    if (refuses) return Error{ErrorKind::kUnsupported, name_ + " refuses"};
    ++heaps;
    return RemoteHeap{op + 100, name_.size()};
  }
  void set_remote(std::uint32_t, std::int32_t, const RemoteHeap& heap) override { remote = heap; }
  void remove_heap(std::uint32_t) override { --heaps; }
  std::string name() const override { return name_; }
  std::int64_t bytes_sent(std::uint32_t) const override { return 10; }
  std::string last_error() const override { return failed_ ? "it broke" : ""; }
  PostStatus post(const Put& put, Nanos) override {
    if (fatal) return PostStatus::kFatal;
    posted.push_back(put);
    return PostStatus::kPosted;
  }
  int poll(Nanos, std::span<TransportEvent> out) override {
    int count = 0;
    for (; !events.empty() && count < static_cast<int>(out.size()); events.pop_front(), ++count) {
      out[static_cast<std::size_t>(count)] = events.front();
    }
    return count;
  }
  Nanos next_event() const override { return next; }
  int arrivals_per_put() const override { return 1; }

  void end(EventKind kind) {
    events.push_back({kind, posted.front().dst_rank, posted.front().id});
    failed_ |= kind == EventKind::kFailed;
    posted.pop_front();
  }

  std::string connected;
  RemoteHeap remote;
  std::deque<Put> posted;
  std::deque<TransportEvent> events;
  Nanos next = kNever;
  int heaps = 0;
  bool refuses = false;
  bool fatal = false;

 private:
  std::string address_;
  std::string name_;
  bool failed_ = false;
};

struct Rails {
  explicit Rails(int count, int queue_depth = 4) {
    std::vector<std::unique_ptr<ProcessEndpoint>> rails;
    for (int i = 0; i < count; ++i) {
      auto rail = std::make_unique<ToldEndpoint>("card " + std::to_string(i));
      told.push_back(rail.get());
      rails.push_back(std::move(rail));
    }
    endpoint = create_rails_endpoint(3, queue_depth, std::move(rails));
  }
  PostStatus post(int dst, std::int64_t flag) {
    Put put;
    put.dst_rank = dst;
    put.flag = flag;
    return endpoint->post(put, 0);
  }
  std::vector<std::size_t> posted() const {
    std::vector<std::size_t> counts;
    for (const ToldEndpoint* rail : told) counts.push_back(rail->posted.size());
    return counts;
  }
  int poll(int room) {
    events.resize(static_cast<std::size_t>(room));
    return endpoint->poll(0, events);
  }

  std::vector<ToldEndpoint*> told;
  std::unique_ptr<ProcessEndpoint> endpoint;
  std::vector<TransportEvent> events;
};

TEST(RailsEndpointTest, PutsTakeTheRailOfTheirFlagAmongThoseThatBothSidesHave) {
  Rails three(3, 100);
  const Rails two(2);
  ASSERT_TRUE(three.endpoint->connect(1, two.endpoint->address()).ok());
  ASSERT_TRUE(three.endpoint->connect(2, Rails(3).endpoint->address()).ok());
  EXPECT_EQ(three.told[1]->connected, "at card 1");
  for (int flag = 0; flag < 12; ++flag) EXPECT_EQ(three.post(1, flag), PostStatus::kPosted);
  EXPECT_EQ(three.posted()[0] + three.posted()[1], 12u);
  EXPECT_EQ(three.posted()[2], 0u);
  for (int flag = 0; flag < 12; ++flag) EXPECT_EQ(three.post(2, flag), PostStatus::kPosted);
  EXPECT_GE(three.posted()[2], 3u);
  for (const ToldEndpoint* rail : three.told) {
    for (const Put& put : rail->posted) {
      EXPECT_EQ(rail, three.told[rail_of(put.flag, put.dst_rank == 1 ? 2 : 3)]);
    }
  }
}

TEST(RailsEndpointTest, NoRailIsFullBeforeAllAre) {
  Rails rails(2, 3);
  ASSERT_TRUE(rails.endpoint->connect(1, rails.endpoint->address()).ok());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rails.post(1, 0), PostStatus::kPosted);
  EXPECT_EQ(rails.post(1, 1), PostStatus::kFull);
  rails.told[0]->end(EventKind::kSent);
  EXPECT_EQ(rails.poll(8), 1);
  EXPECT_EQ(rails.post(1, 1), PostStatus::kPosted);
  EXPECT_EQ(rails.post(1, 1), PostStatus::kFull);
}

TEST(RailsEndpointTest, APeerThatIsLostOverOneRailIsLostOverAllAndTheRailIsNamed) {
  Rails rails(2);
  for (int peer = 1; peer < 3; ++peer) ASSERT_TRUE(rails.endpoint->connect(peer, rails.endpoint->address()).ok());
  ASSERT_EQ(rail_of(1, 2), 1u);
  EXPECT_EQ(rails.post(1, 1), PostStatus::kPosted);
  EXPECT_EQ(rails.endpoint->last_error(), "");
  rails.told[1]->end(EventKind::kFailed);
  ASSERT_EQ(rails.poll(8), 1);
  EXPECT_EQ(rails.events[0].kind, EventKind::kFailed);
  EXPECT_EQ(rails.post(1, 0), PostStatus::kFatal);
  EXPECT_EQ(rails.post(2, 0), PostStatus::kPosted);
  EXPECT_EQ(rails.endpoint->last_error(), "card 1: it broke");
  rails.told[0]->fatal = true;
  EXPECT_EQ(rails.post(2, 0), PostStatus::kFatal);
  EXPECT_EQ(rails.post(2, 1), PostStatus::kFatal);
}

TEST(RailsEndpointTest, NoRailKeepsAnotherFromBeingHeard) {
  Rails rails(3);
  for (int i = 0; i < 5; ++i) rails.told[0]->events.push_back({EventKind::kArrived, 0});
  rails.told[1]->events.push_back({EventKind::kArrived, 1});
  rails.told[2]->events.push_back({EventKind::kArrived, 2});
  std::vector<int> peers;
  for (int room = 2; rails.poll(room) == room;) {
    for (const TransportEvent& event : rails.events) peers.push_back(event.peer);
  }
  EXPECT_EQ(peers, (std::vector<int>{0, 0, 1, 2, 0, 0}));
  rails.told[1]->next = 7;
  EXPECT_EQ(rails.endpoint->next_event(), 7);
}

TEST(RailsEndpointTest, HeapsAreOpenedOverEveryRailOrNone) {
  Rails rails(2);
  std::byte memory{};
  const RemoteHeap heap = rails.endpoint->add_heap(3, {&memory, 1}, 0).value();
  ASSERT_EQ(heap.rails.size(), 2u);
  RemoteHeap read;
  ASSERT_TRUE(read_heap(heap_bytes(heap), read));
  rails.endpoint->set_remote(3, 1, read);
  EXPECT_EQ(rails.told[1]->remote.key, 103u);
  rails.endpoint->remove_heap(3);
  rails.told[1]->refuses = true;
  const auto refused = rails.endpoint->add_heap(3, {&memory, 1}, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().message, "card 1 refuses");
  EXPECT_EQ(rails.told[0]->heaps, 0);
  EXPECT_EQ(rails.endpoint->bytes_sent(3), 20);
}

TEST(RailsEndpointTest, AddressesAndHeapsThatAreNoneAreRefused) {
  Rails rails(2);
  const std::string good = rails.endpoint->address();
  EXPECT_TRUE(rails.endpoint->connect(1, good).ok());
  EXPECT_TRUE(rails.endpoint->connect(1, good + "more").ok());
  for (std::size_t bytes = 0; bytes < good.size(); ++bytes) {
    const Status status = rails.endpoint->connect(1, std::string_view(good).substr(0, bytes));
    ASSERT_FALSE(status.ok()) << bytes;
    EXPECT_NE(status.error().message.find("rank 1"), std::string::npos);
  }
  EXPECT_FALSE(rails.endpoint->connect(1, std::string(64, '\xff')).ok());
  RemoteHeap heap;
  EXPECT_FALSE(read_heap("", heap));
  EXPECT_FALSE(read_heap(std::string(64, '\xff'), heap));
  EXPECT_FALSE(read_heap(heap_bytes({1, 2}) + "x", heap));
  EXPECT_TRUE(read_heap(heap_bytes({1, 2}), heap));
  EXPECT_EQ(heap.address, 2u);
}

// With flag modulo rails 320 of 512 puts of GEMM + AllReduce on 4 nodes took one of four.
TEST(RailsEndpointTest, PlansSpreadTheirBytesOverTheRails) {
  for (const PlanSpec& spec :
       {small_spec(Op::kGemmReduceScatter, 2, 4, 2048, 1024), small_spec(Op::kAllGatherGemm, 2, 8, 4096, 1024),
        small_spec(Op::kAllGatherGemm, 4, 2, 4096, 1024), small_spec(Op::kGemmAllReduce, 2, 4, 2048, 1024),
        small_spec(Op::kGemmAllReduce, 4, 4, 4096, 1024)}) {
    const PlanSource source{Plan(spec)};
    for (const std::uint32_t rails : {2u, 4u}) {
      std::map<std::int32_t, std::map<std::size_t, int>> puts;  // by peer, rail
      for (std::int32_t lane = 0; lane < source.plan().lanes(Role::kSend); ++lane) {
        for (std::int32_t i = 0; i < source.count(0, Role::kSend, lane); ++i) {
          const Task task = source.task(0, Role::kSend, lane, i);
          ++puts[task.peer][rail_of(task.signals[0].flag, rails)];
        }
      }
      for (const auto& [peer, by_rail] : puts) {
        int all = 0;
        int most = 0;
        for (const auto& [rail, count] : by_rail) {
          all += count;
          most = std::max(most, count);
        }
        EXPECT_LE(most, 1.2 * all / rails + 1) << op_name(spec.op) << " to " << peer << ": " << all;
      }
    }
  }
}

}  // namespace
}  // namespace mkernel
