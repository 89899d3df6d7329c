// The program as its users see it: exit codes, JSON, files in and out.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/npy.h"
#include "tests/cli/cli_run.h"

namespace mkernel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class ProgramTest : public testing::Test {
 protected:
  ProgramTest() {
    std::string name = (fs::temp_directory_path() / "mkernel_cli_test_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~ProgramTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  fs::path folder_;
};

// Runs it and parses what it printed, which must be one JSON object and nothing else.
json run_json(const std::string& line, int expected_code = 0) {
  const CliRun result = run(line + " --json");
  EXPECT_EQ(result.code, expected_code) << line << ": " << result.err;
  return json::parse(result.out);
}

// Small integers, so that products and sums are exact in every type and in every order.
std::vector<float> small_integers(std::int64_t rows, std::int64_t cols, int seed) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < rows * cols; ++i) values.push_back(static_cast<float>((i * 7 + i / 5 + seed) % 5 - 2));
  return values;
}

std::vector<float> plain_product(const std::vector<float>& a, const std::vector<float>& b, std::int64_t m,
                                 std::int64_t n, std::int64_t k) {
  std::vector<float> c(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::int64_t l = 0; l < k; ++l) {
        sum += a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(l * n + j)];
      }
      c[static_cast<std::size_t>(i * n + j)] = sum;
    }
  }
  return c;
}

void save(const fs::path& file, const std::vector<float>& values, std::int64_t rows, std::int64_t cols, Dtype dtype) {
  std::vector<std::uint16_t> halves;
  for (const float value : values)
    halves.push_back(dtype == Dtype::kBf16 ? float_to_bf16(value) : float_to_fp16(value));
  const void* data = dtype == Dtype::kFp32 ? static_cast<const void*>(values.data()) : halves.data();
  const Status status = write_npy(file, npy_type_of(dtype), rows, cols, data, cols);
  ASSERT_TRUE(status) << status.error().message;
}

std::vector<float> load(const fs::path& file, std::int64_t rows, std::int64_t cols) {
  auto matrix = read_npy(file, 1 << 30);
  EXPECT_TRUE(matrix) << matrix.error().message;
  EXPECT_EQ(matrix->rows, rows);
  EXPECT_EQ(matrix->cols, cols);
  const auto bytes = npy_to_dtype(*matrix, Dtype::kFp32);
  EXPECT_TRUE(bytes) << bytes.error().message;
  std::vector<float> values(static_cast<std::size_t>(rows * cols));
  EXPECT_EQ(bytes->size(), values.size() * 4);
  std::memcpy(values.data(), bytes->data(), bytes->size());
  return values;
}

TEST_F(ProgramTest, RealDataGoesInAndThePlainProductComesOut) {
  constexpr std::int64_t kM = 37, kN = 29, kK = 11;
  const std::vector<float> a = small_integers(kM, kK, 1);
  const std::vector<float> b = small_integers(kK, kN, 3);
  const std::vector<float> c = plain_product(a, b, kM, kN, kK);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    save(path("A.npy"), a, kM, kK, dtype);
    save(path("B.npy"), b, kK, kN, dtype);
    for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
      for (const char* where : {"--device host", "--device sim"}) {
        fs::remove(path("C.npy"));
        const json result = run_json(std::string("run ") + op + " --nodes 2 --gpus 3 --repeat 1 --input " +
                                     folder_.string() + " --output " + folder_.string() + " " + where);
        EXPECT_EQ(result["dtype"], dtype_name(dtype));
        EXPECT_EQ(load(path("C.npy"), kM, kN), c) << op << " " << where << " " << dtype_name(dtype);
      }
    }
  }
}

TEST_F(ProgramTest, FilesOfAnotherTypeAreRoundedOnlyWhenAskedFor) {
  const std::vector<double> values = {1.00390625, 2, 3, 4};  // 1 + 2^-8 is no bf16: it rounds to 1
  for (const char* name : {"A.npy", "B.npy"}) {
    const Status status = write_npy(path(name), NpyType::kF64, 2, 2, values.data(), 2);
    ASSERT_TRUE(status) << status.error().message;
  }
  const std::string line = "run gemm_ar --repeat 1 --input " + folder_.string();
  const CliRun refused = run(line);
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("--dtype"), std::string::npos) << refused.err;

  const CliRun said = run(line + " --dtype bf16 --output " + folder_.string());
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_NE(said.out.find("<f8 rounded to bf16"), std::string::npos) << said.out;
  EXPECT_EQ(load(path("C.npy"), 2, 2), (std::vector<float>{7, 10, 15, 22}));
}

