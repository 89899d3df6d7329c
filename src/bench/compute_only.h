// A plan without its communication: what the GEMM of a fused operator costs on its own, same tiles, same stores.
#pragma once
#include "plan/plan.h"

namespace mkernel::bench {

// Compute tasks wait for nothing and signal nothing, so that calls of kPartCompute | kPartLast are complete. In
// all_gather_gemm the moves stay, for calls of all parts to fill the gather buffers that the tiles read.
class ComputeOnlySource final : public PlanSource {
 public:
  explicit ComputeOnlySource(const Plan& plan) : PlanSource(plan) {}

  std::int64_t count(std::int32_t rank, Role role, std::int32_t lane) const override {
    return role == Role::kCompute || keeps_moves() ? plan().count(rank, role, lane) : 0;
  }
  Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const override {
    Task task = plan().task(rank, role, lane, index);
    if (role != Role::kCompute) return task;
    for (Wait& wait : task.waits) wait = {};
    for (Signal& signal : task.signals) signal = {};
    return task;
  }
  Wait completion(std::int32_t) const override { return {}; }

  bool keeps_moves() const { return plan().spec().op == Op::kAllGatherGemm; }
};

}  // namespace mkernel::bench
