// Damage done to plans of ring_attention: each kind must be found, as one of the kinds of violation that it is.
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

bool attends(const Task& task) { return task.action == Action::kAttend && !task.block.empty(); }
bool folds(const Task& task) { return attends(task) && task.length > 0; }
bool copies(const Task& task) { return task.action == Action::kCopy && task.length > 0; }
bool puts(const Task& task) { return task.action == Action::kPut && task.length > 0; }
std::int64_t room(const MutatedSource& source) { return source.plan().ring_attention().chunk_room; }

std::vector<AttentionDamage> damages() {
  std::vector<AttentionDamage> list;
  const auto add = [&](const char* name, std::vector<ViolationKind> kinds, AttentionDamage::Apply apply) {
    list.push_back({name, std::move(kinds), std::move(apply)});
  };
  add("a_credit_is_dropped", {kUnbalanced}, [](const MutatedSource&, const Place&, Task& task) {
    if (task.action != Action::kAttend || task.signals[1].reach == Reach::kNobody) return false;
    task.signals[1] = {};
    return true;
  });
  add("a_slot_is_filled_without_credit", {kOverwrite}, [](const MutatedSource&, const Place&, Task& task) {
    if (!copies(task) || is_workspace(task.src) || task.waits[0].span == 0) return false;
    task.waits[0] = {};
    return true;
  });
  add("a_slot_of_another_node_is_filled_without_grant", {kOverwrite},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!puts(task) || task.waits[1].span == 0) return false;
        task.waits[1] = {};
        return true;
      });
  add("a_grant_is_dropped", {kUnbalanced}, [](const MutatedSource&, const Place&, Task& task) {
    if (task.action != Action::kPut || task.length > 0 || task.block.cols != kDim || task.waits[1].span != 0 ||
        task.waits[0].count == 1) {
      return false;
    }
    task.signals[0] = {};
    return true;
  });
  add("a_grant_does_not_wait_for_the_readers", {kOverwrite, kUnordered, kUnbalanced},
      [](const MutatedSource& source, const Place& place, Task& task) {
        // A slot that nothing is moved into may be granted at any time.
        const bool moved = !source.plan().spec().attention.mask.causal;
        if (!moved || place.role != Role::kSend || place.lane < source.plan().topo().nodes - 1) return false;
        task.waits[0] = {};
        return true;
      });
  add("a_credit_counts_one_reader_too_few", {kUnbalanced},
      [](const MutatedSource& source, const Place& place, Task& task) {
        if (place.role != Role::kSend || place.lane < source.plan().topo().nodes - 1 || task.waits[0].count < 2) {
          return false;
        }
        --task.waits[0].count;
        return true;
      });
  add("the_network_reads_before_the_chunk_is_staged", {kUnordered}, [](const MutatedSource&, const Place&, Task& task) {
    if (!puts(task)) return false;
    task.waits[0] = {};
    return true;
  });
  add("keys_are_read_before_they_come", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!folds(task) || task.waits[0].span == 0) return false;
        task.waits[0] = {};
        return true;
      });
  add("a_state_is_taken_before_it_is_left", {kUnordered}, [](const MutatedSource& source, const Place&, Task& task) {
    // With few slots the keys come only when every tile has taken in those of a round before.
    if (!attends(task) || !task.resume || source.plan().spec().attention.slot_rounds > 0) return false;
    task.waits[1] = {};
    return true;
  });
  add("a_chunk_is_handed_on_before_it_comes", {kUnordered, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!copies(task) || !is_workspace(task.src)) return false;
        task.waits[0] = {};
        task.waits[1] = {};
        return true;
      });
  add("a_chunk_goes_into_another_place", {kNeverWritten, kWrongData, kOverwrite, kUnordered, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!copies(task)) return false;
        task.dst_offset += room(source);
        return true;
      });
  add("a_put_goes_into_another_slot", {kNeverWritten, kWrongData, kOverwrite, kUnordered, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!puts(task)) return false;
        task.dst_offset += room(source);
        return true;
      });
  add("values_are_copied_as_keys", {kWrongData}, [](const MutatedSource& source, const Place&, Task& task) {
    if (!copies(task) || task.src != Buffer::kK) return false;
    // What no task folds in may be anything.
    if (source.plan().spec().attention.mask.causal) return false;
    task.src = Buffer::kV;
    return true;
  });
  add("keys_of_the_next_row_are_taken", {kWrongData, kOutOfBounds, kNeverWritten, kUnordered},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!folds(task)) return false;
        task.src_offset += task.src == Buffer::kK ? 1 : kDim;
        return true;
      });
  add("keys_are_taken_for_later_ones", {kWrongData}, [](const MutatedSource&, const Place&, Task& task) {
    if (!folds(task)) return false;
    ++task.kv_position;
    return true;
  });
  add("a_key_is_left_out", {kWrongData}, [](const MutatedSource&, const Place&, Task& task) {
    if (!folds(task) || task.length == kDim || task.src != Buffer::kKv) return false;
    task.length -= kDim;
    return true;
  });
  add("a_chunk_is_left_out", {kWrongData}, [](const MutatedSource&, const Place&, Task& task) {
    if (!folds(task)) return false;
    task.length = 0;
    return true;
  });
  add("a_chunk_is_folded_in_again", {kWrongData}, [](const MutatedSource& source, const Place& place, Task& task) {
    const std::int64_t before = place.index - source.plan().ring_attention().tiles;
    if (!folds(task) || before < 0) return false;
    const Task other = source.task(place.rank, place.role, place.lane, before);
    if (other.length == 0) return false;
    task.src = other.src;
    task.src_offset = other.src_offset;
    task.kv_position = other.kv_position;
    task.length = other.length;
    return true;
  });
  add("a_state_goes_to_another_tile", {kWrongData, kNeverWritten, kWrittenTwice, kUnordered, kOutOfBounds},
      [](const MutatedSource& source, const Place&, Task& task) {
        if (!attends(task) || !task.park || !task.resume) return false;
        const RingAttentionPlan& ring = source.plan().ring_attention();
        const std::int64_t size = ring.state_elements(source.plan().spec().tiling.bm);
        if (ring.tiles == 1) return false;
        task.dst_offset = task.dst_offset == 0 ? size : 0;
        return true;
      });
  add("a_tile_begins_again", {kWrongData, kWrittenTwice},
      [](const MutatedSource& source, const Place& place, Task& task) {
        const std::int64_t before = place.index - source.plan().ring_attention().tiles;
        if (!attends(task) || !task.resume || before < 0) return false;
        if (source.task(place.rank, place.role, place.lane, before).length == 0) return false;
        task.resume = false;
        return true;
      });
  add("a_tile_ends_early", {kWrittenTwice, kNeverWritten, kWrongData},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!attends(task) || !task.park) return false;
        task.park = false;
        return true;
      });
  add("a_tile_is_written_elsewhere", {kWrittenTwice, kNeverWritten, kWrongData, kOutOfBounds},
      [](const MutatedSource&, const Place&, Task& task) {
        if (!attends(task) || task.park) return false;
        ++task.block.row;
        return true;
      });
  add("a_put_sends_a_token_less", {kNetwork}, [](const MutatedSource&, const Place&, Task& task) {
    if (!puts(task)) return false;
    task.length -= kDim;
    return true;
  });
  add("a_put_sends_what_nobody_sees", {kNetwork}, [](const MutatedSource& source, const Place& place, Task& task) {
    if (task.action != Action::kPut || task.length > 0 || place.lane >= source.plan().topo().nodes - 1) return false;
    task.length = kDim;
    return true;
  });
  add("a_put_leaves_its_rail", {kNetwork}, [](const MutatedSource& source, const Place&, Task& task) {
    const Topology& topo = source.plan().topo();
    if (task.action != Action::kPut || topo.gpus == 1) return false;
    task.peer = topo.rank_of(topo.node_of(task.peer), (topo.gpu_of(task.peer) + 1) % topo.gpus);
    return true;
  });
  add("matrices_are_multiplied", {kMalformed}, [](const MutatedSource&, const Place&, Task& task) {
    if (!attends(task)) return false;
    task.action = Action::kGemm;
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
    result.push_back(test::make_attention_spec(topo, topo.world() * 12 + 1, few));
    few.slot_rounds = 2;
    few.kv_heads = 2;
    few.mask.causal = true;
    result.push_back(test::make_attention_spec(topo, topo.world() * 17, few));
    AttentionSpec all;
    all.zigzag = all.mask.causal = true;
    result.push_back(test::make_attention_spec(topo, topo.world() * 20 + 3, all));
  }
  return result;
}

