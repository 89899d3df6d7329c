#include "verify/enumeration.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/check.h"
#include "plan/print.h"

namespace mkernel {
namespace {

constexpr std::int64_t kMaxLaneTasks = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxSendIds = std::int64_t{1} << 24;  // the task field of a command record

bool blank(const Task& task) {
  return task.source == Source::kNone && task.dst_reach == Reach::kNobody && !task.keep_result &&
         task.waits[0].span == 0 && task.waits[1].span == 0 && task.signals[0].reach == Reach::kNobody &&
         task.signals[1].reach == Reach::kNobody;
}

bool fields_exist(const Task& task) {
  return task.action <= Action::kAttendBackward && task.source <= Source::kRail && task.src <= Buffer::kKeyState &&
         task.dst <= Buffer::kKeyState && task.key_rows >= 0 && task.dst_reach <= Reach::kRank &&
         task.signals[0].reach <= Reach::kRank && task.signals[1].reach <= Reach::kRank && task.block.rows >= 0 &&
         task.block.cols >= 0 && task.length >= 0;
}

bool names_peer(const Task& task) {
  return task.action == Action::kPut || task.dst_reach == Reach::kRank || task.signals[0].reach == Reach::kRank ||
         task.signals[1].reach == Reach::kRank;
}

// What is wrong with a task whatever its numbers are; empty when nothing is.
struct Fault {
  ViolationKind kind = ViolationKind::kMalformed;
  std::string_view text;
};

Fault fault_of_put(const Topology& topo, std::int32_t rank, const Task& task) {
  if (task.source != Source::kOwn || !is_workspace(task.src) || !is_workspace(task.dst) ||
      task.dst_reach != Reach::kRank || task.keep_result) {
    return {ViolationKind::kMalformed, "a put moves own workspace into the workspace of its peer"};
  }
  if (topo.node_of(task.peer) == topo.node_of(rank)) {
    return {ViolationKind::kNetwork, "a put within a node: NVLink does that"};
  }
  if (topo.gpu_of(task.peer) != topo.gpu_of(rank)) {
    return {ViolationKind::kNetwork, "a put that leaves its rail: the peer has another GPU index"};
  }
  for (const Signal& signal : task.signals) {
    if (signal.reach != Reach::kNobody && (signal.reach != Reach::kRank || !signal.stamp || signal.ranks != 1)) {
      return {ViolationKind::kMalformed, "a put raises stamps of its peer only: the network cannot add"};
    }
  }
  return {};
}

Fault fault_of_local(Op op, Role role, const Topology& topo, std::int32_t rank, const Task& task) {
  if (names_peer(task) && topo.node_of(task.peer) != topo.node_of(rank)) {
    return {ViolationKind::kMalformed, "it reaches another node without a put"};
  }
  const bool gradient = task.dst == Buffer::kDk || task.dst == Buffer::kDv;
  const bool tile_out =
      gradient ? op == Op::kRingAttentionBackward
               : task.dst == Buffer::kC || task.dst == Buffer::kPartial || task.dst == Buffer::kNodePartial;
  if ((task.action == Action::kAttend) != (op == Op::kRingAttention && role == Role::kCompute)) {
    return {ViolationKind::kMalformed, "ring_attention computes by folding in keys, and the others never do"};
  }
  if ((task.action == Action::kAttendBackward) != (op == Op::kRingAttentionBackward && role == Role::kCompute)) {
    return {ViolationKind::kMalformed, "the backward computes by letting tiles meet, and the others never do"};
  }
  if (task.keep_result && (task.action != Action::kReduce || task.dst != Buffer::kC)) {
    return {ViolationKind::kMalformed, "only a sum that goes into C can be kept as a result too"};
  }
  switch (task.action) {
    case Action::kGemm:
      if (task.source == Source::kOwn && (task.src == Buffer::kA || task.src == Buffer::kGather) && tile_out) return {};
      return {ViolationKind::kMalformed, "a product takes A or gathered A and goes into C or partial sums"};
    case Action::kReduce:
      if ((task.source == Source::kNode || task.source == Source::kRail) && is_workspace(task.src) && tile_out)
        return {};
      return {ViolationKind::kMalformed,
              "a sum takes workspace of the node or the rail and goes into C or partial sums"};
    case Action::kAttend:
      if (task.source == Source::kOwn && (task.src == Buffer::kK || task.src == Buffer::kKv) &&
          task.dst == Buffer::kO && task.dst_reach == Reach::kSelf) {
        return {};
      }
      return {ViolationKind::kMalformed, "folding takes own keys or chunks of keys and goes into own O"};
    case Action::kAttendBackward:
      if (task.source == Source::kOwn && (task.src == Buffer::kK || task.src == Buffer::kKv) &&
          task.dst == Buffer::kDq && task.dst_reach == Reach::kSelf) {
        return {};
      }
      return {ViolationKind::kMalformed,
              "queries meet own keys or chunks of keys, and their gradient goes into own dQ"};
    default: break;
  }
  if (attends(op)) {
    const bool keys = task.src == Buffer::kK || task.src == Buffer::kV || task.src == Buffer::kKv;
    if (task.source == Source::kOwn && keys && task.dst == Buffer::kKv) return {};
    return {ViolationKind::kMalformed, "a copy takes own keys, values or chunks into chunks"};
  }
  const bool from_a = task.src == Buffer::kA && task.dst == Buffer::kGather;
  const bool from_heap = is_workspace(task.src) && (is_workspace(task.dst) || task.dst == Buffer::kC);
  if (task.source == Source::kOwn && (from_a || from_heap)) return {};
  return {ViolationKind::kMalformed, "a copy takes own A into gathered A, or own workspace into workspace or C"};
}

Fault fault_of(Op op, const Topology& topo, std::int32_t rank, Role role, const Task& task) {
  if (!fields_exist(task)) return {ViolationKind::kMalformed, "a field has a value that does not exist"};
  if (task.action == Action::kNone) {
    if (blank(task)) return {};
    return {ViolationKind::kMalformed, "a slot without work must not wait, signal or move anything"};
  }
  if ((task.action == Action::kPut) != (role == Role::kSend)) {
    return {ViolationKind::kMalformed, "puts stand in send lanes, and send lanes hold nothing else"};
  }
  if (names_peer(task) && (task.peer < 0 || task.peer >= topo.world())) {
    return {ViolationKind::kMalformed, "its peer is not a rank"};
  }
  for (const Signal& signal : task.signals) {
    if (signal.reach != Reach::kRank) continue;
    if (signal.ranks < 1 || topo.gpu_of(task.peer) + signal.ranks > topo.gpus) {
      return {ViolationKind::kMalformed, "it signals GPUs that the node does not have"};
    }
  }
  return task.action == Action::kPut ? fault_of_put(topo, rank, task) : fault_of_local(op, role, topo, rank, task);
}

bool within(const Plan& plan, const Access& access) {
  if (access.workspace()) {
    return access.begin >= 0 && access.begin <= access.end && access.end <= plan.buffer_elements(access.buffer);
  }
  if (access.empty()) return true;
  const Plan::Extent extent = plan.extent(access.buffer, access.rank);
  const Block& block = access.block;
  return block.row >= 0 && block.col >= 0 && block.row + block.rows <= extent.rows &&
         block.col + block.cols <= extent.cols;
}

std::string action_name(const Plan& plan, const Place& place, const Task& task) {
  return fmt::format("{} ({})", task_name(place.rank, place.role, place.lane, place.index),
                     describe_action(plan, place.rank, task));
}

}  // namespace

Enumeration::Enumeration(const PlanSource& source, Findings& findings) : plan_(source.plan()) {
  std::int64_t tasks = 0;
  for (std::int32_t rank = 0; rank < world(); ++rank) {
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < plan_.lanes(role); ++lane) {
        tasks += max_of(0, source.count(rank, role, lane));
      }
    }
  }
  MK_CHECK_OP(tasks, <, std::int64_t{kNoTask});
  tasks_.reserve(static_cast<std::size_t>(tasks));
  for (std::int32_t rank = 0; rank < world(); ++rank) {
    first_task_.push_back(static_cast<TaskId>(tasks_.size()));
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < plan_.lanes(role); ++lane) add_lane(source, rank, role, lane, findings);
    }
    Task completion;
    completion.waits[0] = source.completion(rank);
    check_flags({rank}, completion, findings);
    completions_.push_back(completion.waits[0]);
  }
  first_task_.push_back(static_cast<TaskId>(tasks_.size()));
}

