#include "net/libfabric/immediate.h"

#include <gtest/gtest.h>

namespace mkernel {
namespace {

TEST(Immediate, EveryFieldComesBackAtItsEnds) {
  for (const std::uint32_t op : {0u, 1u, 63u}) {
    for (const std::uint32_t epoch : {0u, 1u, 255u}) {
      for (const std::uint32_t sender : {0u, 1u, 65'535u}) {
        for (const std::uint64_t flag : {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 33) - 1}) {
          const Immediate immediate{op, epoch, sender, flag};
          EXPECT_EQ(decode_immediate(encode(immediate)), immediate);
        }
      }
    }
  }
}

}  // namespace
}  // namespace mkernel
