#include "net/verbs/immediate.h"

#include <gtest/gtest.h>

namespace mkernel {
namespace {

TEST(ShortImmediate, EveryFieldComesBackAtItsEnds) {
  for (const std::uint32_t op : {0u, 1u, 63u}) {
    for (const std::uint32_t epoch : {0u, 1u, 15u}) {
      for (const std::uint32_t flag : {0u, 1u, static_cast<std::uint32_t>(kShortFlags - 1)}) {
        const ShortImmediate immediate{op, epoch, flag};
        EXPECT_EQ(decode_short_immediate(encode(immediate)), immediate);
      }
    }
  }
}

TEST(ShortImmediate, EpochsUpToSevenApartComeBackWhole) {
  for (const std::uint64_t near : {std::uint64_t{0}, std::uint64_t{9}, (std::uint64_t{1} << 33) - 2}) {
    for (std::int64_t apart = -7; apart <= 7; ++apart) {
      const std::uint64_t epoch = near + static_cast<std::uint64_t>(apart);
      EXPECT_EQ(full_short_epoch(static_cast<std::uint32_t>(epoch & 0xf), near), epoch);
    }
  }
}

}  // namespace
}  // namespace mkernel
