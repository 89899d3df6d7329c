// A plan with damage, for tests.
#pragma once
#include <map>
#include <tuple>
#include <vector>

#include "plan/operands.h"
#include "verify/findings.h"

namespace mkernel {

// Answers for a plan, except where a test has set something else.
class MutatedSource : public PlanSource {
 public:
  explicit MutatedSource(const PlanSpec& spec) : PlanSource(Plan(spec)) {}

  void set_task(const Place& place, const Task& task) { tasks_[key(place)] = task; }
  // The index of `lane` is ignored.
  void set_count(const Place& lane, std::int64_t count) { counts_[lane_key(lane)] = count; }
  void set_completion(std::int32_t rank, const Wait& wait) { completions_[rank] = wait; }

  Task at(const Place& place) const { return task(place.rank, place.role, place.lane, place.index); }

  // How often the undamaged plan raises a flag per epoch.
  std::uint32_t raises(std::int32_t rank, std::uint32_t flag) const {
    if (raises_.empty()) count_raises();
    return raises_[static_cast<std::size_t>(rank) * plan().flag_count() + flag];
  }

  std::int64_t count(std::int32_t rank, Role role, std::int32_t lane) const override {
    const auto found = counts_.find(lane_key({rank, role, lane, 0}));
    return found != counts_.end() ? found->second : PlanSource::count(rank, role, lane);
  }
  Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const override {
    const auto found = tasks_.find(key({rank, role, lane, index}));
    return found != tasks_.end() ? found->second : PlanSource::task(rank, role, lane, index);
  }
  Wait completion(std::int32_t rank) const override {
    const auto found = completions_.find(rank);
    return found != completions_.end() ? found->second : PlanSource::completion(rank);
  }

 private:
  using LaneKey = std::tuple<std::int32_t, Role, std::int32_t>;
  using Key = std::tuple<std::int32_t, Role, std::int32_t, std::int64_t>;
  static LaneKey lane_key(const Place& place) { return {place.rank, place.role, place.lane}; }
  static Key key(const Place& place) { return {place.rank, place.role, place.lane, place.index}; }

  void count_raises() const {
    raises_.resize(static_cast<std::size_t>(plan().topo().world()) * plan().flag_count());
    for (std::int32_t rank = 0; rank < plan().topo().world(); ++rank) {
      for (int r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        for (std::int32_t lane = 0; lane < plan().lanes(role); ++lane) {
          for (std::int64_t i = 0; i < plan().count(rank, role, lane); ++i) {
            count_raises(rank, plan().task(rank, role, lane, i));
          }
        }
      }
    }
  }
  void count_raises(std::int32_t rank, const Task& task) const {
    for (const Signal& signal : task.signals) {
      for_each_rank(plan().topo(), rank, signal, task.peer, [&](std::int32_t reached) {
        ++raises_[static_cast<std::size_t>(reached) * plan().flag_count() + signal.flag];
      });
    }
  }

  mutable std::vector<std::uint32_t> raises_;  // made when first asked for
  std::map<Key, Task> tasks_;
  std::map<LaneKey, std::int64_t> counts_;
  std::map<std::int32_t, Wait> completions_;
};

}  // namespace mkernel
