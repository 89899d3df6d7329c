// Each element of a chunk is followed back to the element of K or V that it is a copy of (verify/reused_memory.h), and
// each state to the keys that it holds.
#include "verify/attention.h"

#include "verify/attention_sums.h"
#include "verify/reused_memory.h"

namespace mkernel {
namespace {

class Sweep {
 public:
  Sweep(const Enumeration& all, const Knowledge& knowledge, Findings& findings)
      : all_(all), plan_(all.plan()), memory_(all, knowledge, findings), states_(all, memory_) {}

  void run(TaskId id) {
    const Task& task = all_.tasks()[id];
    const std::int32_t rank = all_.rank_of(id);
    if (task.action == Action::kAttend) return attend(id, rank, task);
    if (task.source != Source::kNone || task.dst_reach != Reach::kNobody) memory_.move(id, rank, task);
  }
  void check_reuse() { memory_.check_reuse(); }

 private:
  void attend(TaskId id, std::int32_t rank, const Task& task);

  const Enumeration& all_;
  const Plan& plan_;
  ReusedMemory memory_;
  QuerySums states_;
};

void Sweep::attend(TaskId id, std::int32_t rank, const Task& task) {
  if (task.block.empty() || task.dst_reach == Reach::kNobody) return;
  check_keys(plan_, memory_, id, rank, task);
  states_.add(id, rank, task, state_access(plan_, rank, task));
}

}  // namespace

void check_attention(const Enumeration& all, const std::vector<TaskId>& order, const Knowledge& knowledge, bool reuse,
                     Findings& findings) {
  Sweep sweep(all, knowledge, findings);
  for (const TaskId id : order) sweep.run(id);
  if (reuse) sweep.check_reuse();
}

}  // namespace mkernel
