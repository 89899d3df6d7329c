// Damage to signals and waits.
#include "verify/damages.h"

namespace mkernel {

std::vector<Damage> flag_damages() {
  using enum ViolationKind;
  std::vector<Damage> list;
  list.push_back(
      {"a_signal_is_dropped", {kUnbalanced}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
         if (!signals_any(task)) return false;
         task.signals[0] = {};
         return true;
       }});
  list.push_back({"the_second_signal_is_dropped",
                  {kUnbalanced},
                  kReduce,
                  "their tasks raise one flag only",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.signals[1].reach == Reach::kNobody) return false;
                    task.signals[1] = {};
                    return true;
                  }});
  list.push_back(
      {"a_signal_is_given_twice", {kUnbalanced}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
         if (!signals_any(task) || task.signals[1].reach != Reach::kNobody) return false;
         task.signals[1] = task.signals[0];
         return true;
       }});
  list.push_back({"a_signal_without_data_is_dropped",
                  {kUnbalanced},
                  kAllOps,
                  "",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (!signals_any(task) || moves_data(task)) return false;
                    task.signals[0] = {};
                    return true;
                  }});
  list.push_back({"a_signal_raises_the_next_flag",
                  {kUnbalanced},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (!signals_any(task) || source.plan().flag_count() < 2) return false;
                    task.signals[0].flag = (task.signals[0].flag + 1) % source.plan().flag_count();
                    return true;
                  }});
  list.push_back({"a_signal_raises_a_flag_that_does_not_exist",
                  {kOutOfBounds},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (!signals_any(task)) return false;
                    task.signals[0].flag = source.plan().flag_count();
                    return true;
                  }});
  list.push_back({"a_signal_reaches_only_its_own_rank",
                  {kUnbalanced},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (task.signals[0].reach != Reach::kNode || source.plan().topo().gpus == 1) return false;
                    task.signals[0].reach = Reach::kSelf;
                    return true;
                  }});
  list.push_back({"a_signal_goes_to_another_gpu",
                  {kUnbalanced},
                  kSums,
                  "all_gather_gemm signals whole nodes",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const Topology& topo = source.plan().topo();
                    const Signal& signal = task.signals[0];
                    if (task.action == Action::kPut || signal.reach != Reach::kRank || topo.gpus == 1 ||
                        signal.ranks > 1) {
                      return false;
                    }
                    task.peer = topo.rank_of(topo.node_of(place.rank), (topo.gpu_of(task.peer) + 1) % topo.gpus);
                    return true;
                  }});
  list.push_back({"a_signal_misses_the_last_of_its_gpus",
                  {kUnbalanced},
                  kScatter,
                  "their signals go to one rank or to the node",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.signals[0].reach != Reach::kRank || task.signals[0].ranks < 2) return false;
                    --task.signals[0].ranks;
                    return true;
                  }});
  list.push_back({"a_signal_reaches_gpus_beyond_the_node",
                  {kMalformed},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (task.signals[0].reach != Reach::kRank) return false;
                    task.signals[0].ranks = static_cast<std::uint16_t>(source.plan().topo().gpus + 1);
                    return true;
                  }});
  list.push_back({"a_counter_is_stamped",
                  {kUnbalanced},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    if (!signals_any(task) || task.signals[0].stamp) return false;
                    const std::int32_t rank = task.signals[0].reach == Reach::kRank ? task.peer : place.rank;
                    // A counter raised once per use cannot be told from a stamp.
                    if (source.raises(rank, task.signals[0].flag) < 2) return false;
                    task.signals[0].stamp = true;
                    return true;
                  }});
  list.push_back(
      {"the_network_adds_to_a_counter", {kMalformed}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
         if (task.action != Action::kPut) return false;
         task.signals[0].stamp = false;
         return true;
       }});
  return list;
}