class AttentionMutation : public testing::TestWithParam<AttentionDamage> {};

TEST_P(AttentionMutation, IsCaught) { expect_caught(GetParam(), specs()); }

INSTANTIATE_TEST_SUITE_P(Plans, AttentionMutation, testing::ValuesIn(damages()),
                         [](const testing::TestParamInfo<AttentionDamage>& damage) { return damage.param.name; });

TEST(AttentionPlanDamage, TheUndamagedPlansAreProved) {
  for (const PlanSpec& spec : specs()) {
    const VerifyReport report = verify(MutatedSource(spec));
    EXPECT_TRUE(report.ok()) << text_of(spec) << messages(report);
  }
}

// One place for all own chunks, as if the network read them at once.
TEST(AttentionPlanDamage, ASendersBufferThatIsUsedAgainWhileTheNetworkMayReadItIsCaught) {
  for (const Topology topo : {Topology{2, 1}, Topology{2, 2}, Topology{3, 1}}) {
    const PlanSpec spec = test::make_attention_spec(topo, topo.world() * 12);
    MutatedSource source(spec);
    const RingAttentionPlan& ring = source.plan().ring_attention();
    ASSERT_GT(ring.chunks, 1);
    for (std::int64_t i = 0; i < ring.chunks * ring.pieces; ++i) {
      Task task = source.at({0, Role::kIntra, 0, i});
      task.dst_offset -= i / ring.pieces * ring.chunk_room;
      source.set_task({0, Role::kIntra, 0, i}, task);
    }
    for (std::int32_t lane = 0; lane < topo.nodes - 1; ++lane) {
      for (std::int64_t c = 0; c < ring.chunks; ++c) {
        Task task = source.at({0, Role::kSend, lane, c});
        task.src_offset = 0;
        source.set_task({0, Role::kSend, lane, c}, task);
      }
    }
    const VerifyReport report = verify(source);
    EXPECT_TRUE(has(report, kOverwrite) || has(report, kUnordered)) << messages(report);
    EXPECT_FALSE(has(report, kUnbalanced) || has(report, kDeadlock)) << messages(report);
  }
}

