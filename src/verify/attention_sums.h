// What the verifier asks of attention's running sums, forward and backward: whether the keys that a task takes are
// those that it names, and whether the sums of a tile of queries take in each key that it sees once.
#pragma once
#include <map>
#include <vector>

#include "mkernel/attention.h"
#include "verify/reused_memory.h"

namespace mkernel {

// The key head that a row of Q uses, both counted over all batches.
std::int64_t key_head_of(const Plan& plan, std::int32_t rank, std::int64_t row);

// Whether some query of the rows `block` of Q sees one of the keys [key, end).
bool rows_see(const Plan& plan, std::int32_t rank, const Block& block, std::int64_t key, std::int64_t end);

// The keys and values that a task (kAttend or kAttendBackward) reads are the ones that it names.
void check_keys(const Plan& plan, ReusedMemory& memory, TaskId id, std::int32_t rank, const Task& task);

// The running sums of tiles of queries between their tasks.
class QuerySums {
 public:
  QuerySums(const Enumeration& all, ReusedMemory& memory)
      : all_(all), plan_(all.plan()), memory_(memory), states_(static_cast<std::size_t>(all.world())) {}

  // A task that goes on from the sums at `place` or begins, adds its keys, and leaves them there or ends.
  void add(TaskId id, std::int32_t rank, const Task& task, const Access& place);

 private:
  struct State {
    std::int64_t end = 0;
    TaskId writer = kNoTask;
    Block block;
    std::vector<SequencePart> keys;  // in the order in which they were added
  };

  State resume(TaskId id, std::int32_t rank, const Task& task);
  void park(TaskId id, std::int32_t rank, const Access& place, State state);
  void finish(TaskId id, std::int32_t rank, const Task& task, State state);

  const Enumeration& all_;
  const Plan& plan_;
  ReusedMemory& memory_;
  std::vector<std::map<std::int64_t, State>> states_;  // by rank and place
};

}  // namespace mkernel
