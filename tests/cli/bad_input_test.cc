// What a person may type by mistake: each is refused at once, with one sentence that names it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "tests/cli/cli_run.h"

namespace mkernel::cli {
namespace {

using Args = std::vector<std::string>;

struct BadInput {
  Args args;
  std::string named;  // what the sentence must contain
};

// Values that no option of whole numbers takes.
const std::vector<std::string> kBadNumbers = {
    "abc", "-1", "-0", "1.5", "1e3", "0x10", "99999999999999999999", "+5", "5 ", " 5", "5x", "", "--json", "1,000",
    "18446744073709551616", "92233720368547758080", "NaN", "\xc3\xa9", "1\n2",
};

// Options of whole numbers of a command, with values that are out of their range.
struct NumberOption {
  const char* command;
  const char* option;
  std::vector<std::string> beyond;
};
const std::vector<NumberOption> kNumberOptions = {
    {"run", "--m", {"36028797018963969", "34359738369m", "4g"}},
    {"run", "--n", {"36028797018963969", "k", "4kk"}},
    {"run", "--k", {"36028797018963969", "m", "-4k"}},
    {"run", "--nodes", {"0", "65537", "4k"}},
    {"run", "--gpus", {"0", "65537", "4k"}},
    {"run", "--sms", {"0", "1025"}},
    {"run", "--bm", {"0", "3", "48", "2048"}},
    {"run", "--bn", {"0", "3", "48", "2048"}},
    {"run", "--band", {"0", "4294967296"}},
    {"run", "--chunk-tiles", {"0", "4294967296"}},
    {"run", "--chunk-rows", {"0", "4294967296"}},
    {"run", "--ring-depth", {"0", "3", "131072"}},
    {"run", "--repeat", {"0", "1000001"}},
    {"run", "--seed", {}},
    {"sim", "--m", {"36028797018963969"}},
    {"sim", "--nodes", {"0", "65537"}},
    {"sim", "--gpus", {"0", "65537"}},
    {"sim", "--sms", {"0", "1025"}},
    {"sim", "--ring-depth", {"0", "3", "131072"}},
    {"sim", "--seed", {}},
    {"plan", "--rank", {"8", "70000"}},
    {"plan", "--tasks", {"4294967296"}},
    {"plan", "--m", {"36028797018963969"}},
    {"bench", "--m", {"36028797018963969"}},
    {"bench", "--sms", {"0", "1025"}},
    {"bench", "--rounds", {"0", "1001"}},
    {"verify", "--k", {"36028797018963969"}},
    {"verify", "--gpus", {"0"}},
};

struct WordOption {
  const char* command;
  const char* option;
  std::vector<std::string> bad;
};
const std::vector<WordOption> kWordOptions = {
    {"run", "--dtype", {"bf15", "float", "BF16", "", "16", "fp64", "bf16,fp16"}},
    {"run", "--device", {"cuda:0", "gpu", "Host", "", "host,sim"}},
    {"run", "--fill", {"random", "zero", "", "Integer"}},
    {"run", "--deadline", {"0", "-1", "abc", "", "nan", "inf", "1e9", "5s", "0.0001"}},
    {"run",
     "--link",
     {"", "fast", "-1", "50:", "50:-2", "50:2:3", "50:2:ordered", "nan", "inf", ":2", "1e7", "50:1e10", "unordered",
      "ib:2", "balance", "50,2", "50:2:unordered:x"}},
    {"run", "--partition", {"", "1", "1,1", "1,1,1,1", "a,b,c", "-1,2,2", "1,1,2", "3,0,1", "1;1;1", "9999999,0,0"}},
    {"run", "--input", {"", "--output"}},
    {"run", "--output", {"", "--input"}},
    {"run", "--trace", {"", "--json"}},
    {"sim", "--preset", {"", "h100", "h200", "h200x8_ib", "H200X8-IB"}},
    {"sim", "--partition", {"", "1,1,1", "100,20", "x"}},
    {"sim",
     "--seeds",
     {"", "5", "5:", ":5", "5:0", "5:-1", "-5:1", "a:b", "1:2:3", "18446744073709551615:2", "1:2000000000"}},
    {"sim", "--dtype", {"bf15", ""}},
    {"plan", "--dtype", {"bf15", ""}},
    {"bench", "--dtype", {"bf15", ""}},
    {"bench", "--link", {"", "ib", "efa", "fast", "-1", "6:", "0", "6:5:unordered", "nan"}},
    {"bench", "--block-ms", {"", "0", "nan", "1e9", "-1"}},
    {"bench", "--json", {""}},
    {"verify", "--dtype", {"fp8", ""}},
};

std::vector<BadInput> table() {
  std::vector<BadInput> inputs = {
      {{}, "command"},
      {{""}, "command"},
      {{"rnu"}, "did you mean 'run'"},
      {{"RUN"}, "run"},
      {{"--json"}, "command"},
      {{"run"}, "operator"},
      {{"sim"}, "operator"},
      {{"plan"}, "operator"},
      {{"verify"}, "all"},
      {{"info", "--jsn"}, "did you mean '--json'"},
      {{"info", "now"}, "'now'"},
      {{"--version", "x"}, "'x'"},
      {{"--help", "x"}, "'x'"},
      {{"run", "gemm_allreduce"}, "did you mean 'gemm_all_reduce'"},
      {{"run", "all"}, "'all'"},
      {{"run", "gemm"}, "all_gather_gemm"},
      {{"run", ""}, "all_gather_gemm"},
      {{"run", std::string(5000, 'x')}, "all_gather_gemm"},
      {{"run", "gemm_ar", "ag_gemm"}, "'ag_gemm'"},
      {{"sim", "gemm_ar", "ag_gemm"}, "'ag_gemm'"},
      {{"plan", "gemm_ar", "ag_gemm"}, "'ag_gemm'"},
      {{"verify", "gemm_ar", "ag_gemm"}, "'ag_gemm'"},
      {{"verify", "gemm_ar", "/-gpus", "5"}, "'/-gpus'"},
      {{"run", "gemm_ar", "--nods", "2"}, "did you mean '--nodes'"},
      {{"run", "gemm_ar", "--m=1", "--m=2"}, "--m"},
      {{"run", "gemm_ar", "--json=yes"}, "--json"},
      {{"run", "gemm_ar", "--check=off"}, "--check"},
      {{"run", "gemm_ar", "-m", "5"}, "'-m'"},
      {{"run", "gemm_ar", "--"}, "'--'"},
      {{"run", "gemm_ar", "--", "--m"}, "one too many"},
      {{"run", "gemm_ar", "--check", "--no-check"}, "--no-check"},
      {{"run", "gemm_ar", "--unfused", "--compare"}, "--unfused"},
      {{"run", "gemm_ar", "--fill", "integer", "--input", "."}, "--fill"},
      {{"run", "gemm_ar", "--nodes", "1", "--link", "balanced"}, "balanced"},
      {{"run", "gemm_ar", "--m", "0", "--link", "balanced"}, "balanced"},
      {{"run", "gemm_ar", "--nodes", "1000", "--gpus", "1000"}, "1000"},
      {{"run", "gemm_ar", "--nodes", "100", "--gpus", "100"}, "threads"},
      {{"run", "gemm_ar", "--m", "1m", "--n", "1m", "--k", "1m"}, "memory"},
      {{"run", "gemm_ar", "--m", "4m", "--n", "4m"}, "memory"},
      {{"run", "gemm_rs", "--m", "32m", "--n", "32m", "--k", "32m"}, "tasks"},
      {{"run", "gemm_rs", "--m", "4m", "--n", "4m", "--k", "1"}, "memory"},
      {{"run", "gemm_ar", "--m", "1000m", "--n", "1000m"}, "C (m x n)"},
      {{"run", "gemm_ar", "--bm", "128", "--chunk-rows", "100"}, "chunk_rows"},
      {{"run", "gemm_ar", "--input", "no/such/folder"}, "no/such/folder"},
      {{"run", "gemm_ar", "--output", "no/such/folder"}, "no/such/folder"},
      {{"run", "gemm_ar", "--output", "/dev/null"}, "--output"},
      {{"run", "gemm_ar", "--trace", "no/such/folder/file"}, "--trace"},
      {{"run", "gemm_ar", "--trace", "/"}, "--trace"},
      {{"run", "gemm_ar", "--trace", "/dev/null"}, "--trace"},
      {{"sim", "all"}, "--seeds"},
      {{"sim", "gemm_ar", "--inject", "all"}, "--seeds"},
      {{"sim", "gemm_ar", "--seeds", "1:5", "--inject", "nonsense"}, "nonsense"},
      {{"sim", "gemm_ar", "--seeds", "1:5", "--inject", ""}, "--inject"},
      {{"sim", "gemm_ar", "--seeds", "1:5", "--m", "5"}, "--m"},
      {{"sim", "gemm_ar", "--seeds", "1:5", "--trace", "x"}, "--trace"},
      {{"sim", "gemm_ar", "--fill", "integer"}, "--data"},
      {{"sim", "gemm_ar", "--data", "--m", "1m", "--n", "1m", "--k", "1m"}, "memory"},
      {{"sim", "gemm_ar", "--trace", "no/such/folder/file"}, "--trace"},
      {{"bench"}, "gemm_core"},
      {{"bench", "all"}, "'all'"},
      {{"bench", "suite"}, "virtual_cluster"},
      {{"bench", "gemm_ar", "ag_gemm"}, "'ag_gemm'"},
      {{"plan", "all"}, "'all'"},
      {{"plan", "gemm_ar", "--nodes", "1", "--gpus", "1", "--rank", "1"}, "--rank"},
      {{"verify", "all", "--m", "5"}, "sizes"},
      {{"verify", "everything"}, "all"},
  };
  for (const NumberOption& entry : kNumberOptions) {
    std::vector<std::string> values = kBadNumbers;
    values.insert(values.end(), entry.beyond.begin(), entry.beyond.end());
    for (const std::string& value : values) {
      // The sentences of plan/ name bm, bn and so on without dashes.
      std::string named = entry.option;
      if (named == "--bm" || named == "--bn") named = named.substr(2);
      inputs.push_back({{entry.command, "gemm_ar", entry.option, value}, named});
    }
  }
  for (const WordOption& entry : kWordOptions) {
    for (const std::string& value : entry.bad) {
      const bool sms = std::string(entry.option) == "--partition";
      inputs.push_back({{entry.command, "gemm_ar", entry.option, value}, sms ? "partition" : entry.option});
    }
  }
  // Every option that takes a value, without one.
  for (const auto& [command, options] : std::vector<std::pair<const char*, const char*>>{
           {"run", "--nodes --gpus --m --n --k --dtype --bm --bn --band --chunk-tiles --chunk-rows --device --sms "
                   "--partition --link --ring-depth --deadline --repeat --seed --fill --input --output --trace"},
           {"sim", "--nodes --gpus --m --n --k --dtype --bm --bn --band --chunk-tiles --chunk-rows --preset --sms "
                   "--partition --ring-depth --deadline --seed --fill --seeds --inject --trace"},
           {"plan", "--nodes --gpus --m --n --k --dtype --rank --tasks"},
           {"bench", "--nodes --gpus --m --n --k --dtype --bm --bn --band --chunk-tiles --chunk-rows --sms --partition "
                     "--link --rounds --block-ms --filter --json --commit"},
           {"verify", "--nodes --gpus --m --n --k --dtype"}}) {
    for (const std::string& option : words(options)) inputs.push_back({{command, "gemm_ar", option}, option});
  }
  return inputs;
}

std::string shown(const Args& args) {
  std::string text = "mkernel";
  for (const std::string& arg : args) text += " [" + arg.substr(0, 60) + "]";
  return text;
}

TEST(BadInput, EachIsRefusedWithOneSentenceAndExitCodeTwo) {
  const std::vector<BadInput> inputs = table();
  EXPECT_GE(inputs.size(), 500u);
  RecordProperty("inputs", static_cast<int>(inputs.size()));
  const auto start = std::chrono::steady_clock::now();
  for (const BadInput& input : inputs) {
    const CliRun result = run(input.args);
    EXPECT_EQ(result.code, 2) << shown(input.args);
    EXPECT_EQ(result.out, "") << shown(input.args);
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << shown(input.args) << "\n" << result.err;
    EXPECT_EQ(result.err.substr(0, 9), "mkernel: ") << shown(input.args);
    EXPECT_NE(result.err.find(input.named), std::string::npos)
        << shown(input.args) << "\nshould name " << input.named << ": " << result.err;
    EXPECT_LT(result.err.size(), 800u) << shown(input.args);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  RecordProperty("milliseconds", static_cast<int>(seconds * 1e3));
}

TEST(BadInput, TimingAllOfThemTakeUnderASecond) {
  const std::vector<BadInput> inputs = table();
  const auto start = std::chrono::steady_clock::now();
  for (const BadInput& input : inputs) run(input.args);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_LT(seconds, 1.0);
}

TEST(BadInput, ParsingAloneRefusesWhateverNeedsNoMachine) {
  for (const BadInput& input : table()) {
    const CliRun result = run(input.args, true);
    if (result.code == 2) continue;
    // Only files, folders and memory are left to be looked at.
    const bool outside = input.named == "memory" || input.named == "no/such/folder" || input.named == "--output" ||
                         input.named == "--trace" || input.named == "balanced";
    EXPECT_TRUE(outside) << shown(input.args);
  }
}

TEST(GoodInput, SizesTakeSuffixesAndOperatorsTakeAliases) {
  for (const char* line :
       {"run gemm_ar --m 4k --n 1M --k 0", "run gemm-all-reduce", "run ag_gemm --link 0.5:10:unordered",
        "run all-gather-gemm --link 1e-3", "sim gemm_rs --preset h200x8-efa --partition 100,16,16",
        "sim all --seeds 1:500", "sim gemm_ar --seeds 18446744073709551000:5 --inject none",
        "plan gemm_ar --nodes 3 --gpus 2 --rank 5", "verify all --json", "verify gemm_ar --m 0", "info", "help run",
        "run --help", "-h", "--version", "run gemm_ar --sms 4 --partition 2,1,1 --ring-depth 1",
        "run gemm_ar --device sim --nodes 100 --gpus 100", "run gemm_ar --seed 18446744073709551615"}) {
    const CliRun result = run(words(line), true);
    EXPECT_EQ(result.code, 0) << line << ": " << result.err;
    EXPECT_EQ(result.err, "") << line;
  }
}

}  // namespace
}  // namespace mkernel::cli
