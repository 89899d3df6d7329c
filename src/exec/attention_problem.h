// One attention call's tensors for all ranks, made from a seed, and what any executor must give: the bits of the same
// arithmetic done one task after the other on the whole sequence, and values within the bound of the fp64 reference.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "exec/arguments.h"
#include "exec/attention_reference.h"
#include "exec/attention_tensors.h"
#include "plan/plan.h"

namespace mkernel {

class AttentionProblem {
 public:
  struct Inputs {
    float score_size = 1;   // factor on Q, which is even in [-1, 1) before
    bool by_token = false;  // see TensorLayout
    std::int64_t gap = 3;

    TensorLayout layout() const { return {by_token, gap}; }
  };

  AttentionProblem(const Plan& plan, std::uint64_t seed) : AttentionProblem(plan, seed, Inputs()) {}
  AttentionProblem(const Plan& plan, std::uint64_t seed, const Inputs& inputs);
  AttentionProblem(const AttentionProblem&) = delete;
  AttentionProblem& operator=(const AttentionProblem&) = delete;

  // Packed sequences get random ends from the seed.
  std::vector<Arguments> arguments();
  AttentionArguments arguments(std::int32_t rank);

  // Nothing when all of O and of the log-sum-exp has exactly the right bits and no byte beside it has changed; else a
  // sentence about the first that has not. Does all the arithmetic once more.
  std::optional<std::string> mismatch();
  // `rows` rows of O, evenly spread, against fp64; 0: all.
  CheckReport check(std::int64_t rows = 0, const AttentionArithmetic& arithmetic = {});

  // O (batch * heads * seq_q, dim) and its log-sum-exp, put together from all ranks.
  const std::vector<std::byte>& output();
  const std::vector<float>& lse();
  // The ends of packed sequences.
  std::vector<std::int32_t>& q_ends() { return ends_.q; }
  std::vector<std::int32_t>& k_ends() { return ends_.k; }

 private:
  struct Rank {
    RankTensor q, k, v, o;
    std::vector<float> lse;
  };

  void join();
  AttentionArguments sequences() const;

  Plan plan_;
  Inputs inputs_;
  std::vector<std::byte> q_, k_, v_;  // whole, by head
  std::vector<Rank> ranks_;
  SequenceEnds ends_;
  std::vector<std::byte> o_;
  std::vector<float> lse_;
};

}  // namespace mkernel
