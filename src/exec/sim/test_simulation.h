// What the tests of the simulator share: a small checked run, three calls on one workspace, plans with damage.
#pragma once
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exec/sim/simulator.h"
#include "plan/print.h"

namespace mkernel::test {

constexpr Nanos kSecond = 1'000'000'000;

inline SimOptions checked_options(Topology topo) {
  SimOptions options;
  options.topo = topo;
  options.sms = 4;
  options.cost.sms = 4;
  options.races = true;
  return options;
}

// Masks, heads, packed sequences and numbers of slots of attention.
inline std::vector<AttentionSpec> attention_kinds() {
  std::vector<AttentionSpec> list(6);
  list[0].slot_rounds = 1;
  list[1].mask.causal = list[1].zigzag = true;
  list[1].heads = 4;
  list[1].kv_heads = 2;
  list[2].mask.left = 9;
  list[2].mask.right = 2;
  list[2].slot_rounds = 2;
  list[3].packed = list[3].mask.causal = true;
  list[4].batch = 2;
  list[4].heads = 3;
  list[4].mask.causal = true;
  list[4].slot_rounds = 1;
  list[5].packed = list[5].zigzag = true;
  list[5].slot_rounds = 2;
  return list;
}

inline std::string text_of(const PlanSpec& spec) {
  return fmt::format("{}x{} {}, {} rounds", spec.topo.nodes, spec.topo.gpus, attention_text(spec),
                     spec.attention.slot_rounds);
}

struct Outcome {
  std::optional<Error> error;
  std::optional<std::string> mismatch;
  bool bad() const { return error.has_value() || mismatch.has_value(); }
  std::string text() const { return error ? error->message : mismatch ? *mismatch : "good"; }
};

// Three calls with fresh data, so that the third reuses the workspace of the first.
template <class Problem>
Outcome run_three(const PlanSource& source, const SimOptions& options) {
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<SimCall> calls;
  for (std::uint64_t i = 0; i < 3; ++i) {
    problems.push_back(std::make_unique<Problem>(source.plan(), 10 + i));
    calls.push_back({0, problems.back()->arguments()});
  }
  const PlanSource* operators[] = {&source};
  Outcome outcome;
  outcome.error = simulate(options, operators, calls).error;
  for (const auto& problem : problems) {
    if (!outcome.mismatch) outcome.mismatch = problem->mismatch();
  }
  return outcome;
}

// A plan with one kind of damage.
class Damaged : public PlanSource {
 public:
  using Damage = std::function<void(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index, Task& task)>;
  Damaged(const Plan& plan, Damage damage) : PlanSource(plan), damage_(std::move(damage)) {}
  Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const override {
    Task task = PlanSource::task(rank, role, lane, index);
    damage_(rank, role, lane, index, task);
    return task;
  }

 private:
  Damage damage_;
};

}  // namespace mkernel::test
