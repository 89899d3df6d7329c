#include "exec/cuda/cpu_affinity.h"

#include <gtest/gtest.h>

namespace mkernel {
namespace {

using Cpus = std::vector<int>;

TEST(CpuAffinityTest, ListsOfSinglesAndRangesAreRead) {
  EXPECT_EQ(parse_cpu_list("0"), Cpus({0}));
  EXPECT_EQ(parse_cpu_list("0-3,8\n"), Cpus({0, 1, 2, 3, 8}));
  EXPECT_EQ(parse_cpu_list("5,7-7,100-101"), Cpus({5, 7, 100, 101}));
}

TEST(CpuAffinityTest, WhatIsNoListGivesNothing) {
  for (const char* text : {"", "\n", "-1", "3-1", "0-", "1,,2", "1,", "x", "0-3x", "0-99999999"}) {
    EXPECT_EQ(parse_cpu_list(text), Cpus()) << text;
  }
}

TEST(CpuAffinityTest, AnUnknownDeviceChangesNothing) {
  const int before = usable_cores();
  stay_near_pci_device("ffff:FF:1f.7");
  EXPECT_EQ(usable_cores(), before);
}

}  // namespace
}  // namespace mkernel
