// For tests: an AttentionProblem in the memory of GPUs.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "exec/attention_problem.h"
#include "ops/attention_spec.h"
#include "tests/gpu/gpu_problem.h"

namespace mkernel {

class GpuAttention {
 public:
  GpuAttention(World& world, const AttentionOptions& options, std::uint64_t seed, float score_size = 1,
               bool by_token = false)
      : world_(world),
        plan_(make_gpu_attention_spec({world.options().nodes, world.options().gpus}, options).value()),
        problem_(plan_, seed, {score_size, by_token, 8}) {
    for (int rank = 0; rank < world.size(); ++rank) {
      const AttentionArguments host = problem_.arguments(rank);
      AttentionArguments device = host;
      for (AttentionTensor AttentionArguments::*tensor : kTensors) {
        (device.*tensor).data = take(rank, bytes(host.*tensor));
        copy(rank, (device.*tensor).data, (host.*tensor).data, bytes(host.*tensor));
      }
      device.lse = static_cast<float*>(take(rank, lse_bytes(host)));
      host_.push_back(host);
      device_.push_back(device);
    }
  }
  ~GpuAttention() {
    for (const auto& [rank, data] : blocks_) world_.release(rank, data);
  }
  GpuAttention(const GpuAttention&) = delete;
  GpuAttention& operator=(const GpuAttention&) = delete;

  const std::vector<AttentionArguments>& arguments() const { return device_; }
  AttentionProblem& problem() { return problem_; }

  void download() {
    for (int rank = 0; rank < world_.size(); ++rank) {
      const AttentionArguments& host = host_[static_cast<std::size_t>(rank)];
      const AttentionArguments& device = device_[static_cast<std::size_t>(rank)];
      copy(rank, host.o.data, device.o.data, bytes(host.o));
      copy(rank, host.lse, device.lse, lse_bytes(host));
    }
  }
  // O and its log-sum-exp as bytes, of all ranks.
  std::vector<std::byte> result() {
    download();
    std::vector<std::byte> all = problem_.output();
    const std::vector<float>& lse = problem_.lse();
    const std::size_t size = all.size();
    all.resize(size + lse.size() * sizeof(float));
    if (!lse.empty()) std::memcpy(all.data() + size, lse.data(), lse.size() * sizeof(float));
    return all;
  }
  // Empty when `rows` of O (0: all where that is quick, else some) are as exact as the arithmetic allows.
  std::string mismatch(std::int64_t rows = 0) {
    download();
    const AttentionSpec& a = plan_.spec().attention;
    if (rows == 0 && a.batch * a.heads * a.seq_q * a.seq_k * a.dim > (1 << 25)) rows = 97;
    const CheckReport report = problem_.check(rows, AttentionArithmetic::gpu());
    worst_ = report.worst_ratio;
    error_ = report.max_rel_error;
    if (report.ok) return "";
    return fmt::format("row {}, column {} is {:.2f} times the bound off; relative error {:.2e}", report.worst_row,
                       report.worst_col, report.worst_ratio, report.max_rel_error);
  }
  double worst_ratio() const { return worst_; }
  double relative_error() const { return error_; }

 private:
  static constexpr AttentionTensor AttentionArguments::*kTensors[] = {&AttentionArguments::q, &AttentionArguments::k,
                                                                      &AttentionArguments::v, &AttentionArguments::o};

  // From the first to the last element.
  std::int64_t bytes(const AttentionTensor& t) const {
    if (t.tokens == 0) return 0;
    return ((t.batch - 1) * t.batch_stride + (t.heads - 1) * t.head_stride + (t.tokens - 1) * t.token_stride + t.dim) *
           2;
  }
  static std::int64_t lse_bytes(const AttentionArguments& a) { return a.o.batch * a.o.heads * a.o.tokens * 4; }
  void* take(int rank, std::int64_t size) {
    Result<void*> data = world_.allocate(rank, size);
    blocks_.push_back({rank, data.value()});
    return data.value();
  }
  void copy(int rank, void* to, const void* from, std::int64_t size) {
    if (size == 0) return;
    EXPECT_TRUE(world_.copy(rank, to, from, size).ok());
  }

  World& world_;
  Plan plan_;
  AttentionProblem problem_;
  std::vector<AttentionArguments> host_;
  std::vector<AttentionArguments> device_;
  std::vector<std::pair<int, void*>> blocks_;
  double worst_ = 0;
  double error_ = 0;
};

inline AttentionOptions attention(std::int64_t seq, std::int64_t heads, std::int64_t dim) {
  AttentionOptions options;
  options.heads = heads;
  options.dim = dim;
  options.seq_q = seq;
  return options;
}

inline std::string describe(const AttentionOptions& o, const Topology& t) {
  return fmt::format("{}x{}: {} x {}/{} heads of {}, {} queries, {} keys, {}{}{}{} window {}:{}, chunks {}", t.nodes,
                     t.gpus, o.batch, o.heads, o.kv_heads, o.dim, o.seq_q, o.seq_k, dtype_name(o.dtype),
                     o.causal ? ", causal" : "", o.zigzag ? ", zigzag" : "", o.packed ? ", packed" : "", o.window_left,
                     o.window_right, o.chunk_rows);
}

// Runs one call and says what is wrong; nothing when all is right.
inline std::string run_attention(World& world, const AttentionOptions& options, std::uint64_t seed = 1,
                                 float score_size = 1, bool by_token = false) {
  Result<Operator> op = Operator::create(world, options);
  if (!op.ok()) return op.error().message;
  GpuAttention problem(world, options, seed, score_size, by_token);
  const Result<RunReport> report = op->run(problem.arguments());
  if (!report.ok()) return report.error().message;
  if (report->network_bytes != report->network_bytes_bound) return "network bytes differ from the bound";
  return problem.mismatch();
}

}  // namespace mkernel