void Enumeration::add_lane(const PlanSource& source, std::int32_t rank, Role role, std::int32_t lane,
                           Findings& findings) {
  std::int64_t count = source.count(rank, role, lane);
  if (count < 0 || count > kMaxLaneTasks) {
    findings.add(ViolationKind::kMalformed, {rank, role, lane, -1}, [&] {
      return fmt::format("rank {} lane {}: {} tasks; 0 to {} are possible", rank, lane, count, kMaxLaneTasks);
    });
    count = 0;
  }
  if (role == Role::kSend && count > 0 && send_id(plan_, {lane, count - 1}) >= kMaxSendIds) {
    findings.add(ViolationKind::kMalformed, {rank, role, lane, count - 1}, [&] {
      return fmt::format("{}: its number does not fit the 24 bits of a command record",
                         task_name(rank, role, lane, count - 1));
    });
  }
  lanes_.push_back({rank, role, lane, static_cast<TaskId>(tasks_.size()), static_cast<TaskId>(count)});
  for (std::int64_t i = 0; i < count; ++i) {
    Task& task = tasks_.emplace_back(source.task(rank, role, lane, i));
    const Place place{rank, role, lane, i};
    if (!check(place, task, findings)) continue;
    check_flags(place, task, findings);
    check_bounds(place, task, findings);
  }
}

