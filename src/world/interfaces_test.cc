#include "world/interfaces.h"

#include <gtest/gtest.h>

namespace mkernel {
namespace {

TEST(Interfaces, AreFoundByNameAndTheLoopbackLast) {
  const std::vector<InterfaceAddress> all = {{"lo", "127.0.0.1", true},
                                             {"eth0", "2001:db8::1"},
                                             {"docker0", "172.17.0.1"},
                                             {"eth0", "10.0.0.1"},
                                             {"eth01", "10.0.1.1"}};
  EXPECT_EQ(find_interface("eth", all), "10.0.0.1");
  EXPECT_EQ(find_interface("=eth01", all), "10.0.1.1");
  EXPECT_EQ(find_interface("^docker,eth01", all), "10.0.0.1");
  EXPECT_EQ(find_interface("^=eth0,eth01,docker0", all), "127.0.0.1");
  EXPECT_EQ(find_interface("^=eth0,eth01,docker0,lo", all), "");
  EXPECT_EQ(find_interface("^docker", {all.begin(), all.begin() + 2}), "2001:db8::1");
  EXPECT_EQ(find_interface("ib", all), "");
  EXPECT_EQ(find_interface("=eth0", {all.begin() + 1, all.begin() + 2}), "2001:db8::1");
}

}  // namespace
}  // namespace mkernel
