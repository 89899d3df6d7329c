// All tasks of all ranks of a plan, in one array. Tasks with impossible fields are reported here and made harmless, so
// that the other parts of the verifier can trust what they read.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "plan/operands.h"
#include "verify/findings.h"

namespace mkernel {

using TaskId = std::uint32_t;
inline constexpr TaskId kNoTask = ~TaskId{0};

struct Lane {
  std::int32_t rank = 0;
  Role role = Role::kCompute;
  std::int32_t lane = 0;
  TaskId first = 0;
  TaskId count = 0;
};

class Enumeration {
 public:
  Enumeration(const PlanSource& source, Findings& findings);

  const Plan& plan() const { return plan_; }
  const Topology& topo() const { return plan_.topo(); }
  std::int32_t world() const { return plan_.topo().world(); }

  const std::vector<Lane>& lanes() const { return lanes_; }  // rank by rank
  const std::vector<Task>& tasks() const { return tasks_; }  // lane by lane
  const Wait& completion(std::int32_t rank) const { return completions_[static_cast<std::size_t>(rank)]; }
  std::int32_t rank_of(TaskId task) const { return lane_of(task).rank; }
  const Lane& lane_of(TaskId task) const;  // O(log lanes)
  TaskId first_task(std::int32_t rank) const { return first_task_[static_cast<std::size_t>(rank)]; }
  TaskId end_task(std::int32_t rank) const { return first_task_[static_cast<std::size_t>(rank) + 1]; }

  // Number of a flag among the flags of all ranks.
  std::size_t flag_id(std::int32_t rank, std::uint32_t flag) const {
    return static_cast<std::size_t>(rank) * plan_.flag_count() + flag;
  }
  std::size_t flag_ids() const { return static_cast<std::size_t>(world()) * plan_.flag_count(); }

  // For messages: where a task stands, and "rank 3 recv[0] task 17 (C[0:128, 0:256] = sum of node sums 0..3)".
  Place place(TaskId task) const;
  std::string name(TaskId task) const;

 private:
  void add_lane(const PlanSource& source, std::int32_t rank, Role role, std::int32_t lane, Findings& findings);
  bool check(const Place& place, Task& task, Findings& findings) const;
  void check_flags(const Place& place, Task& task, Findings& findings) const;
  void check_bounds(const Place& place, Task& task, Findings& findings) const;

  const Plan& plan_;
  std::vector<Lane> lanes_;
  std::vector<Task> tasks_;
  std::vector<TaskId> first_task_;
  std::vector<Wait> completions_;
};

// Calls f(lane, task id, task) for every task, in the order of the array.
template <class F>
void for_each_task(const Enumeration& all, F&& f) {
  for (const Lane& lane : all.lanes()) {
    for (TaskId id = lane.first; id < lane.first + lane.count; ++id) f(lane, id, all.tasks()[id]);
  }
}

}  // namespace mkernel
