#include "verify/signals.h"

#include <fmt/format.h>

#include "plan/print.h"

namespace mkernel {

FlagTable::FlagTable(const Enumeration& all, Findings& findings) : uses_(all.flag_ids()) {
  add_signals(all, findings);
  for_each_task(all, [&](const Lane& lane, TaskId id, const Task& task) {
    for (const Wait& wait : task.waits) {
      if (wait.span > 0) check_wait(all, {lane.rank, lane.role, lane.lane, id - lane.first}, id, wait, findings);
    }
  });
  for (std::int32_t rank = 0; rank < all.world(); ++rank) {
    check_wait(all, {rank}, kNoTask, all.completion(rank), findings);
  }
  check_awaited(all, findings);
}

void FlagTable::add_signals(const Enumeration& all, Findings& findings) {
  for_each_task(all, [&](const Lane& lane, TaskId id, const Task& task) {
    for (const Signal& signal : task.signals) {
      for_each_rank(all.topo(), lane.rank, signal, task.peer, [&](std::int32_t rank) {
        Use& use = uses_[all.flag_id(rank, signal.flag)];
        ++signals_;
        if (use.raises++ == 0) {
          use.first_signaler = id;
          use.stamp = signal.stamp;
        } else if (use.stamp || signal.stamp) {
          findings.add(ViolationKind::kUnbalanced, all.place(id), [&] {
            return fmt::format("{} {} {} of rank {}, which {} {} in the same epoch: a stamp has one writer",
                               all.name(id), signal.stamp ? "stamps" : "raises",
                               describe_flag(all.plan(), rank, signal.flag), rank, all.name(use.first_signaler),
                               use.stamp ? "stamps" : "raises");
          });
        }
      });
    }
  });
}

void FlagTable::check_wait(const Enumeration& all, const Place& place, TaskId task, const Wait& wait,
                           Findings& findings) {
  for (std::uint32_t i = 0; i < wait.span; ++i) {
    Use& use = uses_[all.flag_id(place.rank, wait.flag + i)];
    use.awaited = true;
    if (use.raises == wait.count) continue;
    findings.add(ViolationKind::kUnbalanced, place, [&] {
      std::string who = task == kNoTask ? fmt::format("completion of rank {}", place.rank) : all.name(task);
      std::string text = fmt::format("{} waits for {} to be raised {} times, but its raises per epoch are {}", who,
                                     describe_flag(all.plan(), place.rank, wait.flag + i), wait.count, use.raises);
      if (use.raises > 0) text += fmt::format(", first by {}", all.name(use.first_signaler));
      return text;
    });
  }
}

// A signal that nobody waits for orders nothing, and leaves a write on its way when the epoch ends.
void FlagTable::check_awaited(const Enumeration& all, Findings& findings) const {
  for (std::size_t id = 0; id < uses_.size(); ++id) {
    const Use& use = uses_[id];
    if (use.raises == 0 || use.awaited) continue;
    findings.add(ViolationKind::kUnbalanced, all.place(use.first_signaler), [&] {
      const auto rank = static_cast<std::int32_t>(id / all.plan().flag_count());
      const auto flag = static_cast<std::uint32_t>(id % all.plan().flag_count());
      return fmt::format("{} raises {} of rank {}, for which nobody there waits", all.name(use.first_signaler),
                         describe_flag(all.plan(), rank, flag), rank);
    });
  }
}

void Knowledge::begin_task(std::int32_t rank) {
  for (std::uint64_t& word : task_) word = 0;
  task_[static_cast<std::size_t>(rank) / 64] |= std::uint64_t{1} << (rank % 64);
}

void Knowledge::hear(std::size_t flag_id) {
  for (std::size_t w = 0; w < words_; ++w) task_[w] |= flags_[flag_id * words_ + w];
}

void Knowledge::end_task(std::int32_t rank) {
  for (std::size_t w = 0; w < words_; ++w) complete_[static_cast<std::size_t>(rank) * words_ + w] |= task_[w];
}

void Knowledge::raise(std::size_t flag_id) {
  for (std::size_t w = 0; w < words_; ++w) flags_[flag_id * words_ + w] |= task_[w];
}

bool Knowledge::task_knows(const Enumeration& all, std::int32_t by, const Task& task, std::int32_t rank) const {
  if (by == rank) return true;
  for (const Wait& wait : task.waits) {
    for (std::uint32_t i = 0; i < wait.span; ++i) {
      if (flag_knows(all.flag_id(by, wait.flag + i), rank)) return true;
    }
  }
  return false;
}

void check_flag_reuse(const Enumeration& all, const Knowledge& knowledge, Findings& findings) {
  for_each_task(all, [&](const Lane& lane, TaskId id, const Task& task) {
    for (const Signal& signal : task.signals) {
      for_each_rank(all.topo(), lane.rank, signal, task.peer, [&](std::int32_t rank) {
        if (knowledge.complete_knows(lane.rank, rank) || knowledge.task_knows(all, lane.rank, task, rank)) return;
        findings.add(ViolationKind::kOverwrite, all.place(id), [&] {
          return fmt::format(
              "{} raises {} of rank {}, which may still wait for it two epochs earlier: rank {} has no "
              "sign of rank {} in the epoch between",
              all.name(id), describe_flag(all.plan(), rank, signal.flag), rank, lane.rank, rank);
        });
      });
    }
  });
}

}  // namespace mkernel
