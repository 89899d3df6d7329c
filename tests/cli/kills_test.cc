// reliability.md, "a dead peer is named": processes that are killed or stopped at twelve points of the protocol, in
// worlds of 2, 3, 4, 7 and 8. `make test` does each point once, in one of them; MKERNEL_KILLS=20 does 20 of each point
// in each world.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <regex>

#include "tests/cli/rank_processes.h"
#include "world/network.h"

namespace mkernel::cli {
namespace {

constexpr const char* kPoints[] = {"world",      "addresses", "operator", "before_push", "after_push", "before_post",
                                   "after_post", "payload",   "flag",     "credit",      "barrier",    "destroy"};
// Processes, and the numbers of nodes that they may be. More than one: puts go between nodes only.
const std::pair<int, std::vector<int>> kWorlds[] = {{2, {2}}, {3, {3}}, {4, {2, 4}}, {7, {7}}, {8, {2, 4, 8}}};
// Those of setting up come once in a process' life, or a few times.
const std::map<std::string, int> kMostOften = {
    {"world", 1}, {"addresses", 1}, {"operator", 2}, {"barrier", 4}, {"destroy", 2}};
constexpr int kOftenElsewhere = 40;
constexpr int kSilenceS = 3;  // instead of 15, after which a process without a sign of life counts as lost
constexpr double kBarS = 5;   // from the end of the one to that of the last survivor

struct Case {
  const char* point = "";
  int size = 2;
  int nodes = 2;
  int victim = 0;
  int count = 1;
  bool stop = false;

  std::string text() const {
    return std::string(stop ? "SIGSTOP" : "SIGKILL") + " of rank " + std::to_string(victim) + " of " +
           std::to_string(size) + " (" + std::to_string(nodes) + " nodes) at " + point + ":" + std::to_string(count);
  }
};

class KillsTest : public RankProcesses, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    const char* network = std::getenv("MKERNEL_NETWORK");
    const std::string obstacle = network_obstacle(network != nullptr ? network : "libfabric");
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
    RankProcesses::SetUp();
    program_ = MKERNEL_KILL_WORKER;
  }

  Case draw(std::size_t world, bool stop) {
    const auto& [size, nodes] = kWorlds[world];
    const auto most = kMostOften.find(GetParam());
    const int times = most != kMostOften.end() ? most->second : kOftenElsewhere;
    return {GetParam(),
            size,
            nodes[random_() % nodes.size()],
            static_cast<int>(random_() % static_cast<unsigned>(size)),
            1 + static_cast<int>(random_() % static_cast<unsigned>(times)),
            stop};
  }

  void start_case(const Case& c) {
    static int count = 0;
    const std::string job = "kills " + std::to_string(getpid()) + " " + std::to_string(count++);
    const auto variables = [&](int rank) {
      Variables all{{"MKERNEL_RANK", std::to_string(rank)},
                    {"MKERNEL_SIZE", std::to_string(c.size)},
                    {"MKERNEL_JOB", job},
                    {"MKERNEL_WORKER_NODES", std::to_string(c.nodes)},
                    {"MKERNEL_WORKER_SILENCE_S", std::to_string(kSilenceS * slowness())}};
      if (rank == c.victim) {
        all.emplace_back("MKERNEL_WORKER_KILL",
                         std::string(c.point) + ":" + std::to_string(c.count) + (c.stop ? ":STOP" : ":KILL"));
      }
      return all;
    };
    start(c.size, variables, [](int) { return std::string(); });
  }

  // Until the victim has met its end; false when it never does.
  bool await_end(Rank& victim) {
    for (const Clock::time_point end = Clock::now() + std::chrono::seconds(240 * slowness()); Clock::now() < end;) {
      int status = 0;
      if (waitpid(victim.process, &status, WNOHANG | WUNTRACED) == victim.process) {
        victim.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WIFSTOPPED(status) ? 0 : WEXITSTATUS(status);
        return WIFSIGNALED(status) || WIFSTOPPED(status);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  void run_case(const Case& c) {
    SCOPED_TRACE(c.text());
    start_case(c);
    Rank& victim = ranks_[static_cast<std::size_t>(c.victim)];
    ASSERT_TRUE(await_end(victim)) << "the victim never came to the point, or ended by itself: " << victim.code << " "
                                   << content(folder_ / ("err" + std::to_string(c.victim)));
    const bool all_ended = finish(60);
    hangs_ += !all_ended;
    EXPECT_TRUE(all_ended) << "somebody hangs";
    if (c.stop) {
      kill(victim.process, SIGKILL);
      waitpid(victim.process, nullptr, 0);
    }
    if (!all_ended) {
      for (const Rank& rank : ranks_) {
        if (rank.code >= 0) continue;
        kill(rank.process, SIGKILL);
        waitpid(rank.process, nullptr, 0);
      }
      return;
    }
    const std::regex named("rank " + std::to_string(c.victim) + " (died|has given no sign of life)|lost rank " +
                           std::to_string(c.victim) + ":");
    double last_s = 0;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (static_cast<int>(rank) == c.victim) continue;
      const Rank& survivor = ranks_[rank];
      EXPECT_EQ(survivor.code, 3) << "rank " << rank << ": " << survivor.err;
      const bool right =
          std::regex_search(survivor.err, named) && std::count(survivor.err.begin(), survivor.err.end(), '\n') == 1;
      wrong_names_ += !right;
      EXPECT_TRUE(right) << "rank " << rank << ": " << survivor.err;
      last_s = std::max(last_s, survivor.ended_s);
    }
    ++cases_;
    late_ += last_s > kBarS;
    double& slowest = c.stop ? slowest_stop_s_ : slowest_kill_s_;
    slowest = std::max(slowest, last_s);
    for (const auto& file : fs::directory_iterator("/dev/shm")) {
      EXPECT_EQ(file.path().filename().string().find("mkernel"), std::string::npos) << file.path();
    }
  }

  std::mt19937 random_;
  int cases_ = 0;
  int hangs_ = 0;
  int wrong_names_ = 0;
  int late_ = 0;
  double slowest_kill_s_ = 0;
  double slowest_stop_s_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Points, KillsTest, testing::ValuesIn(kPoints),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(KillsTest, TheDeadRankIsNamedByAllOthers) {
  const char* text = std::getenv("MKERNEL_KILLS");
  const int rounds = text != nullptr ? std::atoi(text) : 0;
  const auto point = static_cast<std::size_t>(std::find(std::begin(kPoints), std::end(kPoints), GetParam()) - kPoints);
  random_.seed(static_cast<unsigned>(20261202 + point));
  if (rounds == 0) run_case(draw(point % std::size(kWorlds), point % 4 == 3));
  for (std::size_t world = 0; world < std::size(kWorlds); ++world) {
    for (int round = 0; round < rounds && !HasFatalFailure(); ++round) run_case(draw(world, round % 4 == 3));
  }
  std::printf(
      "%-12s %d kills: %d hangs, %d wrong names, %d later than %.0f s; the last survivor ended at most %.2f s after a "
      "SIGKILL, %.2f s after a SIGSTOP (silence counts as death after %d s)\n",
      GetParam(), cases_, hangs_, wrong_names_, late_, kBarS, slowest_kill_s_, slowest_stop_s_, kSilenceS * slowness());
  EXPECT_EQ(late_, 0);
}

}  // namespace
}  // namespace mkernel::cli
