// The help texts are the manual: what they say is kept in golden files, and what they show as examples is accepted.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/cli/cli_run.h"

namespace mkernel::cli {
namespace {

const std::vector<std::string> kCommands = {"", "run", "sim", "plan", "verify", "bench", "info"};

std::string help_of(const std::string& command) {
  const CliRun result = run(command.empty() ? std::vector<std::string>{"--help"}
                                            : std::vector<std::string>{command, "--help"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return result.out;
}

TEST(Help, EqualsTheGoldenText) {
  // MKERNEL_UPDATE_GOLDEN=1 writes the files anew; the difference is for the reviewer.
  const bool update = std::getenv("MKERNEL_UPDATE_GOLDEN") != nullptr;
  for (const std::string& command : kCommands) {
    const std::string path = std::string(MKERNEL_SOURCE_DIR) + "/tests/cli/golden/help" +
                             (command.empty() ? "" : "_" + command) + ".txt";
    if (update) std::ofstream(path) << help_of(command);
    std::ifstream file(path);
    ASSERT_TRUE(file) << path;
    const std::string golden((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    EXPECT_EQ(help_of(command), golden) << path;
  }
}

TEST(Help, FitsIntoAHundredAndTwentyColumns) {
  for (const std::string& command : kCommands) {
    std::istringstream text(help_of(command));
    for (std::string line; std::getline(text, line);) EXPECT_LE(line.size(), 120u) << line;
  }
}

TEST(Help, EveryExampleIsAccepted) {
  int examples = 0;
  for (const std::string& command : kCommands) {
    std::istringstream text(help_of(command));
    for (std::string line; std::getline(text, line);) {
      if (line.rfind("  mkernel ", 0) != 0) continue;
      ++examples;
      const CliRun result = run(words(line.substr(10)), true);
      EXPECT_EQ(result.code, 0) << line << ": " << result.err;
    }
  }
  EXPECT_GE(examples, 10);
}

TEST(Help, AsksNoOperator) {
  EXPECT_EQ(run("help sim").out, run("sim --help").out);
  EXPECT_EQ(run("run gemm_ar --help").out, run("run -h").out);
}

}  // namespace
}  // namespace mkernel::cli
