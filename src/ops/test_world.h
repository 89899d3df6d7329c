// Worlds and operators for tests, and what a failed status says.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "mkernel/mkernel.h"

namespace mkernel::test {

inline WorldOptions world_of(int nodes, int gpus, int sms = 2) {
  WorldOptions options;
  options.nodes = nodes;
  options.gpus = gpus;
  options.sms = sms;
  options.deadline_s = 60;
  return options;
}

inline World make_world(const WorldOptions& options) {
  Result<World> world = World::create(options);
  EXPECT_TRUE(world.ok()) << (world.ok() ? "" : world.error().message);
  return std::move(world).value();
}

inline Operator make_operator(World& world, const GemmOptions& options) {
  Result<Operator> op = Operator::create(world, options);
  EXPECT_TRUE(op.ok()) << (op.ok() ? "" : op.error().message);
  return std::move(op).value();
}

template <class T>
::testing::AssertionResult succeeded(const Result<T>& result) {
  if (result.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << result.error().message;
}

// The result is an error of this kind, and its sentence contains all these words.
template <class T>
::testing::AssertionResult failed(const Result<T>& result, ErrorKind kind, const std::vector<std::string>& words) {
  if (result.ok()) return ::testing::AssertionFailure() << "succeeded";
  const Error& error = result.error();
  if (error.kind != kind) {
    return ::testing::AssertionFailure() << "kind " << static_cast<int>(error.kind) << ": " << error.message;
  }
  for (const std::string& word : words) {
    if (error.message.find(word) == std::string::npos) {
      return ::testing::AssertionFailure() << "'" << word << "' is missing in: " << error.message;
    }
  }
  return ::testing::AssertionSuccess();
}

struct Shape {
  int nodes;
  int gpus;
};
inline constexpr Shape kWorlds[] = {{1, 1}, {1, 3}, {2, 1}, {2, 2}, {2, 3}, {3, 1}, {4, 1}};

inline std::string case_name(const GemmOptions& o, Shape world) {
  return std::string(op_name(o.op)) + " " + std::to_string(o.m) + "x" + std::to_string(o.n) + "x" +
         std::to_string(o.k) + " " + std::string(dtype_name(o.dtype)) + " on " + std::to_string(world.nodes) + "x" +
         std::to_string(world.gpus);
}

}  // namespace mkernel::test
