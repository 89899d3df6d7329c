// Damage done to plans of ring_attention_backward: each kind must be found, as one of the kinds of violation that it
// is.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plan/test_attention_spec.h"
#include "verify/test_attention_damage.h"

namespace mkernel {
namespace {

using enum ViolationKind;
using test::AttentionDamage;
using test::expect_caught;
using test::has;
using test::messages;
using test::text_of;

constexpr std::int64_t kDim = 8;

const RingAttentionBackwardPlan& ring_of(const MutatedSource& source) { return source.plan().backward(); }
std::int64_t room(const MutatedSource& source) { return ring_of(source).chunk_room; }
bool few_slots(const MutatedSource& source) { return source.plan().spec().attention.slot_rounds > 0; }

bool meets(const Task& task) { return task.action == Action::kAttendBackward && task.length > 0; }
bool has_keys(const Task& task) { return task.action == Action::kAttendBackward && task.key_rows > 0; }
bool has_queries(const Task& task) { return task.action == Action::kAttendBackward && task.block.rows > 0; }
bool copies(const Task& task) { return task.action == Action::kCopy && task.length > 0; }
bool adds_node(const Task& task) { return task.action == Action::kReduce && task.source == Source::kNode; }
bool adds_rail(const Task& task) { return task.action == Action::kReduce && task.source == Source::kRail; }
bool puts_keys(const Task& task) { return task.action == Action::kPut && task.src == Buffer::kKv && task.length > 0; }
bool puts_sums(const Task& task) {
  return task.action == Action::kPut && task.src == Buffer::kNodePartial && task.length > 0;
}
// Whether the plan moves all chunks and adds all parts, whatever they are.
bool all_seen(const MutatedSource& source) { return !source.plan().spec().attention.mask.causal; }

std::vector<AttentionDamage> damages() {
  std::vector<AttentionDamage> list;
  const auto add = [&](const char* name, std::vector<ViolationKind> kinds, AttentionDamage::Apply apply) {
    list.push_back({name, std::move(kinds), std::move(apply)});
  };

  // Flags that are missing.
  add("a_credit_is_dropped", {kUnbalanced}, [](const MutatedSource&, const Place&, Task& task) {
    if (!adds_node(task) || task.signals[1].reach == Reach::kNobody) return false;
    task.signals[1] = {};
    return true;
  });
  add("a_part_is_not_announced", {kUnbalanced}, [](const MutatedSource& source, const Place&, Task& task) {
    if (task.action != Action::kAttendBackward || task.park_keys || source.plan().topo().world() == 1) return false;
    task.signals[1] = {};
    return true;
  });
  add("a_part_is_announced_to_another_gpu", {kUnbalanced}, [](const MutatedSource& source, const Place&, Task& task) {
    const Topology& topo = source.plan().topo();
    if (task.action != Action::kAttendBackward || task.park_keys || topo.gpus == 1) return false;
    task.peer = topo.rank_of(topo.node_of(task.peer), (topo.gpu_of(task.peer) + 1) % topo.gpus);
    return true;
  });
  add("a_meeting_is_not_announced", {kUnbalanced}, [](const MutatedSource&, const Place&, Task& task) {
    if (task.action != Action::kAttendBackward || task.signals[0].reach == Reach::kNobody) return false;
    task.signals[0] = {};
    return true;
  });
  add("a_sum_of_the_node_is_not_announced", {kUnbalanced}, [](const MutatedSource& source, const Place&, Task& task) {
    if (!adds_node(task) || source.plan().topo().nodes == 1) return false;
    task.signals[0] = {};
    return true;
  });
  add("a_sum_arrives_without_its_stamp", {kUnbalanced}, [](const MutatedSource&, const Place&, Task& task) {
    if (!puts_sums(task)) return false;
    task.signals[0] = {};
    return true;
  });
  add("a_grant_is_dropped", {kUnbalanced}, [](const MutatedSource& source, const Place& place, Task& task) {
    if (place.role != Role::kSend || !few_slots(source) || task.src != Buffer::kKv || task.waits[1].span != 0 ||
        place.lane < source.plan().topo().nodes - 1) {
      return false;
    }
    task.signals[0] = {};
    return true;
  });

  // Waits that are missing.
  add("a_slot_is_filled_without_credit", {kOverwrite}, [](const MutatedSource&, const Place&, Task& task) {
    if (!copies(task) || is_workspace(task.src) || task.waits[0].span == 0) return false;
    task.waits[0] = {};
    return true;
  });
  // What overtakes a write is found as one that reads the wrong one.
  add("a_slot_of_another_node_is_filled_without_grant", {kOverwrite, kUnordered},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!puts_keys(task) || task.waits[1].span == 0) return false;
        task.waits[1] = {};
        return true;
      });
  add("parts_go_where_others_are_still_added", {kOverwrite}, [](const MutatedSource& source, const Place&, Task& task) {
    // Own keys need no copy, so that only the credit says that the place of their parts is free.
    if (!has_keys(task) || task.src != Buffer::kK || task.resume_keys || task.waits[0].span == 0) return false;
    // With two slots a chain through the sums of queries may say it too.
    if (source.plan().spec().attention.slot_rounds != 1) return false;
    task.waits[0] = {};
    return true;
  });
  add("the_network_reads_before_the_chunk_is_staged", {kUnordered}, [](const MutatedSource&, const Place&, Task& task) {
    if (!puts_keys(task)) return false;
    task.waits[0] = {};
    return true;
  });
  add("a_chunk_is_handed_on_before_it_comes", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!copies(task) || !is_workspace(task.src)) return false;
        task.waits[0] = {};
        task.waits[1] = {};
        return true;
      });
  add("keys_are_read_before_they_come", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!meets(task) || task.resume_keys || task.src != Buffer::kKv) return false;
        task.waits[0] = {};
        return true;
      });
  add("sums_of_keys_are_taken_before_they_are_left", {kUnordered}, [](const MutatedSource&, const Place&, Task& task) {
    if (!has_keys(task) || !task.resume_keys) return false;
    task.waits[0] = {};
    return true;
  });
  add("sums_of_queries_are_taken_before_they_are_left", {kUnordered},
      [](const MutatedSource& source, const Place&, Task& task) {
        // With few slots the keys come only when every tile has met those of a round before.
        if (!has_queries(task) || !task.resume || few_slots(source)) return false;
        task.waits[1] = {};
        return true;
      });
  add("parts_are_added_before_they_are_there", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!adds_node(task) || task.block.empty()) return false;
        task.waits[0] = {};
        return true;
      });
  add("one_gpu_of_the_node_is_not_waited_for", {kUnbalanced}, [](const MutatedSource&, const Place&, Task& task) {
    if (!adds_node(task) || task.waits[0].count < 2) return false;
    --task.waits[0].count;
    return true;
  });
  add("a_sum_is_sent_before_it_is_made", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!puts_sums(task)) return false;
        task.waits[0] = {};
        return true;
      });
  add("sums_are_added_before_they_arrive", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!adds_rail(task) || task.block.empty() || !all_seen(source)) return false;
        task.waits[1] = {};
        return true;
      });
  add("the_nodes_own_sum_is_not_waited_for", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!adds_rail(task) || task.block.empty() || !all_seen(source)) return false;
        task.waits[0] = {};
        return true;
      });

  // Memory that is another's.
  add("a_chunk_goes_into_another_place", {kNeverWritten, kWrongData, kOverwrite, kUnordered, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!copies(task)) return false;
        task.dst_offset += room(source);
        return true;
      });
  add("a_put_goes_into_another_slot", {kNeverWritten, kWrongData, kOverwrite, kUnordered, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!puts_keys(task)) return false;
        task.dst_offset += room(source);
        return true;
      });
  add("values_are_copied_as_keys", {kWrongData}, [](const MutatedSource& source, const Place&, Task& task) {
    if (!copies(task) || task.src != Buffer::kK || !all_seen(source)) return false;
    task.src = Buffer::kV;
    return true;
  });
  add("keys_of_the_next_row_are_taken", {kWrongData, kOutOfBounds, kNeverWritten, kUnordered},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!meets(task)) return false;
        task.src_offset += task.src == Buffer::kK ? 1 : kDim;
        return true;
      });
  add("values_of_the_next_row_are_taken", {kWrongData, kOutOfBounds, kNeverWritten, kUnordered},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!meets(task) || task.src != Buffer::kKv) return false;
        task.value_distance += kDim;
        return true;
      });
  add("keys_are_taken_for_later_ones", {kWrongData}, [](const MutatedSource&, const Place&, Task& task) {
    if (!meets(task)) return false;
    ++task.kv_position;
    return true;
  });
  add("sums_of_keys_go_to_another_tile",
      {kWrongData, kNeverWritten, kWrittenTwice, kUnordered, kOutOfBounds, kOverwrite},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!has_keys(task) || (!task.resume_keys && !task.park_keys)) return false;
        task.key_place += kDim;
        return true;
      });
  add("sums_of_queries_go_to_another_tile",
      {kWrongData, kNeverWritten, kWrittenTwice, kUnordered, kOutOfBounds, kOverwrite},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!has_queries(task) || !task.park || !task.resume) return false;
        const std::int64_t size = ring_of(source).state_elements(source.plan().spec().tiling.bm);
        task.dst_offset = task.dst_offset == 0 ? size : 0;
        return true;
      });
  add("parts_of_the_next_key_are_added", {kWrongData, kNeverWritten, kUnordered, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!adds_node(task) || task.block.empty() || !all_seen(source)) return false;
        task.src_offset += kDim;
        return true;
      });
  add("parts_of_another_chunk_are_added", {kWrongData, kNeverWritten, kUnordered, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!adds_node(task) || task.block.empty() || !all_seen(source)) return false;
        task.src_offset += task.src_offset >= room(source) ? -room(source) : room(source);
        return true;
      });
  add("gradients_of_keys_are_written_as_those_of_values", {kWrittenTwice, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (task.action != Action::kReduce || task.block.empty() || task.dst != Buffer::kDk) return false;
        task.dst = Buffer::kDv;
        return true;
      });
  add("gradients_are_written_to_the_next_row", {kWrittenTwice, kWrongData, kOutOfBounds, kNeverWritten},
      [](const MutatedSource&, const Place&, Task& task) {
        if (task.action != Action::kReduce || task.block.empty() || is_workspace(task.dst)) return false;
        ++task.block.row;
        return true;
      });
  add("a_sum_of_the_node_goes_to_another_chunk", {kWrongData, kNeverWritten, kWrittenTwice, kUnordered, kOverwrite},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!adds_node(task) || task.block.empty() || task.dst != Buffer::kNodePartial || !all_seen(source)) {
          return false;
        }
        task.dst_offset += task.dst_offset >= room(source) ? -room(source) : room(source);
        return true;
      });
  add("a_sum_arrives_in_anothers_place",
      {kWrongData, kNeverWritten, kWrittenTwice, kUnordered, kOverwrite, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!puts_sums(task) || source.plan().buffer_elements(Buffer::kArrival) == room(source)) return false;
        task.dst_offset += task.dst_offset >= room(source) ? -room(source) : room(source);
        return true;
      });
  add("another_sum_arrives", {kWrongData, kNeverWritten, kUnordered},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!puts_sums(task) || !all_seen(source)) return false;
        task.src_offset += task.src_offset >= room(source) ? -room(source) : room(source);
        return true;
      });

  // Pairs of tiles that do not meet once.
  add("a_pair_is_left_out", {kWrongData}, [](const MutatedSource&, const Place&, Task& task) {
    if (!meets(task)) return false;
    task.length = 0;
    return true;
  });
  add("a_key_is_left_out", {kWrongData, kNeverWritten}, [](const MutatedSource&, const Place&, Task& task) {
    if (!meets(task) || task.key_rows == 1) return false;
    task.length -= kDim;
    --task.key_rows;
    return true;
  });
  add("queries_meet_keys_again", {kWrongData}, [](const MutatedSource& source, const Place& place, Task& task) {
    if (!meets(task) || !task.resume_keys) return false;
    const std::int64_t before = place.index - ring_of(source).tiles();
    const Task other = source.task(place.rank, place.role, place.lane, before);
    if (!meets(other) || other.block == task.block) return false;
    task.block = other.block;
    return true;
  });
  add("sums_of_queries_begin_again", {kWrongData, kWrittenTwice}, [](const MutatedSource&, const Place&, Task& task) {
    if (!has_queries(task) || !task.resume) return false;
    task.resume = false;
    return true;
  });
  add("sums_of_queries_end_early", {kWrittenTwice, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!has_queries(task) || !task.park) return false;
        task.park = false;
        return true;
      });
  add("sums_of_keys_begin_again", {kWrongData, kWrittenTwice, kOverwrite},
      [](const MutatedSource& source, const Place& place, Task& task) {
        // Where nothing has been added so far, nothing is lost.
        if (!has_keys(task) || !task.resume_keys) return false;
        const std::int64_t before = place.index - ring_of(source).tiles();
        if (!meets(source.task(place.rank, place.role, place.lane, before))) return false;
        task.resume_keys = false;
        return true;
      });
  add("sums_of_keys_end_early", {kWrittenTwice, kNeverWritten, kWrongData, kOverwrite},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!has_keys(task) || !task.park_keys) return false;
        task.park_keys = false;
        return true;
      });
  add("queries_of_another_head_come", {kWrongData, kOutOfBounds, kNeverWritten, kWrittenTwice},
      [](const MutatedSource& source, const Place& place, Task& task) {
        if (!meets(task)) return false;
        const std::int64_t tokens = source.plan().spec().attention.q_split(source.plan().topo()).tokens(place.rank);
        task.block.row += tokens;
        return true;
      });

  // The network, and what no plan does.
  add("a_put_sends_a_token_less", {kNetwork}, [](const MutatedSource&, const Place&, Task& task) {
    if (!puts_keys(task) && !puts_sums(task)) return false;
    task.length -= kDim;
    return true;
  });
  add("a_sum_leaves_its_rail", {kNetwork}, [](const MutatedSource& source, const Place&, Task& task) {
    const Topology& topo = source.plan().topo();
    if (!puts_sums(task) || topo.gpus == 1) return false;
    task.peer = topo.rank_of(topo.node_of(task.peer), (topo.gpu_of(task.peer) + 1) % topo.gpus);
    return true;
  });
  add("a_sum_that_nobody_has_made_is_sent", {kNetwork, kNeverWritten},
      [](const MutatedSource&, const Place&, Task& task) {
        if (task.action != Action::kPut || task.src != Buffer::kNodePartial || task.length > 0) return false;
        task.length = kDim;
        return true;
      });
  add("keys_are_folded_in", {kMalformed}, [](const MutatedSource&, const Place&, Task& task) {
    if (!meets(task)) return false;
    task.action = Action::kAttend;
    return true;
  });
  add("gradients_of_keys_are_copied", {kMalformed}, [](const MutatedSource&, const Place&, Task& task) {
    if (!copies(task)) return false;
    task.dst = Buffer::kPartial;
    return true;
  });
  return list;
}