std::vector<Damage> wait_damages() {
  using enum ViolationKind;
  std::vector<Damage> list;
  list.push_back(
      {"a_wait_wants_one_too_few", {kUnbalanced}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
         if (task.waits[0].count < 2) return false;
         --task.waits[0].count;
         return true;
       }});
  list.push_back(
      {"a_wait_wants_one_too_many", {kDeadlock}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
         if (task.waits[0].span != 1) return false;
         ++task.waits[0].count;
         return true;
       }});
  list.push_back({"a_wait_is_dropped", {kUnordered}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
                    if (task.waits[0].span == 0 || !moves_data(task)) return false;
                    task.waits[0] = {};
                    return true;
                  }});
  list.push_back({"the_wait_for_arrivals_is_dropped",
                  {kUnordered},
                  kAllOps,
                  "",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.waits[1].span == 0 || !moves_data(task)) return false;
                    task.waits[1] = {};
                    return true;
                  }});
  list.push_back({"a_wait_for_several_shards_misses_the_last",
                  {kUnordered},
                  kGather,
                  "they wait for all GPUs of a node by one counter",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const Wait& wait = task.waits[0];
                    if (wait.span < 2 || task.action != Action::kGemm || !moves_data(task)) return false;
                    // Own rows are awaited by the other wait. Shared tiles have one flag per shard.
                    if (source.plan().topo().gpus > 1 && task.waits[1].span > 0 &&
                        wait.flag + wait.span - 1 == static_cast<std::uint32_t>(place.rank)) {
                      return false;
                    }
                    --task.waits[0].span;
                    return true;
                  }});
  list.push_back({"a_wait_misses_the_last_of_its_stamps",
                  {kUnordered},
                  kSums,
                  "tasks of all_gather_gemm wait for single stamps",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.waits[1].span < 2 || !moves_data(task)) return false;
                    --task.waits[1].span;
                    return true;
                  }});
  list.push_back({"a_put_does_not_wait", {kUnordered}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
                    if (task.action != Action::kPut || !moves_data(task)) return false;
                    task.waits[0] = {};
                    return true;
                  }});
  list.push_back({"a_task_has_the_wait_of_its_neighbour",
                  {kUnordered},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const std::optional<Task> other = sibling(source, place, task);
                    if (!moves_data(task) || !other || other->waits[0].span == 0 ||
                        other->waits[0].flag == task.waits[0].flag) {
                      return false;
                    }
                    task.waits[0] = other->waits[0];
                    return true;
                  }});
  list.push_back({"a_task_waits_for_itself",
                  {kDeadlock},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const Signal& signal = task.signals[0];
                    if (!reaches_self(signal, task, place.rank)) return false;
                    task.waits[1] = {signal.flag, 1, source.raises(place.rank, signal.flag)};
                    return true;
                  }});
  list.push_back({"a_task_waits_for_a_later_one_of_its_lane",
                  {kDeadlock},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const std::int64_t count = source.count(place.rank, place.role, place.lane);
                    for (std::int64_t i = place.index + 1; i < count; ++i) {
                      const Task later = source.task(place.rank, place.role, place.lane, i);
                      const Signal& signal = later.signals[0];
                      if (task.action == Action::kNone || !reaches_self(signal, later, place.rank)) continue;
                      task.waits[1] = {signal.flag, 1, source.raises(place.rank, signal.flag)};
                      return true;
                    }
                    return false;
                  }});
  list.push_back({"a_wait_names_flags_that_do_not_exist",
                  {kOutOfBounds},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (task.waits[0].span == 0) return false;
                    task.waits[0].span = source.plan().flag_count() - task.waits[0].flag + 1;
                    task.waits[0].count = 1;
                    return true;
                  }});
  list.push_back({"an_empty_slot_waits",
                  {kMalformed},
                  kGather | kReduce,
                  "every slot of gemm_reduce_scatter has work, if only a signal",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.action != Action::kNone) return false;
                    task.waits[0] = {0, 1, 1};
                    return true;
                  }});
  return list;
}

}  // namespace mkernel
