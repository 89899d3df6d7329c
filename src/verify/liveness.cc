// Why one run with one server per lane proves that every SM partition ends.
//
// run_plan() finds an order of all tasks in which each lane is taken from front to back and each task's waits are met
// by what stands before it. Take any other run: any number of SMs, any assignment of SMs to lanes, as long as tasks of
// a lane are taken from front to back, every lane with tasks left has a server, and a server of several lanes takes
// only tasks whose waits are met. Suppose that it stops with tasks left, and let t be the first of them in our order.
// Everything before t in our order is done, so t's predecessors in its lane are, and all raises that t waits for have
// happened. Flags only grow, so whatever else ran meanwhile cannot have taken a met wait back: the set of tasks that
// can run only grows. So t stands at the head of its lane, ready, in front of a server: it runs. Contradiction. A put
// has no server that it could lack: once posted, the network carries it.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "plan/print.h"
#include "verify/signals.h"

namespace mkernel {
namespace {

using LaneId = std::int32_t;
constexpr LaneId kNoLane = -1;
constexpr std::size_t kMaxCycleShown = 16;

struct Blocked {
  std::uint32_t flag = 0;
  std::uint32_t wanted = 0;
};

class Run {
 public:
  Run(const Enumeration& all, Knowledge& knowledge)
      : all_(all),
        knowledge_(knowledge),
        raised_(all.flag_ids()),
        first_waiter_(all.flag_ids(), kNoLane),
        done_(all.lanes().size()),
        next_waiter_(all.lanes().size(), kNoLane),
        blocked_(all.lanes().size()) {}

  std::vector<TaskId> run();
  void report(Findings& findings) const;

 private:
  void serve(LaneId lane);
  void execute(const Lane& lane, const Task& task);
  void raise(std::size_t flag_id);
  std::optional<Blocked> first_unmet(std::int32_t rank, const Wait& wait) const;
  std::optional<Blocked> first_unmet(std::int32_t rank, const Task& task) const;

  bool is_stuck(LaneId lane) const { return done_[index(lane)] < all_.lanes()[index(lane)].count; }
  TaskId head(LaneId lane) const { return all_.lanes()[index(lane)].first + done_[index(lane)]; }
  static std::size_t index(LaneId lane) { return static_cast<std::size_t>(lane); }
  // The lane whose tasks that did not run include one that raises what `lane` waits for, and that task.
  struct Cause {
    LaneId lane = kNoLane;
    TaskId task = kNoTask;
  };
  std::vector<Cause> causes() const;
  std::vector<bool> on_cycle(const std::vector<Cause>& causes) const;
  std::string stuck_text(LaneId lane, const Cause& cause) const;
  std::string cycle_text(LaneId lane, const std::vector<Cause>& causes) const;