std::vector<PlanSpec> specs() {
  std::vector<PlanSpec> result;
  for (const Topology topo : {Topology{1, 3}, Topology{2, 1}, Topology{3, 1}, Topology{2, 2}, Topology{3, 2}}) {
    AttentionSpec few;
    few.heads = 2;
    few.slot_rounds = 1;
    result.push_back(test::make_backward_spec(topo, topo.world() * 12 + 1, few));
    few.slot_rounds = 2;
    few.kv_heads = 2;
    few.mask.causal = true;
    result.push_back(test::make_backward_spec(topo, topo.world() * 17, few));
    AttentionSpec all;
    all.zigzag = all.mask.causal = true;
    result.push_back(test::make_backward_spec(topo, topo.world() * 20 + 3, all));
    AttentionSpec full;
    full.heads = 2;
    full.kv_heads = 2;
    result.push_back(test::make_backward_spec(topo, topo.world() * 11, full));
  }
  return result;
}

class BackwardMutation : public testing::TestWithParam<AttentionDamage> {};

TEST_P(BackwardMutation, IsCaught) { expect_caught(GetParam(), specs()); }

INSTANTIATE_TEST_SUITE_P(Plans, BackwardMutation, testing::ValuesIn(damages()),
                         [](const testing::TestParamInfo<AttentionDamage>& damage) { return damage.param.name; });

