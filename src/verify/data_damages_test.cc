// Damage to what tasks read, write and send.
#include "verify/damages.h"

namespace mkernel {

std::vector<Damage> data_damages() {
  using enum ViolationKind;
  std::vector<Damage> list;
  list.push_back({"a_tile_is_written_twice_and_another_never",
                  {kWrittenTwice},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const std::optional<Task> other = sibling(source, place, task);
                    if (!moves_data(task) || !other || task.action == Action::kPut) return false;
                    task.block = other->block;
                    task.src_offset = other->src_offset;
                    task.arrival_offset = other->arrival_offset;
                    task.dst_offset = other->dst_offset;
                    task.length = other->length;
                    return true;
                  }});
  list.push_back(
      {"a_tile_is_never_written", {kNeverWritten}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
         if (!moves_data(task) || task.action == Action::kPut || task.keep_result) return false;
         task.dst_reach = Reach::kNobody;
         return true;
       }});
  list.push_back({"a_result_is_not_kept_for_the_network",
                  {kNeverWritten},
                  kReduce,
                  "they send no results",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (!task.keep_result || !moves_data(task)) return false;
                    task.keep_result = false;
                    return true;
                  }});
  list.push_back({"data_for_several_gpus_goes_to_one_only",
                  {kNeverWritten},
                  kGather | kReduce,
                  "gemm_reduce_scatter writes own memory only",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const Topology& topo = source.plan().topo();
                    int reached = 0;
                    for_each_rank(topo, place.rank, task.dst_reach, task.peer, [&](std::int32_t) { ++reached; });
                    if (reached < 2 || !moves_data(task)) return false;
                    task.dst_reach = Reach::kRank;
                    task.peer = topo.rank_of(topo.node_of(place.rank), topo.gpu_of(place.rank) == 0 ? 1 : 0);
                    return true;
                  }});
  list.push_back({"a_product_takes_rows_of_another_tile",
                  {kWrongData},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const std::optional<Task> other = sibling(source, place, task);
                    if (!multiplies(source, place, task) || !other || other->src_offset == task.src_offset ||
                        other->block.rows < task.block.rows) {
                      return false;
                    }
                    task.src_offset = other->src_offset;
                    return true;
                  }});
  list.push_back({"a_product_takes_rows_one_too_far_up",
                  {kWrongData},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    if (!multiplies(source, place, task) || task.src_offset == 0) return false;
                    --task.src_offset;
                    return true;
                  }});
  list.push_back({"a_sum_takes_another_tile",
                  {kWrongData, kOutOfBounds},
                  kSums,
                  "all_gather_gemm adds nothing",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const std::optional<Task> other = sibling(source, place, task);
                    if (task.action != Action::kReduce || !moves_data(task) || !other) return false;
                    task.src_offset = other->src_offset;
                    return true;
                  }});
  list.push_back({"a_sum_takes_the_same_arrival_twice",
                  {kWrongData},
                  kSums,
                  "all_gather_gemm adds nothing",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (task.source != Source::kRail || !moves_data(task) || source.plan().topo().nodes < 3) {
                      return false;
                    }
                    task.arrival_stride = 0;
                    return true;
                  }});
  list.push_back({"a_sum_takes_its_arrivals_in_another_order",
                  {kWrongData},
                  kSums,
                  "all_gather_gemm adds nothing",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (task.source != Source::kRail || !moves_data(task) || source.plan().topo().nodes < 3) {
                      return false;
                    }
                    task.arrival_offset += (source.plan().topo().nodes - 2) * task.arrival_stride;
                    task.arrival_stride = -task.arrival_stride;
                    return true;
                  }});
  list.push_back({"a_sum_takes_the_rail_for_the_node",
                  {kWrongData, kOutOfBounds},
                  kSums,
                  "all_gather_gemm adds nothing",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.source != Source::kNode || !moves_data(task)) return false;
                    task.source = Source::kRail;
                    return true;
                  }});
  list.push_back({"a_result_is_copied_from_another_owner",
                  {kWrongData},
                  kReduce,
                  "they send no results",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    if (task.action != Action::kCopy || task.dst != Buffer::kC || !moves_data(task)) return false;
                    // A tile of the next lane belongs to the next owner node.
                    const std::int32_t lanes = source.plan().lanes(Role::kRecv);
                    const std::int32_t lane = place.lane + 1 < lanes ? place.lane + 1 : 1;
                    for (std::int64_t i = 0; lane != place.lane && i < source.count(place.rank, Role::kRecv, lane);
                         ++i) {
                      const Task other = source.task(place.rank, Role::kRecv, lane, i);
                      if (other.length != task.length) continue;
                      task.src_offset = other.src_offset;
                      return true;
                    }
                    return false;
                  }});
  list.push_back({"rows_of_a_are_copied_from_one_row_up",
                  {kWrongData},
                  kGather,
                  "they do not move A",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (!moves_data(task) || task.src != Buffer::kA || task.action != Action::kCopy) return false;
                    if (task.src_offset == 0) return false;
                    --task.src_offset;
                    return true;
                  }});
  list.push_back({"a_destination_is_that_of_another_task",
                  {kWrittenTwice, kOutOfBounds},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const std::optional<Task> other = sibling(source, place, task);
                    if (!moves_data(task) || !other || !is_workspace(task.dst) ||
                        other->dst_offset == task.dst_offset) {
                      return false;
                    }
                    task.dst_offset = other->dst_offset;
                    return true;
                  }});
  list.push_back({"a_destination_is_one_element_off",
                  {kWrittenTwice, kOutOfBounds, kNeverWritten},
                  kAllOps,
                  "",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (!moves_data(task) || !is_workspace(task.dst)) return false;
                    ++task.dst_offset;
                    return true;
                  }});
  list.push_back({"a_tile_leaves_its_matrix",
                  {kOutOfBounds},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    if (!moves_data(task) || task.dst != Buffer::kC) return false;
                    task.block.col = source.plan().c_extent(place.rank).cols - task.block.cols + 1;
                    return true;
                  }});
  list.push_back({"a_product_is_stored_as_the_sum_of_the_node",
                  {kWrongData, kOutOfBounds},
                  kSums,
                  "all_gather_gemm has no partial sums",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (task.action != Action::kGemm || task.dst != Buffer::kPartial || !moves_data(task)) return false;
                    task.dst = source.plan().topo().nodes > 1 ? Buffer::kNodePartial : Buffer::kC;
                    return true;
                  }});
  return list;
}

