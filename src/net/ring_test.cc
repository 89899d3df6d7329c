#include "net/ring.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <deque>
#include <random>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

namespace mkernel {
namespace {

static_assert(std::is_trivially_copyable_v<RingView>, "a view goes to a kernel as an argument");

constexpr std::uint32_t kNearWrap = 0xfffffffdu;  // 2^32 - 3

Record numbered(std::uint32_t i) { return {i % kMaxOperators, i % 251, i % kMaxRecordTask, i % 262'139, 0}; }

// What a record is apart from its lap, which the ring sets.
Record without_lap(Record record) {
  record.lap = 0;
  return record;
}

class RingDepthTest : public testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {
 protected:
  std::uint32_t depth() const { return std::get<0>(GetParam()); }
  std::uint32_t start() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(DepthAndStart, RingDepthTest,
                         testing::Combine(testing::Values(1u, 2u, 4u, 256u),
                                          testing::Values(0u, 1u, 255u, 0x80000000u - 3, kNearWrap, 0xffffffffu)),
                         [](const auto& param_info) {
                           return "depth" + std::to_string(std::get<0>(param_info.param)) + "_start" +
                                  std::to_string(std::get<1>(param_info.param));
                         });

TEST_P(RingDepthTest, AFreshRingHoldsNothing) {
  CommandRing ring(depth(), start());
  Record record;
  EXPECT_FALSE(ring.peek(record));
  EXPECT_TRUE(ring.empty());
}

TEST_P(RingDepthTest, TakesExactlyDepthRecordsAndOneMoreForEachPop) {
  CommandRing ring(depth(), start());
  const RingView view = ring.view();
  for (std::uint32_t i = 0; i < depth(); ++i) ASSERT_TRUE(try_push(view, numbered(i)));
  for (std::uint32_t i = 0; i < 2 * depth(); ++i) {
    ASSERT_FALSE(try_push(view, numbered(99)));
    Record record;
    ASSERT_TRUE(ring.peek(record));
    ASSERT_EQ(without_lap(record), numbered(i));
    ring.pop();
    ASSERT_TRUE(try_push(view, numbered(i + depth())));
  }
}

TEST_P(RingDepthTest, EveryRecordComesOutOnceAndInOrderOver600Laps) {
  CommandRing ring(depth(), start());
  const RingView view = ring.view();
  std::mt19937 random(depth() + start());
  std::uint32_t pushed = 0;
  std::uint32_t popped = 0;
  while (popped < 600 * depth()) {
    for (std::uint32_t i = random() % (depth() + 1); i > 0 && try_push(view, numbered(pushed)); --i) ++pushed;
    ASSERT_LE(pushed - popped, depth());
    Record record;
    for (std::uint32_t i = random() % (depth() + 1); i > 0 && ring.peek(record); --i) {
      ASSERT_EQ(without_lap(record), numbered(popped));
      ring.pop();
      ++popped;
    }
    ASSERT_EQ(ring.empty(), pushed == popped);
  }
}

TEST_P(RingDepthTest, AllZeroRecordsAreRecordsAndEmptySlotsAreNot) {
  CommandRing ring(depth(), start());
  const RingView view = ring.view();
  bool zero_word_seen = false;
  for (std::uint32_t i = 0; i < 300 * depth(); ++i) {
    Record record;
    ASSERT_FALSE(ring.peek(record)) << "before push " << i;
    ASSERT_TRUE(try_push(view, Record{}));
    ASSERT_TRUE(ring.peek(record)) << "after push " << i;
    ASSERT_EQ(without_lap(record), Record{});
    zero_word_seen |= encode(record) == 0;
    ring.pop();
  }
  EXPECT_TRUE(zero_word_seen) << "300 laps pass the lap whose 8 bits are zero";
}

TEST(RingTest, TheLapOfThePushedRecordIsIgnored) {
  CommandRing ring(4);
  Record record = numbered(7);
  for (record.lap = 0; record.lap < 256; ++record.lap) {
    ASSERT_TRUE(try_push(ring.view(), record));
    Record seen;
    ASSERT_TRUE(ring.peek(seen));
    ASSERT_EQ(without_lap(seen), numbered(7));
    ring.pop();
  }
}

TEST(RingTest, PeekLeavesTheRecordWhereItIs) {
  CommandRing ring(1);
  ASSERT_TRUE(try_push(ring.view(), numbered(3)));
  for (int i = 0; i < 3; ++i) {
    Record record;
    ASSERT_TRUE(ring.peek(record));
    EXPECT_EQ(without_lap(record), numbered(3));
    EXPECT_FALSE(try_push(ring.view(), numbered(4)));
  }
}

// A ring as a GPU's is: memory of an owner, full of garbage, and a head that only the producers know.
struct OutsideRing {
  explicit OutsideRing(std::uint32_t depth, std::uint32_t start)
      : slots(depth, 0x5a5a5a5a5a5a5a5aull), head(start), ring(RingMemory{slots.data(), &tail, depth}, start) {}
  RingView view() {
    RingView view = ring.view();
    view.head = &head;
    return view;
  }
  std::vector<std::uint64_t> slots;
  std::uint32_t head;
  std::uint32_t tail = 0x5a5a5a5a;
  CommandRing ring;
};

TEST_P(RingDepthTest, ARingInMemoryOfItsOwnerCarriesRecordsLikeAnyOther) {
  OutsideRing outside(depth(), start());
  CommandRing& ring = outside.ring;
  EXPECT_EQ(ring.view().head, nullptr);
  EXPECT_EQ(outside.tail, start());
  EXPECT_EQ(ring.depth(), depth());
  const RingView view = outside.view();
  Record record;
  for (std::uint32_t i = 0; i < 600 * depth(); i += depth()) {
    ASSERT_TRUE(ring.empty());
    ASSERT_FALSE(ring.peek(record));
    for (std::uint32_t j = 0; j < depth(); ++j) ASSERT_TRUE(try_push(view, numbered(i + j)));
    ASSERT_FALSE(try_push(view, numbered(0)));
    for (std::uint32_t j = 0; j < depth(); ++j) {
      ASSERT_FALSE(ring.empty());
      ASSERT_TRUE(ring.peek(record));
      ASSERT_EQ(without_lap(record), numbered(i + j));
      ring.pop();
      ASSERT_EQ(outside.tail, start() + i + j + 1) << "producers see every free slot";
    }
  }
}

TEST(RingTest, ARingWithoutAHeadIsEmptyWhileItsNextRecordIsNotPublished) {
  OutsideRing outside(4, 0);
  const auto position = try_reserve(outside.view());
  ASSERT_TRUE(position);
  EXPECT_TRUE(outside.ring.empty());
  publish(outside.view(), *position, numbered(5));
  EXPECT_FALSE(outside.ring.empty());
}

TEST(RingDeathTest, ARingInMemoryThatIsNotThereIsABug) {
  std::uint32_t tail = 0;
  EXPECT_DEATH(CommandRing(RingMemory{nullptr, &tail, 4}), "mkernel bug");
}

TEST(RingDeathTest, DepthsThatAreNoPowerOfTwoAndPopsOfNothingAreBugs) {
  EXPECT_DEATH(CommandRing(3), "mkernel bug");
  EXPECT_DEATH(CommandRing(0), "mkernel bug");
  EXPECT_DEATH(CommandRing(2 * kMaxRingDepth), "mkernel bug");
  CommandRing ring(2);
  EXPECT_DEATH(ring.pop(), "mkernel bug");
}

// 256 producers in one thread: each reserves, and publishes some time later, as a warp may be held up in between.
TEST_P(RingDepthTest, RecordsOf256InterleavedProducersComeInOrderOfReservation) {
  struct Producer {
    bool reserved = false;
    std::uint32_t position = 0;
    std::uint32_t next = 0;
  };
  CommandRing ring(depth(), start());
  const RingView view = ring.view();
  std::mt19937 random(17 * depth() + start());
  std::array<Producer, 256> producers;
  std::deque<Record> reserved;  // in order of reservation, not yet popped
  std::deque<bool> published;
  std::uint32_t first = start();  // position of reserved.front()
  const auto record_of = [](std::uint32_t producer, std::uint32_t i) { return Record{0, producer, i, 0, 0}; };

  std::int64_t popped = 0;
  for (std::uint64_t round = 0; popped < 100 * std::int64_t{depth()} + 2'000; ++round) {
    ASSERT_LT(round, 10'000'000u) << "no progress";
    // With few slots most producers find the ring full, so some must be looked for that hold a position.
    const auto id = static_cast<std::uint32_t>(random() % producers.size());
    Producer& producer = producers[id];
    if (producer.reserved) {
      publish(view, producer.position, record_of(id, producer.next++));
      published[producer.position - first] = true;
      producer.reserved = false;
    } else if (const auto position = try_reserve(view)) {
      ASSERT_EQ(*position, first + static_cast<std::uint32_t>(reserved.size()));
      producer.reserved = true;
      producer.position = *position;
      reserved.push_back(record_of(id, producer.next));
      published.push_back(false);
    } else {
      ASSERT_EQ(reserved.size(), depth());
    }
    if (random() % 4 != 0) continue;
    Record record;
    ASSERT_EQ(ring.peek(record), !published.empty() && published.front());
    if (published.empty() || !published.front()) continue;
    ASSERT_EQ(without_lap(record), reserved.front());
    ring.pop();
    ++popped;
    ++first;
    reserved.pop_front();
    published.pop_front();
  }
}

// Eight threads, each for 32 producers in turn. What a producer writes before it publishes, and what the consumer reads
// before it pops, are plain memory: ThreadSanitizer sees a race if either edge is missing.
void push_from_threads(std::uint32_t depth, std::uint32_t start, std::uint32_t pushes_per_producer, int stops) {
  constexpr std::uint32_t kThreads = 8;
  constexpr std::uint32_t kProducersPerThread = 32;
  CommandRing ring(depth, start);
  const RingView view = ring.view();
  std::vector<std::uint64_t> beside(depth);  // written by the producer, read by the consumer, as long as the slot is

  const auto produce = [&](std::uint32_t thread) {
    for (std::uint32_t i = 0; i < pushes_per_producer; ++i) {
      for (std::uint32_t p = 0; p < kProducersPerThread; ++p) {
        const std::uint32_t producer = thread * kProducersPerThread + p;
        std::optional<std::uint32_t> position;
        while (!(position = try_reserve(view))) std::this_thread::yield();
        beside[*position & (depth - 1)] = (std::uint64_t{producer} << 32) | i;
        publish(view, *position, {0, producer, i, 0, 0});
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) threads.emplace_back(produce, t);

  std::array<std::uint32_t, kThreads * kProducersPerThread> next{};
  const std::uint32_t total = kThreads * kProducersPerThread * pushes_per_producer;
  std::uint32_t wrong = 0;
  std::uint32_t position = start;
  for (std::uint32_t taken = 0; taken < total;) {
    if ((position & (depth - 1)) == 0 && stops > 0) {
      --stops;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    Record record;
    if (!ring.peek(record)) {
      std::this_thread::yield();
      continue;
    }
    // The record's epoch field has the producer, its task field the producer's own count.
    wrong += record.task != next[record.epoch]++;
    wrong += beside[position & (depth - 1)] != ((std::uint64_t{record.epoch} << 32) | record.task);
    ring.pop();
    ++position;
    ++taken;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_TRUE(ring.empty());
  for (const std::uint32_t n : next) EXPECT_EQ(n, pushes_per_producer);
}

TEST(RingTest, EightThreadsLoseAndRepeatNothing) {
  // Shallow rings change threads at almost every push.
  for (const std::uint32_t depth : {1u, 2u, 4u}) push_from_threads(depth, kNearWrap, 8, 0);
  push_from_threads(256, kNearWrap - 50'000, 1'000, 0);
}

TEST(RingTest, AConsumerThatStops100MillisecondsAtLapEdgesLosesNothing) {
  push_from_threads(2, kNearWrap, 4, 6);
  push_from_threads(4, kNearWrap, 4, 6);
}

}  // namespace
}  // namespace mkernel
