// The kinds of damage that change one task, for tests. The lists stand in sync_damages_test.cc and
// data_damages_test.cc, what is done with them in mutation_test.cc.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "verify/mutated_source.h"

namespace mkernel {

inline constexpr std::int32_t kGather = 1 << static_cast<int>(Op::kAllGatherGemm);
inline constexpr std::int32_t kScatter = 1 << static_cast<int>(Op::kGemmReduceScatter);
inline constexpr std::int32_t kReduce = 1 << static_cast<int>(Op::kGemmAllReduce);
inline constexpr std::int32_t kSums = kScatter | kReduce;
inline constexpr std::int32_t kAllOps = kGather | kSums;

// Changes a task; returns false when the damage does not apply to it.
using DamageTask = std::function<bool(const MutatedSource&, const Place&, Task&)>;

struct Damage {
  std::string name;
  std::vector<ViolationKind> kinds;  // one of them must be reported
  std::int32_t ops = kAllOps;        // where it must bite
  std::string elsewhere;             // why it cannot be done, or does no harm, to the other operators
  DamageTask apply;
};

std::vector<Damage> flag_damages();
std::vector<Damage> wait_damages();
std::vector<Damage> data_damages();
std::vector<Damage> put_damages();

inline bool signals_any(const Task& task) { return task.signals[0].reach != Reach::kNobody; }
inline bool moves_data(const Task& task) {
  return task.action == Action::kPut ? task.length > 0 : task.action != Action::kNone && !task.block.empty();
}

// Ranks without a slice of K read no rows, so which ones they read does no harm.
inline bool multiplies(const PlanSource& source, const Place& place, const Task& task) {
  return task.action == Action::kGemm && moves_data(task) && source.plan().gemm_k(place.rank) > 0;
}

inline bool reaches_self(const Signal& signal, const Task& task, std::int32_t rank) {
  return signal.reach == Reach::kSelf || signal.reach == Reach::kNode ||
         (signal.reach == Reach::kRank && task.peer == rank);
}

// Another task of the same lane that does the same kind of work on other data.
inline std::optional<Task> sibling(const MutatedSource& source, const Place& place, const Task& task) {
  const std::int64_t count = source.count(place.rank, place.role, place.lane);
  for (std::int64_t step = 1; step < count; ++step) {
    const Task other = source.task(place.rank, place.role, place.lane, (place.index + step) % count);
    if (other.action == task.action && other.src == task.src && other.dst == task.dst && moves_data(other) &&
        (other.src_offset != task.src_offset || other.dst_offset != task.dst_offset || other.block != task.block)) {
      return other;
    }
  }
  return std::nullopt;
}

}  // namespace mkernel