std::vector<Damage> put_damages() {
  using enum ViolationKind;
  std::vector<Damage> list;
  list.push_back({"a_put_goes_to_another_node",
                  {kUnbalanced},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const Topology& topo = source.plan().topo();
                    if (task.action != Action::kPut || topo.nodes < 3) return false;
                    std::int32_t node = (topo.node_of(task.peer) + 1) % topo.nodes;
                    if (node == topo.node_of(place.rank)) node = (node + 1) % topo.nodes;
                    task.peer = topo.rank_of(node, topo.gpu_of(place.rank));
                    return true;
                  }});
  list.push_back(
      {"a_put_leaves_its_rail", {kNetwork}, kAllOps, "", [](const MutatedSource& source, const Place&, Task& task) {
         const Topology& topo = source.plan().topo();
         if (task.action != Action::kPut || topo.gpus < 2) return false;
         task.peer = topo.rank_of(topo.node_of(task.peer), (topo.gpu_of(task.peer) + 1) % topo.gpus);
         return true;
       }});
  list.push_back(
      {"a_put_stays_in_its_node", {kNetwork}, kAllOps, "", [](const MutatedSource&, const Place& place, Task& task) {
         if (task.action != Action::kPut) return false;
         task.peer = place.rank;
         return true;
       }});
  list.push_back(
      {"a_put_names_no_rank", {kMalformed}, kAllOps, "", [](const MutatedSource& source, const Place&, Task& task) {
         if (task.action != Action::kPut) return false;
         task.peer = source.plan().topo().world();
         return true;
       }});
  list.push_back(
      {"a_put_is_one_element_short", {kNetwork}, kAllOps, "", [](const MutatedSource&, const Place&, Task& task) {
         if (task.action != Action::kPut || task.length == 0) return false;
         --task.length;
         return true;
       }});
  list.push_back({"a_put_leaves_its_last_element_behind",
                  {kNeverWritten},
                  kAllOps,
                  "",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.action != Action::kPut || task.length == 0) return false;
                    --task.length;
                    return true;
                  }});
  list.push_back({"a_put_is_one_element_long",
                  {kNetwork, kOutOfBounds},
                  kAllOps,
                  "",
                  [](const MutatedSource&, const Place&, Task& task) {
                    if (task.action != Action::kPut || task.length == 0) return false;
                    ++task.length;
                    return true;
                  }});
  list.push_back({"a_put_takes_its_bytes_from_another_chunk",
                  {kWrongData},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const std::optional<Task> other = sibling(source, place, task);
                    if (task.action != Action::kPut || task.length == 0 || !other || other->length < task.length) {
                      return false;
                    }
                    task.src_offset = other->src_offset;
                    return true;
                  }});
  list.push_back({"a_put_uses_the_arrival_slot_of_another_node",
                  {kWrittenTwice},
                  kSums,
                  "all_gather_gemm has one place per row and no slots",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const Topology& topo = source.plan().topo();
                    if (task.dst != Buffer::kArrival || task.length == 0 || topo.nodes < 3) return false;
                    // The slot that the other sender of this chunk uses.
                    for (std::int32_t node = 0; node < topo.nodes; ++node) {
                      const std::int32_t rank = topo.rank_of(node, topo.gpu_of(place.rank));
                      if (rank == place.rank || rank == task.peer) continue;
                      for (std::int32_t lane = 0; lane < source.plan().lanes(Role::kSend); ++lane) {
                        if (place.index >= source.count(rank, Role::kSend, lane)) continue;
                        const Task other = source.task(rank, Role::kSend, lane, place.index);
                        if (other.peer != task.peer || other.dst != task.dst) continue;
                        task.dst_offset = other.dst_offset;
                        return true;
                      }
                    }
                    return false;
                  }});
  list.push_back({"a_put_moves_wide_sums_among_the_results",
                  {kWrongData},
                  kReduce,
                  "they send no results",
                  [](const MutatedSource& source, const Place&, Task& task) {
                    if (task.dst != Buffer::kArrival || task.length == 0 || task.action != Action::kPut ||
                        source.plan().buffer_elements(Buffer::kResult) == 0 ||
                        source.plan().buffer_dtype(Buffer::kResult) == source.plan().buffer_dtype(Buffer::kArrival)) {
                      return false;
                    }
                    task.dst = Buffer::kResult;
                    task.dst_offset = 0;
                    return true;
                  }});
  list.push_back({"an_sm_writes_to_another_node",
                  {kMalformed},
                  kAllOps,
                  "",
                  [](const MutatedSource& source, const Place& place, Task& task) {
                    const Topology& topo = source.plan().topo();
                    if (topo.nodes == 1 || task.action == Action::kNone || task.action == Action::kPut) return false;
                    task.peer = topo.rank_of((topo.node_of(place.rank) + 1) % topo.nodes, topo.gpu_of(place.rank));
                    task.dst_reach = Reach::kRank;
                    return true;
                  }});
  list.push_back({"an_sm_puts", {kMalformed}, kAllOps, "", [](const MutatedSource&, const Place& place, Task& task) {
                    if (place.role == Role::kSend || task.action == Action::kNone) return false;
                    task.action = Action::kPut;
                    return true;
                  }});
  return list;
}

}  // namespace mkernel