TEST(BackwardPlanDamage, TheUndamagedPlansAreProved) {
  for (const PlanSpec& spec : specs()) {
    const VerifyReport report = verify(MutatedSource(spec));
    EXPECT_TRUE(report.ok()) << text_of(spec) << messages(report);
  }
}

// One place for the sums of all foreign chunks, as if the network read them at once.
TEST(BackwardPlanDamage, ASumThatIsMadeWhereTheNetworkMayStillReadIsCaught) {
  for (const Topology topo : {Topology{2, 1}, Topology{2, 2}, Topology{3, 1}}) {
    MutatedSource source(test::make_backward_spec(topo, topo.world() * 12));
    const RingAttentionBackwardPlan& ring = ring_of(source);
    ASSERT_GT(ring.chunks, 1);
    const std::int32_t lane = ring.ring_lanes(Role::kIntra);
    for (std::int64_t i = 0; i < source.count(0, Role::kIntra, lane); ++i) {
      Task task = source.at({0, Role::kIntra, lane, i});
      task.dst_offset %= ring.chunk_room;
      source.set_task({0, Role::kIntra, lane, i}, task);
    }
    for (std::int32_t step = 0; step < topo.nodes - 1; ++step) {
      for (std::int64_t c = 0; c < ring.chunks; ++c) {
        const Place place{0, Role::kSend, ring.ring_lanes(Role::kSend) + step, c};
        Task task = source.at(place);
        task.src_offset = 0;
        source.set_task(place, task);
      }
    }
    const VerifyReport report = verify(source);
    EXPECT_TRUE(has(report, kOverwrite) || has(report, kUnordered)) << messages(report);
    EXPECT_FALSE(has(report, kUnbalanced) || has(report, kDeadlock)) << messages(report);
  }
}

// The sums of a tile of queries pass from step to step: the last step first is a circle.
TEST(BackwardPlanDamage, StepsInTheWrongOrderAreADeadlock) {
  MutatedSource source(test::make_backward_spec({2, 2}, 48));
  const RingAttentionBackwardPlan& ring = ring_of(source);
  for (std::int64_t i = 0; i < ring.step_tasks(); ++i) {
    const Place first{1, Role::kCompute, 0, i};
    const Place last{1, Role::kCompute, 0, i + (ring.steps() - 1) * ring.step_tasks()};
    const Task task = source.at(first);
    source.set_task(first, source.at(last));
    source.set_task(last, task);
  }
  EXPECT_TRUE(has(verify(source), kDeadlock));
}

}  // namespace
}  // namespace mkernel