  const Enumeration& all_;
  Knowledge& knowledge_;
  std::vector<std::uint32_t> raised_;
  std::vector<LaneId> first_waiter_;  // per flag, the lanes whose head waits for it
  std::vector<TaskId> done_;          // per lane
  std::vector<LaneId> next_waiter_;
  std::vector<Blocked> blocked_;
  std::vector<LaneId> ready_;
  std::vector<TaskId> order_;
};

std::vector<TaskId> Run::run() {
  for (std::size_t lane = all_.lanes().size(); lane-- > 0;) ready_.push_back(static_cast<LaneId>(lane));
  while (!ready_.empty()) {
    const LaneId lane = ready_.back();
    ready_.pop_back();
    serve(lane);
  }
  for (std::int32_t rank = 0; rank < all_.world(); ++rank) {
    const Wait& wait = all_.completion(rank);
    knowledge_.begin_task(rank);
    for (std::uint32_t i = 0; i < wait.span; ++i) knowledge_.hear(all_.flag_id(rank, wait.flag + i));
    knowledge_.end_task(rank);
  }
  return std::move(order_);
}

// Runs tasks of a lane until one has to wait, and leaves the lane with the flag that it waits for.
void Run::serve(LaneId id) {
  const Lane& lane = all_.lanes()[index(id)];
  TaskId& done = done_[index(id)];
  for (; done < lane.count; ++done) {
    const Task& task = all_.tasks()[lane.first + done];
    if (task.action == Action::kNone) continue;
    const std::optional<Blocked> blocked = first_unmet(lane.rank, task);
    if (blocked) {
      blocked_[index(id)] = *blocked;
      LaneId& first = first_waiter_[all_.flag_id(lane.rank, blocked->flag)];
      next_waiter_[index(id)] = first;
      first = id;
      return;
    }
    execute(lane, task);
    order_.push_back(lane.first + done);
  }
}

void Run::execute(const Lane& lane, const Task& task) {
  knowledge_.begin_task(lane.rank);
  for (const Wait& wait : task.waits) {
    for (std::uint32_t i = 0; i < wait.span; ++i) knowledge_.hear(all_.flag_id(lane.rank, wait.flag + i));
  }
  knowledge_.end_task(lane.rank);
  for (const Signal& signal : task.signals) {
    for_each_rank(all_.topo(), lane.rank, signal, task.peer,
                  [&](std::int32_t rank) { raise(all_.flag_id(rank, signal.flag)); });
  }
}

void Run::raise(std::size_t flag_id) {
  const std::uint32_t raised = ++raised_[flag_id];
  knowledge_.raise(flag_id);
  for (LaneId* link = &first_waiter_[flag_id]; *link != kNoLane;) {
    const LaneId lane = *link;
    if (raised < blocked_[index(lane)].wanted) {
      link = &next_waiter_[index(lane)];
      continue;
    }
    *link = next_waiter_[index(lane)];
    ready_.push_back(lane);
  }
}

std::optional<Blocked> Run::first_unmet(std::int32_t rank, const Wait& wait) const {
  for (std::uint32_t i = 0; i < wait.span; ++i) {
    if (raised_[all_.flag_id(rank, wait.flag + i)] < wait.count) return Blocked{wait.flag + i, wait.count};
  }
  return std::nullopt;
}

std::optional<Blocked> Run::first_unmet(std::int32_t rank, const Task& task) const {
  const std::optional<Blocked> first = first_unmet(rank, task.waits[0]);
  return first ? first : first_unmet(rank, task.waits[1]);
}

std::vector<Run::Cause> Run::causes() const {
  std::vector<Cause> causes(all_.lanes().size());
  const auto lanes = static_cast<LaneId>(all_.lanes().size());
  for (LaneId id = 0; id < lanes; ++id) {
    const Lane& lane = all_.lanes()[index(id)];
    for (TaskId task_id = head(id); task_id < lane.first + lane.count; ++task_id) {
      const Task& task = all_.tasks()[task_id];
      for (const Signal& signal : task.signals) {
        for_each_rank(all_.topo(), lane.rank, signal, task.peer, [&](std::int32_t rank) {
          LaneId waiter = first_waiter_[all_.flag_id(rank, signal.flag)];
          for (; waiter != kNoLane; waiter = next_waiter_[index(waiter)]) {
            if (causes[index(waiter)].lane == kNoLane) causes[index(waiter)] = {id, task_id};
          }
        });
      }
    }
  }
  return causes;
}

// Which lanes come back to themselves along their causes.
std::vector<bool> Run::on_cycle(const std::vector<Cause>& causes) const {
  std::vector<bool> result(causes.size());
  std::vector<LaneId> walk_of(causes.size(), kNoLane);  // the walk that has come through a lane first
  for (LaneId start = 0; start < static_cast<LaneId>(causes.size()); ++start) {
    LaneId at = start;
    while (at != kNoLane && walk_of[index(at)] == kNoLane) {
      walk_of[index(at)] = start;
      at = causes[index(at)].lane;
    }
    if (at == kNoLane || walk_of[index(at)] != start) continue;
    for (LaneId lane = at; !result[index(lane)]; lane = causes[index(lane)].lane) result[index(lane)] = true;
  }
  return result;
}

std::string Run::stuck_text(LaneId lane, const Cause& cause) const {
  const std::int32_t rank = all_.lanes()[index(lane)].rank;
  const Blocked& blocked = blocked_[index(lane)];
  std::string text = fmt::format("{} never runs: it waits for {}, wanted {}, seen {}; ", all_.name(head(lane)),
                                 describe_flag(all_.plan(), rank, blocked.flag), blocked.wanted,
                                 raised_[all_.flag_id(rank, blocked.flag)]);
  if (cause.lane == kNoLane) return text + "no task is left that raises it";
  text += fmt::format("{} would raise it", all_.name(cause.task));
  if (cause.task != head(cause.lane)) text += fmt::format(" and stands behind {}", all_.name(head(cause.lane)));
  return text;
}

// The way from `lane` along what it waits for, if it comes back to it.
std::string Run::cycle_text(LaneId lane, const std::vector<Cause>& causes) const {
  std::vector<LaneId> way;
  for (LaneId at = lane; way.empty() || at != lane; at = causes[index(at)].lane) {
    if (at == kNoLane || way.size() == kMaxCycleShown) return "";
    way.push_back(at);
  }
  if (way.size() == 1) return "; so it waits for itself";
  std::string text = "; the waits form a cycle: ";
  for (const LaneId at : way) text += fmt::format("{} waits for ", all_.name(head(at)));
  return text + "the first";
}

// The lanes whose flag nobody is left to raise, and those that wait for each other, come first: there it starts.
void Run::report(Findings& findings) const {
  std::vector<LaneId> stuck;
  for (LaneId lane = 0; lane < static_cast<LaneId>(all_.lanes().size()); ++lane) {
    if (is_stuck(lane)) stuck.push_back(lane);
  }
  if (!stuck.empty()) {
    const std::vector<Cause> why = causes();
    const std::vector<bool> cycle = on_cycle(why);
    std::stable_partition(stuck.begin(), stuck.end(),
                          [&](LaneId lane) { return why[index(lane)].lane == kNoLane || cycle[index(lane)]; });
    for (const LaneId lane : stuck) {
      findings.add(ViolationKind::kDeadlock, all_.place(head(lane)),
                   [&] { return stuck_text(lane, why[index(lane)]) + cycle_text(lane, why); });
    }
  }
  for (std::int32_t rank = 0; rank < all_.world(); ++rank) {
    const std::optional<Blocked> blocked = first_unmet(rank, all_.completion(rank));
    if (!blocked) continue;
    findings.add(ViolationKind::kDeadlock, {rank}, [&] {
      return fmt::format("completion of rank {} never comes: it waits for {}, wanted {}, seen {}", rank,
                         describe_flag(all_.plan(), rank, blocked->flag), blocked->wanted,
                         raised_[all_.flag_id(rank, blocked->flag)]);
    });
  }
}

}  // namespace

std::vector<TaskId> run_plan(const Enumeration& all, Knowledge& knowledge, Findings& findings) {
  Run run(all, knowledge);
  std::vector<TaskId> order = run.run();
  run.report(findings);
  return order;
}

}  // namespace mkernel
