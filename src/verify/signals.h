// What flags prove: that signals and waits balance, that every task runs, and which ranks a task has heard of.
#pragma once
#include <cstdint>
#include <vector>

#include "verify/enumeration.h"

namespace mkernel {

// Signals and waits of every flag, per epoch.
class FlagTable {
 public:
  // Reports what does not balance.
  FlagTable(const Enumeration& all, Findings& findings);

  std::int64_t signals() const { return signals_; }
  bool is_awaited(std::size_t flag_id) const { return uses_[flag_id].awaited; }
  std::uint32_t raises(std::size_t flag_id) const { return uses_[flag_id].raises; }

 private:
  struct Use {
    std::uint32_t raises = 0;
    TaskId first_signaler = kNoTask;
    bool stamp = false;
    bool awaited = false;
  };

  void add_signals(const Enumeration& all, Findings& findings);
  void check_wait(const Enumeration& all, const Place& place, TaskId task, const Wait& wait, Findings& findings);
  void check_awaited(const Enumeration& all, Findings& findings) const;

  std::vector<Use> uses_;
  std::int64_t signals_ = 0;
};

// A set of ranks per flag and per rank: who must have started this epoch before the flag is full, and before the rank's
// call is complete.
class Knowledge {
 public:
  Knowledge(std::size_t flags, std::int32_t world)
      : words_((static_cast<std::size_t>(world) + 63) / 64),
        flags_(flags * words_),
        complete_(static_cast<std::size_t>(world) * words_),
        task_(words_) {}

  // The set of a task that has all its waits met becomes the current one.
  void begin_task(std::int32_t rank);
  void hear(std::size_t flag_id);  // the current task has waited for this flag
  void end_task(std::int32_t rank);
  void raise(std::size_t flag_id);  // by the current task

  bool flag_knows(std::size_t flag_id, std::int32_t rank) const { return bit(&flags_[flag_id * words_], rank); }
  // Whether `rank` has started an epoch before `by` completes it.
  bool complete_knows(std::int32_t by, std::int32_t rank) const {
    return bit(&complete_[static_cast<std::size_t>(by) * words_], rank);
  }
  // Whether `rank` has started an epoch before `task` of rank `by` starts in it.
  bool task_knows(const Enumeration& all, std::int32_t by, const Task& task, std::int32_t rank) const;

 private:
  static bool bit(const std::uint64_t* set, std::int32_t rank) { return (set[rank / 64] >> (rank % 64) & 1) != 0; }

  std::size_t words_;
  std::vector<std::uint64_t> flags_;
  std::vector<std::uint64_t> complete_;
  std::vector<std::uint64_t> task_;
};

// Runs the plan with one server per lane, in order, each task as soon as its waits are met, and reports the tasks that
// never run. Why this proves that any SM partition runs it to the end: see liveness.cc. Returns the tasks that ran, in
// this order.
std::vector<TaskId> run_plan(const Enumeration& all, Knowledge& knowledge, Findings& findings);

// Reports signals that may reach a flag which a rank still waits for two epochs earlier.
void check_flag_reuse(const Enumeration& all, const Knowledge& knowledge, Findings& findings);

}  // namespace mkernel
