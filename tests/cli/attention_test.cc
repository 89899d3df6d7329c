// ring_attention on the command line: what it shows, what it checks, what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/cli/cli_run.h"

namespace mkernel::cli {
namespace {

using nlohmann::json;

json run_json(const std::string& line) {
  const CliRun result = run(line + " --json");
  EXPECT_EQ(result.code, 0) << line << ": " << result.err;
  return json::parse(result.out);
}

TEST(AttentionProgram, RunsOnThreadsAndInVirtualTimeAndChecksItself) {
  for (const char* device : {"host", "sim"}) {
    const json result = run_json(std::string("run ring_attention --nodes 2 --gpus 2 --seq 200 --heads 4 --kv-heads 2 "
                                             "--dim 32 --causal --zigzag --repeat 2 --device ") +
                                 device);
    EXPECT_EQ(result["operator"], "ring_attention");
    EXPECT_EQ(result["kv_heads"], 2);
    EXPECT_EQ(result["check"]["rows"], 800);
    EXPECT_LE(result["check"]["worst_ratio"], 1.0);
    EXPECT_EQ(result["check"]["identical_runs"], 2);
    EXPECT_EQ(result["network"]["bytes"], result["network"]["bytes_bound"]);
  }
}

TEST(AttentionProgram, TakesEveryOption) {
  const json result = run_json(
      "run ring-attn --nodes 3 --gpus 1 --batch 2 --heads 3 --kv-heads 1 --seq 90 --seq-k 70 --dim 8 --window 20:4 "
      "--scale 0.5 --slots 1 --bm 16 --chunk-rows 7 --dtype fp16 --repeat 1 --sms 2 --seed 9");
  EXPECT_EQ(result["window_left"], 20);
  EXPECT_EQ(result["window_right"], 4);
  EXPECT_EQ(result["slot_rounds"], 1);
  EXPECT_EQ(result["tiling"]["chunk_rows"], 7);
  EXPECT_EQ(run_json("run ring_attn --seq 300 --packed --causal --repeat 1 --slots all")["packed"], true);
  const CliRun text = run("run ring_attn --nodes 2 --gpus 1 --seq 64 --compare --repeat 1 --link 1:2");
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("speed-up"), std::string::npos);
  EXPECT_NE(text.out.find("1 x 64 queries and 64 keys of 4 and 4 heads of 64, bf16, tiles of 32"), std::string::npos)
      << text.out;
}

TEST(AttentionProgram, IsSimulatedPlannedAndProved) {
  const json timed = run_json("sim ring_attention --nodes 2 --gpus 2 --seq 8k --compare --causal --zigzag");
  EXPECT_GT(timed["speedup"], 1.0);
  EXPECT_EQ(timed["network"]["bytes"], timed["network"]["bytes_bound"]);
  const json data = run_json("sim ring_attention --nodes 2 --gpus 2 --seq 300 --data");
  EXPECT_EQ(data["fused"]["check"]["ok"], true);
  const json proved = run_json("verify ring_attention --nodes 3 --gpus 2 --seq 1000 --slots 2 --window 200:");
  EXPECT_EQ(proved["violation_count"], 0);
  const CliRun plan = run("plan ring_attention --nodes 2 --gpus 2 --rank 1");
  EXPECT_EQ(plan.code, 0);
  EXPECT_NE(plan.out.find("fold keys"), std::string::npos);
  const json seeds = run_json("sim ring_attention --seeds 1:20");
  EXPECT_EQ(seeds["failures"], 0);
}

TEST(AttentionProgram, ItsBackwardRunsIsSimulatedPlannedAndProved) {
  for (const char* device : {"host", "sim"}) {
    const json result = run_json(std::string("run ring_attention_backward --nodes 2 --gpus 2 --seq 200 --heads 4 "
                                             "--kv-heads 2 --dim 32 --causal --zigzag --repeat 2 --device ") +
                                 device);
    EXPECT_EQ(result["operator"], "ring_attention_backward");
    EXPECT_EQ(result["check"]["ok"], true);
    EXPECT_EQ(result["check"]["dq"]["rows"], 800);
    EXPECT_EQ(result["check"]["dk"]["rows"], 400);
    EXPECT_LE(result["check"]["dv"]["worst_ratio"], 1.0);
    EXPECT_EQ(result["check"]["identical_runs"], 2);
    EXPECT_EQ(result["network"]["bytes"], result["network"]["bytes_bound"]);
  }
  const json all = run_json(
      "run ring-attn-bwd --nodes 3 --gpus 1 --batch 2 --heads 3 --kv-heads 1 --seq 90 --seq-k 70 --dim 8 --window 20:4 "
      "--scale 0.5 --slots 1 --bm 16 --bn 8 --chunk-rows 7 --dtype fp16 --fp32-partials --repeat 1 --sms 2 --seed 9");
  EXPECT_EQ(all["tiling"]["bn"], 8);
  EXPECT_EQ(all["partial_dtype"], "fp32");
  EXPECT_EQ(run_json("run ring_attn_bwd --seq 300 --packed --causal --repeat 1 --slots all")["packed"], true);
  const json timed = run_json("sim ring_attn_bwd --nodes 2 --gpus 2 --seq 8k --compare --causal --zigzag");
  EXPECT_GT(timed["speedup"], 1.0);
  EXPECT_EQ(timed["network"]["bytes"], timed["network"]["bytes_bound"]);
  const json data = run_json("sim ring_attn_bwd --nodes 2 --gpus 2 --seq 300 --data");
  EXPECT_EQ(data["fused"]["check"]["ok"], true);
  const json proved = run_json("verify ring_attn_bwd --nodes 3 --gpus 2 --seq 1000 --slots 2 --window 200:");
  EXPECT_EQ(proved["violation_count"], 0);
  const CliRun plan = run("plan ring_attn_bwd --nodes 2 --gpus 2 --rank 1");
  EXPECT_EQ(plan.code, 0);
  EXPECT_NE(plan.out.find("dK and dV begin"), std::string::npos);
  EXPECT_EQ(run_json("sim ring_attn_bwd --seeds 1:20")["failures"], 0);
}

// Nothing is tried on a GPU, whether there is one or not.
TEST(AttentionProgram, ItsBackwardHasNoKernelForGpusYet) {
  for (const char* line : {"run ring_attention_backward --device cuda",
                           "run ring_attn_bwd --device cuda --nodes 1 --gpus 1", "bench ring_attention_backward"}) {
    const CliRun result = run(line);
    EXPECT_NE(result.code, 0) << line;
    EXPECT_NE(result.err.find("ring_attention_backward"), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("no kernel for GPUs yet"), std::string::npos) << result.err;
    EXPECT_EQ(result.out, "") << line;
  }
}

TEST(AttentionProgram, WhatItCannotTakeIsRefusedInOneSentence) {
  const struct {
    const char* line;
    const char* words;
  } table[] = {
      {"bench ring_attention", "attention_core.py"},
      {"run ring_attention --heads 12 --kv-heads 8", "multiple of kv_heads"},
      {"run ring_attention --heads 0", "--heads"},
      {"run ring_attention --dim 12", "dim is 12"},
      {"run ring_attention --dim 300", "--dim"},
      {"run ring_attention --seq -1", "--seq"},
      {"run ring_attention --window 5", "LEFT:RIGHT"},
      {"run ring_attention --window 5:x", "--window"},
      {"run ring_attention --slots 0", "--slots"},
      {"run ring_attention --slots many", "it must be all"},
      {"run ring_attention --scale nan", "--scale"},
      {"run ring_attention --bm 24", "bm is 24"},
      {"run ring_attention --packed --batch 2", "packed"},
      {"run ring_attention --unfused --slots 1", "fused is false"},
      {"run ring_attention --m 5", "--m is for the GEMM operators"},
      {"verify ring_attention --fp32-partials", "--fp32-partials is for the GEMM operators"},
      {"plan ring_attention --chunk-tiles 2", "--chunk-tiles is for the GEMM operators"},
      {"run ring_attention --bn 8", "--bn is for the GEMM operators and the backward"},
      {"run ring_attn_bwd --unfused", "--unfused is not for run ring_attention_backward"},
      {"run ring_attn_bwd --compare", "mkernel sim --compare"},
      {"run ring_attn_bwd --band 2", "--band is for the GEMM operators"},
      {"run ring_attn_bwd --link balanced", "--link balanced"},
      {"run ring_attn_bwd --output /tmp", "--output"},
      {"run ring_attn_bwd --heads 12 --kv-heads 8", "multiple of kv_heads"},
      {"run gemm_ar --causal", "--causal is for ring_attention"},
      {"sim ag_gemm --seq 5", "--seq is for ring_attention"},
      {"sim ring_attention --seeds 1:2 --heads 3", "--heads and --seeds"},
      {"run ring_attention --link balanced", "--link balanced"},
      {"run ring_attention --output /tmp", "--output"},
      {"run ring_attention --input /tmp", "--input"},
      {"run ring_attention --fill integer", "--fill"},
      {"sim ring_attention --data --fill integer", "--fill"},
      {"run ring_attentoin", "did you mean 'ring_attention'"},
  };
  for (const auto& bad : table) {
    const CliRun result = run(bad.line);
    EXPECT_EQ(result.code, 2) << bad.line;
    EXPECT_NE(result.err.find(bad.words), std::string::npos) << bad.line << ": " << result.err;
    EXPECT_EQ(result.out, "") << bad.line;
    EXPECT_LE(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

}  // namespace
}  // namespace mkernel::cli