TEST_F(ProgramTest, FilesThatDoNotFitAreRefused) {
  const std::vector<float> values(64);
  const std::string line = "run gemm_ar --input " + folder_.string();
  EXPECT_NE(run(line).err.find("A.npy"), std::string::npos);
  save(path("A.npy"), values, 4, 8, Dtype::kFp32);
  EXPECT_NE(run(line).err.find("B.npy"), std::string::npos);
  save(path("B.npy"), values, 4, 8, Dtype::kFp32);
  EXPECT_NE(run(line).err.find("columns of A"), std::string::npos) << run(line).err;
  save(path("B.npy"), values, 8, 4, Dtype::kFp32);
  for (const char* sizes : {" --m 5", " --n 5", " --k 5"}) {
    const CliRun result = run(line + sizes);
    EXPECT_EQ(result.code, 2) << sizes;
    EXPECT_NE(result.err.find("leave it out"), std::string::npos) << result.err;
  }
  EXPECT_EQ(run(line + " --m 4 --n 4 --k 8 --repeat 1").code, 0);
  std::ofstream(path("B.npy")) << "this is no matrix";
  EXPECT_EQ(run(line).code, 2);
  fs::remove(path("B.npy"));
  fs::create_directory(path("B.npy"));
  EXPECT_NE(run(line).err.find("regular file"), std::string::npos) << run(line).err;
}

TEST_F(ProgramTest, RunPrintsOneJsonObject) {
  const json result = run_json("run gemm_ar --nodes 2 --gpus 2 --m 64 --n 96 --k 40 --repeat 3 --compare --link 1:5");
  EXPECT_EQ(result["ok"], true);
  EXPECT_EQ(result["operator"], "gemm_all_reduce");
  EXPECT_EQ(result["fused"]["times_us"].size(), 3u);
  EXPECT_EQ(result["unfused"]["times_us"].size(), 3u);
  EXPECT_GT(result["speedup"].get<double>(), 0);
  EXPECT_EQ(result["network"]["bytes"], result["network"]["bytes_bound"]);
  // Two nodes swap: every rank sends its half of C.
  EXPECT_EQ(result["network"]["bytes_per_gpu"], 64 * 96 * 2 / 2);
  EXPECT_EQ(result["check"]["ok"], true);
  EXPECT_EQ(result["check"]["rows"], 64);
  EXPECT_LE(result["check"]["worst_ratio"].get<double>(), 1);
  EXPECT_EQ(result["check"]["identical_runs"], 6);
}

TEST_F(ProgramTest, BalancedGivesTheBusiestRankTheTimeOfTheArithmetic) {
  const json result = run_json("run gemm_rs --nodes 2 --gpus 1 --m 128 --n 128 --k 2048 --repeat 1 --link balanced");
  EXPECT_EQ(result["link"]["balanced"], true);
  EXPECT_GT(result["link"]["gigabytes_per_s"].get<double>(), 0);
  // 64 rows of 128 bf16 at this rate: no faster than any real multiplication, no slower than a minute.
  const double seconds = 64 * 128 * 2 / (result["link"]["gigabytes_per_s"].get<double>() * 1e9);
  EXPECT_GT(seconds, 1e-6);
  EXPECT_LT(seconds, 60);
}

TEST_F(ProgramTest, EmptyMatricesAreFine) {
  for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
    for (const char* sizes : {"--m 0", "--n 0", "--k 0", "--m 1 --n 1 --k 1", "--m 0 --n 0 --k 0"}) {
      const CliRun result = run(std::string("run ") + op + " --repeat 1 --m 8 --n 8 --k 8 " + sizes);
      // The second --m replaces nothing: sizes are given once.
      EXPECT_EQ(result.code, 2);
      const CliRun once = run(std::string("run ") + op + " --repeat 2 " + sizes);
      EXPECT_EQ(once.code, 0) << op << " " << sizes << ": " << once.err;
    }
  }
}