// Rank 1 holds no token, so its puts carry nothing; still they are what keeps rank 0 from staging anew, two calls
// later, what the network may still read on its way to rank 1.
TEST(AttentionPlanDamage, ASenderWithoutSignOfItsReaderIsAHazardAcrossEpochs) {
  MutatedSource source(test::make_attention_spec({2, 1}, 1));
  for (std::int64_t i = 0; i < source.count(1, Role::kSend, 0); ++i) source.set_task({1, Role::kSend, 0, i}, {});
  for (std::int64_t i = 0; i < source.count(0, Role::kCompute, 0); ++i) {
    Task task = source.at({0, Role::kCompute, 0, i});
    task.waits[0] = {};
    source.set_task({0, Role::kCompute, 0, i}, task);
  }
  // Nobody waits for what rank 1 stages any more.
  for (std::int64_t i = 0; i < source.count(1, Role::kIntra, 0); ++i) source.set_task({1, Role::kIntra, 0, i}, {});
  const VerifyReport report = verify(source);
  EXPECT_FALSE(report.ok());
  for (const Violation& violation : report.violations) EXPECT_EQ(violation.kind, kOverwrite) << violation.message;
  EXPECT_NE(messages(report).find("has no sign of rank 1"), std::string::npos) << messages(report);
}

// With fewer slots than rounds every tile must take in a round before any can have a later one.
TEST(AttentionPlanDamage, TileAfterTileInsteadOfChunkAfterChunkIsADeadlockWithFewSlots) {
  for (const std::int64_t rounds : {std::int64_t{1}, std::int64_t{0}}) {
    AttentionSpec attention;
    attention.heads = 2;
    attention.slot_rounds = rounds;
    MutatedSource source(test::make_attention_spec({2, 2}, 48, attention));
    const RingAttentionPlan& ring = source.plan().ring_attention();
    for (std::int32_t rank = 0; rank < 4; ++rank) {
      for (std::int64_t i = 0; i < ring.tiles * ring.steps(); ++i) {
        const std::int64_t there = i % ring.steps() * ring.tiles + i / ring.steps();
        source.set_task({rank, Role::kCompute, 0, i}, source.plan().task(rank, Role::kCompute, 0, there));
      }
    }
    const VerifyReport report = verify(source);
    EXPECT_EQ(has(report, kDeadlock), rounds == 1) << messages(report);
    EXPECT_EQ(report.ok(), rounds == 0) << messages(report);
  }
}

}  // namespace
}  // namespace mkernel
