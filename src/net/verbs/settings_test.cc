#include "net/verbs/settings.h"

#include <gtest/gtest.h>

#include <map>

namespace mkernel {
namespace {

Result<VerbsSettings> read(const std::map<std::string, std::string>& variables) {
  return verbs_settings_from([&](const char* name) {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
}

TEST(VerbsSettingsTest, OwnVariablesComeBeforeThoseOfNccl) {
  EXPECT_EQ(read({})->gid_index, -1);
  EXPECT_EQ(read({{"NCCL_IB_GID_INDEX", "3"}})->gid_index, 3);
  EXPECT_EQ(read({{"NCCL_IB_GID_INDEX", "3"}, {"MKERNEL_IB_GID_INDEX", "1"}})->gid_index, 1);
  EXPECT_EQ(read({{"NCCL_IB_TC", "106"}, {"MKERNEL_IB_SL", "5"}})->traffic_class, 106);
  Nic nic;
  nic.device = "mlx5_3";
  EXPECT_FALSE(read({{"NCCL_IB_HCA", "^mlx5_3"}})->nics.accepts(nic));
  EXPECT_TRUE(read({{"NCCL_IB_HCA", "^mlx5_3"}, {"MKERNEL_IB_HCA", "mlx5"}})->nics.accepts(nic));
}

TEST(VerbsSettingsTest, NonsenseIsRefusedByName) {
  for (const auto& [name, text] : std::map<std::string, std::string>{{"MKERNEL_IB_GID_INDEX", "x"},
                                                                     {"NCCL_IB_GID_INDEX", "256"},
                                                                     {"NCCL_IB_TC", "-1"},
                                                                     {"MKERNEL_IB_SL", "16"},
                                                                     {"MKERNEL_IB_RAILS", "0"},
                                                                     {"NCCL_IB_HCA", "mlx5_0:y"}}) {
    const auto settings = read({{name, text}});
    ASSERT_FALSE(settings.ok()) << name;
    EXPECT_EQ(settings.error().kind, ErrorKind::kBadArgument);
    EXPECT_NE(settings.error().message.find(name), std::string::npos) << settings.error().message;
    EXPECT_NE(settings.error().message.find(text), std::string::npos) << settings.error().message;
  }
}

TEST(VerbsSettingsTest, RailsAreOfOneKindAndPairedByName) {
  std::vector<Nic> nics(4);
  for (int i = 0; i < 4; ++i) nics[static_cast<std::size_t>(i)].device = "mlx5_" + std::to_string(8 + i);
  nics[3].ethernet = true;
  const auto names = [&](const VerbsSettings& settings, const std::vector<int>& assigned) {
    std::string text;
    for (const Nic& nic : rails_of(settings, nics, assigned)) text += nic.name() + " ";
    return text;
  };
  EXPECT_EQ(names({}, {2, 0, 3, 1}), "mlx5_8:1 mlx5_9:1 mlx5_10:1 ");
  EXPECT_EQ(names({}, {3, 0, 1}), "mlx5_11:1 ");
  EXPECT_EQ(names(read({{"MKERNEL_IB_RAILS", "2"}}).value(), {2, 0, 3, 1}), "mlx5_8:1 mlx5_10:1 ");
  EXPECT_EQ(names({}, {}), "");
}

}  // namespace
}  // namespace mkernel