// A malformed task is replaced by a slot without work.
bool Enumeration::check(const Place& place, Task& task, Findings& findings) const {
  const Fault fault = fault_of(plan_.spec().op, topo(), place.rank, place.role, task);
  if (fault.text.empty()) return task.action != Action::kNone;
  findings.add(fault.kind, place, [&] { return fmt::format("{}: {}", action_name(plan_, place, task), fault.text); });
  task = Task{};
  return false;
}

// Waits and signals of flags that do not exist are dropped.
void Enumeration::check_flags(const Place& place, Task& task, Findings& findings) const {
  const auto who = [&] {
    return place.index < 0 ? fmt::format("completion of rank {}", place.rank) : action_name(plan_, place, task);
  };
  for (Wait& wait : task.waits) {
    if (wait.span == 0) continue;
    const bool exists = std::int64_t{wait.flag} + wait.span <= std::int64_t{plan_.flag_count()};
    if (!exists) {
      findings.add(ViolationKind::kOutOfBounds, place, [&] {
        return fmt::format("{} waits for flags {}..{} of {}", who(), wait.flag, std::int64_t{wait.flag} + wait.span - 1,
                           plan_.flag_count());
      });
    } else if (wait.count == 0) {
      findings.add(ViolationKind::kMalformed, place,
                   [&] { return fmt::format("{} waits for flag {} to be raised 0 times", who(), wait.flag); });
    } else {
      continue;
    }
    wait = Wait{};
  }
  for (Signal& signal : task.signals) {
    if (signal.reach == Reach::kNobody || signal.flag < plan_.flag_count()) continue;
    findings.add(ViolationKind::kOutOfBounds, place,
                 [&] { return fmt::format("{} raises flag {} of {}", who(), signal.flag, plan_.flag_count()); });
    signal = Signal{};
  }
}

// A task whose memory does not exist keeps its waits and signals and loses its memory.
void Enumeration::check_bounds(const Place& place, Task& task, Findings& findings) const {
  bool good = true;
  const auto check_access = [&](const Access& access) { good = good && within(plan_, access); };
  for_each_read(plan_, place.rank, task, check_access);
  const char* what = good ? "writes" : "reads";
  for_each_write(plan_, place.rank, task, check_access);
  if (good) return;
  findings.add(ViolationKind::kOutOfBounds, place, [&] {
    return fmt::format("{} {} memory that its buffer does not have", action_name(plan_, place, task), what);
  });
  task.source = Source::kNone;
  task.dst_reach = Reach::kNobody;
  task.keep_result = false;
}

const Lane& Enumeration::lane_of(TaskId task) const {
  const auto after =
      std::upper_bound(lanes_.begin(), lanes_.end(), task, [](TaskId id, const Lane& lane) { return id < lane.first; });
  return *(after - 1);
}

Place Enumeration::place(TaskId task) const {
  const Lane& lane = lane_of(task);
  return {lane.rank, lane.role, lane.lane, std::int64_t{task} - lane.first};
}

std::string Enumeration::name(TaskId task) const { return action_name(plan_, place(task), tasks_[task]); }

}  // namespace mkernel
