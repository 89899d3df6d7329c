// One backward call's tensors for all ranks, made from a seed, and what any executor must give: the bits of the same
// arithmetic done one task after the other on the whole sequence, and values within the bound of the fp64 reference.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "exec/arguments.h"
#include "exec/attention_gradients.h"
#include "exec/attention_problem.h"
#include "plan/plan.h"

namespace mkernel {

// O and the log-sum-exp come from the forward's arithmetic on the whole sequence.
class BackwardProblem {
 public:
  using Inputs = AttentionProblem::Inputs;

  BackwardProblem(const Plan& plan, std::uint64_t seed) : BackwardProblem(plan, seed, Inputs()) {}
  BackwardProblem(const Plan& plan, std::uint64_t seed, const Inputs& inputs);
  BackwardProblem(const BackwardProblem&) = delete;
  BackwardProblem& operator=(const BackwardProblem&) = delete;

  std::vector<Arguments> arguments();
  AttentionBackwardArguments arguments(std::int32_t rank);

  // As in AttentionProblem, of dQ, dK and dV.
  std::optional<std::string> mismatch();
  GradientReport check(std::int64_t rows = 0);

  // dQ, dK and dV, each put together from all ranks, one behind the other.
  std::vector<std::byte> output();
  // Other ends of packed sequences than those of the seed.
  void set_ends(std::vector<std::int32_t> q, std::vector<std::int32_t> k);

 private:
  struct Rank {
    RankTensor q, k, v, o, d_o, dq, dk, dv;
    std::vector<float> lse;
  };
  struct Gradients {
    std::vector<std::byte> dq, dk, dv;  // whole
  };
  // A rank's part of dK and dV, whole, in the partial type.
  struct Parts {
    std::vector<std::byte> dk, dv;
  };

  void run_forward();
  void hand_out();
  Parts replay_rank(std::int32_t rank, Gradients& to) const;
  void add_parts(const std::vector<Parts>& parts, Gradients& to) const;
  Gradients join() const;
  GradientData data(const Gradients& gradients) const;

  Plan plan_;
  Inputs inputs_;
  std::vector<std::byte> q_, k_, v_, o_, d_o_;  // whole, by head
  std::vector<float> lse_;
  SequenceEnds ends_;
  std::vector<Rank> ranks_;
};

}  // namespace mkernel