TEST_F(ProgramTest, HostAndSimulatorWriteTheSameBits) {
  for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
    std::string bytes[2];
    for (int i = 0; i < 2; ++i) {
      const CliRun result = run(std::string("run ") + op + " --m 100 --n 70 --k 90 --repeat 1 --output " +
                                folder_.string() + (i == 0 ? " --device host" : " --device sim"));
      ASSERT_EQ(result.code, 0) << result.err;
      std::ifstream file(path("C.npy"), std::ios::binary);
      bytes[i].assign((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    }
    EXPECT_FALSE(bytes[0].empty());
    EXPECT_EQ(bytes[0], bytes[1]) << op;
  }
}

TEST_F(ProgramTest, TracesHoldEveryTaskOfEveryRank) {
  for (const char* line :
       {"run gemm_ar --m 64 --n 64 --k 64 --repeat 1 --trace ", "sim gemm_ar --m 512 --n 512 --trace "}) {
    const json result = run_json(line + path("trace.json"));
    std::ifstream file(path("trace.json"));
    const json trace = json::parse(file);
    int ranks = 0;
    int bars = 0;
    for (const json& event : trace["traceEvents"]) {
      if (event["ph"] == "X") ++bars;
      if (event["ph"] == "M" && event["name"] == "process_name") ++ranks;
    }
    EXPECT_EQ(ranks, result["nodes"].get<int>() * result["gpus"].get<int>());
    EXPECT_GT(bars, ranks);
  }
}

TEST_F(ProgramTest, SimulatedTimeIsTheSameForTheSameSeed) {
  const json first = run_json("sim gemm_rs --m 2k --n 2k --k 1k --compare");
  const json second = run_json("sim gemm_rs --m 2k --n 2k --k 1k --compare");
  EXPECT_EQ(first["fused"]["time_us"], second["fused"]["time_us"]);
  EXPECT_EQ(first["unfused"]["time_us"], second["unfused"]["time_us"]);
  EXPECT_GT(first["fused"]["time_us"].get<double>(), 0);
  EXPECT_EQ(first["network"]["bytes"], first["network"]["bytes_bound"]);
}

TEST_F(ProgramTest, SimulatedDataIsChecked) {
  const json result = run_json("sim gemm_ar --nodes 3 --gpus 2 --m 65 --n 33 --k 50 --data --compare --fill integer");
  EXPECT_EQ(result["fused"]["check"]["ok"], true);
  EXPECT_EQ(result["unfused"]["check"]["rows"], 65);
}

TEST_F(ProgramTest, SeedsAreExploredAndTheirNumberIsReported) {
  const json result = run_json("sim all --seeds 1:5 --inject all");
  EXPECT_EQ(result["ok"], true);
  EXPECT_EQ(result["seeds"], 5);
  EXPECT_EQ(result["failures"], 0);
}

TEST_F(ProgramTest, PlanShowsTheLanesOfARank) {
  const json result = run_json("plan gemm_ar --rank 3 --tasks 3");
  EXPECT_EQ(result["rank"], 3);
  ASSERT_FALSE(result["lanes"].empty());
  for (const json& lane : result["lanes"]) {
    const auto count = lane["count"].get<std::int64_t>();
    EXPECT_EQ(lane["tasks"].size(), static_cast<std::size_t>(std::min<std::int64_t>(3, count)));
    if (count > 3) {
      EXPECT_EQ(lane["tasks"][2]["index"], count - 1);
    }
  }
  EXPECT_NE(run("plan gemm_ar --rank 3").out.find("rank 3"), std::string::npos);
}

TEST_F(ProgramTest, SizesAreMultipliedByTheirSuffix) {
  const json result = run_json("plan gemm_ar --m 3k --n 2M --k 5 --tasks 0");
  EXPECT_EQ(result["m"], 3072);
  EXPECT_EQ(result["n"], 2097152);
  EXPECT_EQ(result["k"], 5);
}

TEST_F(ProgramTest, VerifyProvesOnePlan) {
  const json result = run_json("verify gemm_rs --nodes 3 --gpus 2 --m 100 --n 50 --k 20");
  EXPECT_EQ(result["ok"], true);
  EXPECT_EQ(result["cases"], 1);
  EXPECT_GT(result["tasks"].get<int>(), 0);
  EXPECT_EQ(result["network_bytes"], result["network_bytes_bound"]);
}

TEST_F(ProgramTest, InfoNamesWhatIsMissing) {
  const json result = run_json("info");
  EXPECT_EQ(result["operators"].size(), 5u);
  EXPECT_GT(result["cores"].get<int>(), 0);
  EXPECT_GT(result["memory_bytes"].get<std::int64_t>(), 0);
  EXPECT_EQ(result["missing"].size() >= 1,
            !result["nvidia_driver"] || result["rdma_devices"].empty() || !result["cuda_built"]);
}

TEST_F(ProgramTest, ADeadlineThatPassesIsARunThatFailed) {
  // 8 KiB at 1 KB/s need seconds; the wait gives up after 50 ms.
  const std::string line = "run gemm_rs --nodes 2 --gpus 1 --m 64 --n 64 --k 8 --link 1e-6 --deadline 0.05 --repeat 1";
  const CliRun result = run(line);
  EXPECT_EQ(result.code, 3);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("waited"), std::string::npos) << result.err;
  const json object = run_json(line, 3);
  EXPECT_EQ(object["ok"], false);
  EXPECT_EQ(object["error"]["kind"], "timeout");
}

// The program's own process: arguments arrive, streams and the exit code leave.
TEST_F(ProgramTest, TheExecutableHandsOnExitCodesAndStreams) {
  const auto execute = [&](const std::string& arguments) {
    const std::string command =
        std::string(MKERNEL_CLI_EXE) + " " + arguments + " >" + path("out") + " 2>" + path("err");
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const auto text = [&](const char* name) {
    std::ifstream file(path(name));
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  };
  EXPECT_EQ(execute("--version"), 0);
  EXPECT_EQ(text("out").substr(0, 8), "mkernel ");
  EXPECT_EQ(execute("run gemm_ar --m -1"), 2);
  EXPECT_EQ(text("out"), "");
  EXPECT_EQ(text("err").substr(0, 14), "mkernel: --m i");
  EXPECT_EQ(execute("run ag_gemm --m 16 --n 16 --k 16 --repeat 1 --json"), 0);
  EXPECT_EQ(json::parse(text("out"))["ok"], true);
  if (fs::exists("/dev/full")) {
    EXPECT_EQ(WEXITSTATUS(std::system((std::string(MKERNEL_CLI_EXE) + " info >/dev/full 2>/dev/null").c_str())), 3);
  }
}

}  // namespace
}  // namespace mkernel::cli
