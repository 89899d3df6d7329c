// The parts of the host executor that can be looked at alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "exec/host/doorbell.h"
#include "exec/host/failure.h"
#include "exec/host/flight_recorder.h"
#include "exec/host/launch_log.h"
#include "exec/host/stream.h"
#include "plan/test_spec.h"

namespace mkernel {
namespace {

TEST(Doorbell, ARingBetweenLookingAndSleepingIsNotLost) {
  Doorbell bell;
  const std::uint32_t seen = bell.sequence();
  bell.ring();
  bell.sleep(seen, kNever);  // hangs if the ring is lost
  EXPECT_NE(bell.sequence(), seen);
}

TEST(Doorbell, TwoThreadsThatOnlyWakeEachOtherNeverBothSleep) {
  Doorbell bells[2];
  std::atomic<int> turn{0};
  constexpr int kTurns = 4000;
  const auto play = [&](int me) {
    for (;;) {
      const std::uint32_t seen = bells[me].sequence();
      const int now = turn.load(std::memory_order_acquire);
      if (now >= kTurns) return;
      if (now % 2 != me) {
        bells[me].sleep(seen, kNever);  // hangs if a ring is lost
        continue;
      }
      turn.store(now + 1, std::memory_order_release);
      bells[1 - me].ring();
      if (now + 1 >= kTurns) bells[me].ring();
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_EQ(turn.load(), kTurns);
}

TEST(Doorbell, RingAllWakesEverybodyAndASleepEndsAtItsTime) {
  Doorbell bell;
  std::atomic<int> awake{0};
  std::vector<std::thread> sleepers;
  const std::uint32_t seen = bell.sequence();
  for (int i = 0; i < 4; ++i) {
    sleepers.emplace_back([&] {
      bell.sleep(seen, kNever);
      awake.fetch_add(1);
    });
  }
  bell.ring_all();
  for (std::thread& sleeper : sleepers) sleeper.join();
  EXPECT_EQ(awake.load(), 4);
  EXPECT_FALSE(bell.has_sleepers());
  const Nanos begin = steady_now();
  bell.sleep(bell.sequence(), begin + 20'000'000);
  EXPECT_LT(steady_now() - begin, 10'000'000'000);
}

TEST(Failure, TheFirstOneStaysAndLaterErrorsQuoteIt) {
  Failure failure;
  EXPECT_FALSE(failure.happened());
  EXPECT_TRUE(failure.set({ErrorKind::kTimeout, "first"}));
  EXPECT_FALSE(failure.set({ErrorKind::kPeerLost, "second"}));
  EXPECT_TRUE(failure.happened());
  EXPECT_EQ(failure.error().kind, ErrorKind::kTimeout);
  EXPECT_EQ(failure.error().message, "first");
  EXPECT_EQ(failure.later_error().kind, ErrorKind::kAborted);
  EXPECT_NE(failure.later_error().message.find("first"), std::string::npos);
}

std::unique_ptr<HostOperator> make_host_operator(std::uint32_t number) {
  HostOperatorConfig config;
  config.source = std::make_shared<PlanSource>(Plan(test::make_spec(Op::kGemmAllReduce, {1, 1}, 8, 8, 8)));
  config.partition = {1, 0, 0};
  return std::make_unique<HostOperator>(number, config);
}

Call call_of(HostOperator& op) {
  Call call;
  call.op = &op;
  return call;
}

// An operator of a world that has failed is destroyed while an SM is about to ask for its call.
TEST(Stream, GivesNoCallOfAnOperatorThatHasBeenReleased) {
  Stream stream(0, 1);
  const auto op = make_host_operator(0);
  ASSERT_TRUE(stream.launch(call_of(*op)));
  ASSERT_NE(stream.active(), 0u);
  stream.wait_released(*op);
  EXPECT_EQ(stream.active(), 0u);
  EXPECT_EQ(stream.enter(0).op, nullptr);
}

TEST(Stream, TheEndOfACallBeginsNoneOfAnOperatorThatHasBeenReleased) {
  Stream stream(0, 1);
  const auto first = make_host_operator(0);
  const auto second = make_host_operator(1);
  ASSERT_TRUE(stream.launch(call_of(*first)));
  ASSERT_TRUE(stream.launch(call_of(*second)));
  const Call call = stream.enter(0);
  ASSERT_EQ(call.op, first.get());
  stream.wait_released(*second);
  stream.complete(call.ticket);
  EXPECT_EQ(stream.active(), 0u);
  EXPECT_EQ(stream.enter(0).op, nullptr);
}

TEST(LaunchLog, FindsTheFirstLaunchThatDiffers) {
  LaunchLog log(3);
  EXPECT_FALSE(log.note(0, 5));
  EXPECT_FALSE(log.note(0, 6));
  EXPECT_FALSE(log.note(2, 5));
  const auto conflict = log.note(2, 5);
  ASSERT_TRUE(conflict);
  EXPECT_EQ(conflict->op, 6u);
  EXPECT_EQ(conflict->rank, 0);
  EXPECT_EQ(log.count(2), 1u);
  EXPECT_FALSE(log.note(2, 6));
  EXPECT_FALSE(log.note(2, 7));
  EXPECT_EQ(log.count(1), 0u);
}

TEST(LaunchLog, RemembersAsFarBackAsRanksMayBeApart) {
  LaunchLog log(2);
  for (std::uint64_t i = 0; i < LaunchLog::kCapacity; ++i) {
    ASSERT_FALSE(log.too_far_ahead(0));
    ASSERT_FALSE(log.note(0, static_cast<std::uint32_t>(i % 7)));
  }
  EXPECT_TRUE(log.too_far_ahead(0));
  EXPECT_FALSE(log.too_far_ahead(1));
  EXPECT_EQ(log.slowest_rank(), 1);
  EXPECT_TRUE(log.note(1, 1));
  for (std::uint64_t i = 0; i < LaunchLog::kCapacity; ++i) {
    ASSERT_FALSE(log.note(1, static_cast<std::uint32_t>(i % 7))) << i;
  }
  EXPECT_FALSE(log.too_far_ahead(0));
}

FlightEntry entry_of(std::int64_t index, FlightState state) {
  FlightEntry entry;
  entry.time_ns = index * 1'000'000;
  entry.state = state;
  entry.op = 1;
  entry.role = Role::kRecv;
  entry.lane = 300;
  entry.epoch = std::uint64_t{1} << 40;
  entry.index = index;
  entry.peer = 65535;
  return entry;
}

const std::vector<std::string> kNames = {"nobody", "somebody"};

TEST(FlightRecorder, KeepsTheLastThousandAndTwentyFourInOrder) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.text(0, kNames), "");
  for (std::int64_t i = 0; i < 1500; ++i) recorder.note(entry_of(i, FlightState::kBegun));
  const std::string text = recorder.text(0, kNames);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1024);
  const std::string first = text.substr(0, text.find('\n'));
  EXPECT_EQ(first, "0.476000 s: begun    somebody, epoch 1099511627776, recv lane 300 task 476, peer 65535");
  EXPECT_NE(text.find("task 1499, peer 65535\n"), std::string::npos);
}

TEST(FlightRecorder, MayBeWrittenByManyAndReadMeanwhile) {
  FlightRecorder recorder;
  std::vector<std::thread> writers;
  for (int w = 0; w < 4; ++w) {
    writers.emplace_back([&] {
      for (std::int64_t i = 0; i < 3000; ++i) recorder.note(entry_of(i, FlightState::kDone));
    });
  }
  for (int i = 0; i < 3; ++i) (void)recorder.text(0, kNames);
  for (std::thread& writer : writers) writer.join();
  const std::string text = recorder.text(0, kNames);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1024);
}

}  // namespace
}  // namespace mkernel
