// Runs the program as a launcher does: a process per rank, in an environment that says which.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cli/cli_run.h"

namespace mkernel::cli {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Variables = std::vector<std::pair<std::string, std::string>>;

inline std::string content(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// MKERNEL_CLI: another program than the one that was built here, on a machine that has only programs.
inline std::string program() {
  const char* other = std::getenv("MKERNEL_CLI");
  return other != nullptr ? other : MKERNEL_CLI_EXE;
}

// How many times slower than usual things happen here, for machines that are emulated (scripts/rdma_tests.sh).
inline int slowness() {
  const char* text = std::getenv("MKERNEL_TEST_SLOWNESS");
  return text != nullptr ? std::max(1, std::atoi(text)) : 1;
}

class RankProcesses : public testing::Test {
 protected:
  struct Rank {
    pid_t process = -1;
    int code = -1;  // 128 + signal when it was killed
    double ended_s = 0;
    std::string out;
    std::string err;
  };

  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "mkernel_processes_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  void TearDown() override {
    for (const Rank& rank : ranks_) {
      if (rank.process > 0 && rank.code < 0) kill(rank.process, SIGKILL);
    }
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  // Starts the program once per rank; the functions say what the launcher would set, and the arguments.
  void start(int size, const std::function<Variables(int)>& variables_of,
             const std::function<std::string(int)>& line_of) {
    ranks_.assign(static_cast<std::size_t>(size), {});
    for (int rank = 0; rank < size; ++rank) {
      std::vector<std::string> args = words(line_of(rank));
      args.insert(args.begin(), program_);
      std::vector<char*> pointers;
      for (std::string& arg : args) pointers.push_back(arg.data());
      pointers.push_back(nullptr);
      const Variables variables = variables_of(rank);
      const std::string out = (folder_ / ("out" + std::to_string(rank))).string();
      const std::string err = (folder_ / ("err" + std::to_string(rank))).string();
      const pid_t process = fork();
      ASSERT_GE(process, 0);
      if (process == 0) {
        for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
        dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
        dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
        execv(pointers[0], pointers.data());
        _exit(99);
      }
      ranks_[static_cast<std::size_t>(rank)].process = process;
    }
  }
  void start(int size, const std::string& line) {
    static int count = 0;
    const std::string job = "cli " + std::to_string(getpid()) + " " + std::to_string(count++);
    const auto variables = [&](int rank) {
      return Variables{{"MKERNEL_RANK", std::to_string(rank)},
                       {"MKERNEL_SIZE", std::to_string(size)},
                       {"MKERNEL_JOB", job},
                       {"MKERNEL_START_S", start_s_}};
    };
    start(size, variables, [&](int) { return line; });
  }

  // Waits for all to end, at most `limit_s`; false when some do not.
  bool finish(double limit_s = 60) {
    const Clock::time_point begin = Clock::now();
    const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    std::size_t left = ranks_.size();
    while (left > 0 && seconds() < limit_s * slowness()) {
      left = 0;
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        Rank& rank = ranks_[i];
        int status = 0;
        if (rank.code >= 0) continue;
        if (waitpid(rank.process, &status, WNOHANG) != rank.process) {
          ++left;
          continue;
        }
        rank.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        rank.ended_s = seconds();
        rank.out = content(folder_ / ("out" + std::to_string(i)));
        rank.err = content(folder_ / ("err" + std::to_string(i)));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return left == 0;
  }
  // All ended well, and only rank 0 said something.
  void expect_good() {
    ASSERT_TRUE(finish());
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      EXPECT_EQ(ranks_[rank].code, 0) << "rank " << rank << ": " << ranks_[rank].err;
      EXPECT_EQ(ranks_[rank].out.empty(), rank > 0) << ranks_[rank].out;
    }
  }

  std::string program_ = program();
  std::string start_s_ = "60";
  std::vector<Rank> ranks_;
  fs::path folder_;
};

}  // namespace mkernel::cli
