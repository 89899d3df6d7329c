#include "net/record.h"

#include <gtest/gtest.h>

#include <vector>

namespace mkernel {
namespace {

constexpr std::uint32_t kOpMax = kMaxOperators - 1;
constexpr std::uint32_t kTaskMax = kMaxRecordTask - 1;
constexpr std::uint32_t kCountMax = (1u << 18) - 1;

std::vector<std::uint32_t> extremes(std::uint32_t max) { return {0, 1, max / 2, max / 2 + 1, max - 1, max}; }

TEST(RecordTest, EveryCombinationOfExtremesSurvivesTheRoundTrip) {
  for (const std::uint32_t op : extremes(kOpMax)) {
    for (const std::uint32_t epoch : extremes(0xff)) {
      for (const std::uint32_t task : extremes(kTaskMax)) {
        for (const std::uint32_t count : extremes(kCountMax)) {
          for (const std::uint32_t lap : extremes(0xff)) {
            const Record record{op, epoch, task, count, lap};
            ASSERT_EQ(decode(encode(record)), record);
          }
        }
      }
    }
  }
}

TEST(RecordTest, EveryBitOfTheWordBelongsToExactlyOneField) {
  for (int bit = 0; bit < 64; ++bit) {
    const std::uint64_t word = std::uint64_t{1} << bit;
    const Record r = decode(word);
    EXPECT_EQ(encode(r), word) << "bit " << bit;
    EXPECT_EQ((r.op != 0) + (r.epoch != 0) + (r.task != 0) + (r.count != 0) + (r.lap != 0), 1) << "bit " << bit;
  }
}

TEST(RecordTest, FieldsLieWhereTheHeaderSays) {
  EXPECT_EQ(encode({kOpMax, 0, 0, 0, 0}), 0xfc00000000000000ull);
  EXPECT_EQ(encode({0, 0xff, 0, 0, 0}), 0x03fc000000000000ull);
  EXPECT_EQ(encode({0, 0, kTaskMax, 0, 0}), 0x0003fffffc000000ull);
  EXPECT_EQ(encode({0, 0, 0, kCountMax, 0}), 0x0000000003ffff00ull);
  EXPECT_EQ(encode({0, 0, 0, 0, 0xff}), 0x00000000000000ffull);
}

TEST(RecordTest, AValueTooLargeForItsFieldDoesNotReachItsNeighbours) {
  EXPECT_EQ(encode({~0u, 0, 0, 0, 0}), encode({kOpMax, 0, 0, 0, 0}));
  EXPECT_EQ(encode({0, ~0u, 0, 0, 0}), encode({0, 0xff, 0, 0, 0}));
  EXPECT_EQ(encode({0, 0, ~0u, 0, 0}), encode({0, 0, kTaskMax, 0, 0}));
  EXPECT_EQ(encode({0, 0, 0, ~0u, 0}), encode({0, 0, 0, kCountMax, 0}));
  EXPECT_EQ(encode({0, 0, 0, 0, ~0u}), encode({0, 0, 0, 0, 0xff}));
}

TEST(RecordTest, FullEpochFindsEveryEpochLessThan128Away) {
  constexpr std::uint64_t kTwo32 = std::uint64_t{1} << 32;
  const std::uint64_t starts[] = {128, 255, 256, kTwo32 / 2 - 1, kTwo32 - 3, kTwo32, ~std::uint64_t{0} - 128};
  for (const std::uint64_t near : starts) {
    for (int distance = -128; distance < 128; ++distance) {
      const std::uint64_t epoch = near + static_cast<std::uint64_t>(std::int64_t{distance});
      ASSERT_EQ(full_epoch(epoch & 0xff, near), epoch) << "near " << near << ", distance " << distance;
    }
  }
}

}  // namespace
}  // namespace mkernel
