#include "exec/cuda/flight_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

namespace mkernel {
namespace {

// A kernel's record after `runs` complete calls of 50 us each, one per 100 us.
std::unique_ptr<DeviceControl> record_of(std::uint64_t start_epoch, std::uint64_t runs) {
  auto control = std::make_unique<DeviceControl>();
  for (std::uint64_t epoch = start_epoch + 1; epoch <= start_epoch + runs; ++epoch) {
    DeviceTimes& times = control->of(epoch);
    times.start = 7'000'000'000 + (epoch - start_epoch) * 100'000;
    times.first[0] = times.start + 1'000;
    times.last[0] = times.start + 40'000;
    times.end = times.start + 50'000;
    control->of(epoch + 1) = {};
    control->epoch = epoch;
  }
  return control;
}

std::int64_t lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

TEST(FlightText, TellsCompleteBegunAndWaitingCallsApart) {
  const auto control = record_of(0, 2);
  control->epoch = 1;  // the second has begun only
  control->of(2).end = control->of(2).last[0] = 0;
  std::vector<GpuCall> calls;
  append_calls(*control, "operator 0", 0, 3, calls);
  EXPECT_EQ(flight_text(calls, "enough"),
            "0.000000 s: complete operator 0, epoch 1, took 50.0 us, compute from 1.0 to 40.0\n"
            "0.000100 s: started operator 0, epoch 2, not complete, compute from 1.0\n"
            "launched operator 0, epoch 3, not begun\n"
            "failed: enough\n");
  EXPECT_EQ(flight_text({}, ""), "");
}

TEST(FlightText, KeepsTheLastThousandAndTwentyFour) {
  for (const std::uint64_t start : {std::uint64_t{0}, (std::uint64_t{1} << 33) - 3}) {
    const auto control = record_of(start, 3000);
    std::vector<GpuCall> calls;
    append_calls(*control, "operator 0", start, start + 3005, calls);
    const std::string text = flight_text(calls, "");
    EXPECT_EQ(lines(text), 1024);
    EXPECT_NE(text.find("complete operator 0, epoch " + std::to_string(start + 3000) + ","), std::string::npos);
    EXPECT_NE(text.find("launched operator 0, epoch " + std::to_string(start + 3005) + ","), std::string::npos);
    EXPECT_EQ(text.find("epoch " + std::to_string(start + 3000 - 1024) + ","), std::string::npos);
  }
}

TEST(FlightText, KnowsReplaysThatTheHostDidNotLaunch) {
  const auto control = record_of(5, 4);
  std::vector<GpuCall> calls;
  append_calls(*control, "operator 1", 5, 6, calls);
  EXPECT_EQ(lines(flight_text(calls, "")), 4);
}

}  // namespace
}  // namespace mkernel
