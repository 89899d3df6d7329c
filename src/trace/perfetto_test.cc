#include "trace/perfetto.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace mkernel {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class PerfettoTest : public testing::Test {
 protected:
  PerfettoTest() : folder_(fs::temp_directory_path() / ("mkernel_perfetto_test_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~PerfettoTest() override { fs::remove_all(folder_); }

  json written(const std::vector<TraceEvent>& events, const Topology& topo, const std::string& title = "a title") {
    const fs::path path = folder_ / "trace.json";
    const Status status = write_trace(path, events, topo, title);
    EXPECT_TRUE(status) << status.error().message;
    std::ifstream file(path);
    return json::parse(file);
  }

  // Files left in the folder.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename());
    return names;
  }

  fs::path folder_;
};

struct Names {
  std::map<int, std::string> process;
  std::map<std::pair<int, int>, std::string> thread;
};

Names names_of(const json& trace) {
  Names names;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "M") continue;
    if (event["name"] == "process_name") names.process[event["pid"]] = event["args"]["name"];
    if (event["name"] == "thread_name") names.thread[{event["pid"], event["tid"]}] = event["args"]["name"];
  }
  return names;
}

// "process / thread" -> names of its bars.
std::map<std::string, std::vector<std::string>> bars_of(const json& trace) {
  const Names names = names_of(trace);
  std::map<std::string, std::vector<std::string>> bars;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const std::string process = names.process.at(event["pid"]);
    bars[process + " / " + names.thread.at({event["pid"], event["tid"]})].push_back(event["name"]);
  }
  return bars;
}

TEST_F(PerfettoTest, EveryBarStandsUnderItsRankAndSmOrLink) {
  const json trace = written(
      {{"gemm 0", 0, 0, 0, 5}, {"gemm 1", 5, 1, 2, 3.5}, {"put", 5, kLinkTrack, 3, 4}, {"reduce", 5, 1, 3.5, 4}},
      Topology{2, 4});
  const std::map<std::string, std::vector<std::string>> expected = {
      {"rank 0 (node 0 gpu 0) / SM 0", {"gemm 0"}},
      {"rank 5 (node 1 gpu 1) / SM 1", {"gemm 1", "reduce"}},
      {"rank 5 (node 1 gpu 1) / to node 0", {"put"}},
  };
  EXPECT_EQ(bars_of(trace), expected);
  EXPECT_EQ(trace["otherData"]["title"], "a title");
}

TEST_F(PerfettoTest, EveryRankHasAProcessAndNoProcessIsZero) {
  const Names names = names_of(written({}, Topology{2, 3}));
  ASSERT_EQ(names.process.size(), 6u);
  EXPECT_EQ(names.process.count(0), 0u);
  EXPECT_EQ(names.process.rbegin()->second, "rank 5 (node 1 gpu 2)");
}

TEST_F(PerfettoTest, TimesAreMicrosecondsToTheNanosecond) {
  const json trace = written({{"x", 0, 0, 1234567.8912, 1234568.0}}, Topology{1, 1});
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    EXPECT_NEAR(event["ts"].get<double>(), 1234567.891, 1e-9);
    EXPECT_NEAR(event["dur"].get<double>(), 0.109, 1e-9);
    return;
  }
  FAIL() << "no bar was written";
}

TEST_F(PerfettoTest, OverlappingBarsOfATrackGetRowsOfTheirOwn) {
  const json trace =
      written({{"c", 0, kLinkTrack + 1, 10, 12}, {"a", 0, kLinkTrack + 1, 0, 10}, {"b", 0, kLinkTrack + 1, 5, 15}},
              Topology{2, 1});
  const std::map<std::string, std::vector<std::string>> expected = {
      {"rank 0 (node 0 gpu 0) / to node 1", {"a", "c"}},
      {"rank 0 (node 0 gpu 0) / to node 1 (2)", {"b"}},
  };
  EXPECT_EQ(bars_of(trace), expected);
}

TEST_F(PerfettoTest, NamesMayHoldAnyBytes) {
  const std::string nasty = "quote \" backslash \\ newline \n bell \a bytes \xff\xfe";
  const json trace = written({{nasty, 0, 0, 0, 1}}, Topology{1, 1}, nasty);
  EXPECT_EQ(bars_of(trace).begin()->second[0].substr(0, 19), nasty.substr(0, 19));
}

TEST_F(PerfettoTest, ThreadsOfARankNeverShareANumber) {
  std::vector<TraceEvent> events;
  for (int track : {0, 1, 2, kLinkTrack, kLinkTrack + 3}) {
    for (int i = 0; i < 3; ++i) events.push_back({"t" + std::to_string(track), 1, track, 1.0 * i, 1.0 * i + 2.5});
  }
  for (const auto& [row, bars] : bars_of(written(events, Topology{1, 2}))) {
    for (const std::string& bar : bars) EXPECT_EQ(bar, bars[0]) << row;
  }
}

TEST_F(PerfettoTest, AnExistingFileIsReplacedAndNothingElseIsLeft) {
  written({{"old", 0, 0, 0, 1}}, Topology{1, 1});
  EXPECT_EQ(bars_of(written({{"new", 0, 0, 0, 1}}, Topology{1, 1})).begin()->second[0], "new");
  EXPECT_EQ(files(), std::vector<std::string>{"trace.json"});
}

TEST_F(PerfettoTest, AFailedWriteSaysWhyAndLeavesNothing) {
  const Status status = write_trace(folder_ / "missing" / "trace.json", {}, Topology{1, 1}, "");
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::kIo);
  EXPECT_NE(status.error().message.find("No such file"), std::string::npos) << status.error().message;

  fs::create_directories(folder_ / "occupied" / "inside");
  const Status onto_folder = write_trace(folder_ / "occupied", {}, Topology{1, 1}, "");
  EXPECT_FALSE(onto_folder);
  EXPECT_EQ(files(), std::vector<std::string>{"occupied"});
}

TEST_F(PerfettoTest, AFullDiskIsAnErrorAndNoFile) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "needs /dev/full";
  // The temporary file's name is known, so a link makes the disk full for it.
  const fs::path path = folder_ / "trace.json";
  fs::create_symlink("/dev/full", path.string() + "." + std::to_string(getpid()) + ".tmp");
  const Status status = write_trace(path, std::vector<TraceEvent>(1000, {"x", 0, 0, 0, 1}), Topology{1, 1}, "");
  ASSERT_FALSE(status);
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace mkernel
