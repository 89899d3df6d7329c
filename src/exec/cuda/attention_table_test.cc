// The tables of attention say what the plan says.
#include "exec/cuda/attention_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "exec/cuda/attention_config.h"
#include "ops/attention_spec.h"

namespace mkernel {
namespace {

constexpr Topology kWorlds[] = {{1, 1}, {1, 3}, {1, 8}, {2, 1}, {2, 4}, {3, 2}, {5, 1}};

std::vector<PlanSpec> specs() {
  std::vector<PlanSpec> result;
  for (const Topology& topo : kWorlds) {
    for (const std::int64_t tokens : {0, 1, 7, 749, 4096}) {
      for (int kind = 0; kind < 4; ++kind) {
        AttentionOptions options;
        options.batch = 1 + kind % 2;
        options.heads = 4;
        options.kv_heads = 2;
        options.dim = 64;
        options.seq_q = tokens;
        options.seq_k = kind == 3 ? tokens / 2 : tokens;
        options.causal = kind > 0;
        options.zigzag = kind == 2;
        options.window_left = kind == 3 ? 100 : -1;
        options.chunk_rows = tokens > 1000 ? 0 : 50;
        result.push_back(make_gpu_attention_spec(topo, options).value());
      }
    }
  }
  return result;
}

TEST(AttentionTable, EveryTaskIsAStepOfATile) {
  for (const PlanSpec& spec : specs()) {
    const PlanSource source{Plan(spec)};
    const Plan& plan = source.plan();
    const RingAttentionPlan& ring = plan.ring_attention();
    for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
      const AttentionTable table = make_attention_table(source, rank, 16, 16).value();
      std::vector<const AttentionTile*> by_number(static_cast<std::size_t>(ring.tiles));
      for (const AttentionTile& tile : table.tiles) {
        const AttentionTile*& place = by_number[static_cast<std::size_t>(tile.number)];
        EXPECT_EQ(place, nullptr) << "tile " << tile.number << " is there twice";
        place = &tile;
      }
      for (std::int64_t i = 0; i < plan.count(rank, Role::kCompute, 0); ++i) {
        const Task task = plan.task(rank, Role::kCompute, 0, i);
        const AttentionTile* tile = by_number[static_cast<std::size_t>(i % ring.tiles)];
        ASSERT_EQ(tile != nullptr, task.block.rows > 0);
        if (tile == nullptr) continue;
        const AttentionStep& step = table.steps[static_cast<std::size_t>(i / ring.tiles)];
        const std::int64_t head = std::int64_t{tile->batch} * spec.attention.heads + tile->head;
        EXPECT_EQ(task.block.row, head * spec.attention.q_split(spec.topo).tokens(rank) + tile->token);
        EXPECT_EQ(task.block.rows, tile->rows);
        EXPECT_EQ(task.waits[0].span, step.count == 0 ? 0u : 1u);
        EXPECT_EQ(task.waits[0].flag, step.flag);
        EXPECT_EQ(task.waits[0].count, step.count);
        if (task.length == 0) continue;  // nothing is seen, which the kernel finds out itself
        EXPECT_EQ(task.kv_position, step.position);
        EXPECT_EQ(task.length, step.keys * spec.attention.dim);
        const std::int64_t kv_head = std::int64_t{tile->batch} * spec.attention.kv_heads + tile->kv_head;
        const std::int64_t row = step.own != 0 ? kv_head * spec.attention.k_split(spec.topo).tokens(rank) + step.row
                                               : (step.row + 2 * kv_head * step.keys) * spec.attention.dim;
        EXPECT_EQ(task.src_offset, row);
      }
    }
  }
}

TEST(AttentionTable, TilesAreSharedOutEvenly) {
  for (const bool causal : {false, true}) {
    AttentionOptions options;
    options.heads = 16;
    options.seq_q = 8192;
    options.causal = causal;
    const PlanSpec spec = make_gpu_attention_spec({1, 1}, options).value();
    for (const int ctas : {1, 16, 132}) {
      const AttentionTable table = make_attention_table(PlanSource{Plan(spec)}, 0, ctas, ctas).value();
      ASSERT_EQ(table.tile_begin.size(), static_cast<std::size_t>(ctas) + 1);
      double most = 0;
      double all = 0;
      for (int cta = 0; cta < ctas; ++cta) {
        double keys = 0;
        for (std::int32_t i = table.tile_begin[cta]; i < table.tile_begin[cta + 1]; ++i) {
          const AttentionTile& tile = table.tiles[static_cast<std::size_t>(i)];
          keys += causal ? tile.position + tile.rows : 8192;
        }
        most = std::max(most, keys);
        all += keys;
      }
      EXPECT_LT(most, 1.08 * all / ctas) << ctas << " CTAs";
    }
  }
}

TEST(AttentionTable, CopiesAndWritesAreThePlans) {
  for (const PlanSpec& spec : specs()) {
    const PlanSource source{Plan(spec)};
    const Plan& plan = source.plan();
    const std::int64_t tokens_of_rank = spec.attention.k_split(spec.topo).tokens(0);
    const AttentionTable table = make_attention_table(source, 0, 16, 16).value();
    EXPECT_EQ(table.lanes.size(), static_cast<std::size_t>(table.move_lanes + table.send_lanes));
    std::size_t lane_index = 0;
    for (const Role role : {Role::kIntra, Role::kRecv, Role::kSend}) {
      for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
        const DeviceLane& entry = table.lanes[lane_index++];
        ASSERT_EQ(entry.count, plan.count(0, role, lane));
        for (std::uint32_t i = 0; i < entry.count; ++i) {
          const DeviceTask& row = table.tasks[entry.first + i];
          const Task task = plan.task(0, role, lane, i);
          EXPECT_EQ(row.waits[0], task.waits[0]);
          EXPECT_EQ(row.waits[1], task.waits[1]);
          if (role == Role::kSend) {
            EXPECT_EQ(row.col, spec.topo.node_of(task.peer));
            EXPECT_EQ(row.row, send_id(plan, {lane, i}));
            continue;
          }
          EXPECT_EQ(row.rows, task.block.rows);
          EXPECT_EQ(row.dst_offset, task.dst_offset);
          EXPECT_EQ(row.signals[0].flag, task.signals[0].flag);
          if (task.src == Buffer::kKv) {
            EXPECT_EQ(row.src_offset, task.src_offset);
          } else if (row.rows > 0) {
            EXPECT_EQ(row.col * tokens_of_rank + row.row, task.src_offset);
          }
        }
      }
    }
    EXPECT_EQ(lane_index, table.lanes.size());
  }
}

TEST(AttentionTable, RefusesWhatTheKernelHasNoRoomFor) {
  AttentionOptions options;
  options.seq_q = 1 << 18;
  options.heads = 32;
  const PlanSpec spec = make_gpu_attention_spec({1, 2}, options).value();
  const auto table = make_attention_table(PlanSource{Plan(spec)}, 0, 16, 16);
  ASSERT_FALSE(table.ok());
  EXPECT_NE(table.error().message.find("tiles for one SM"), std::string::npos) << table.error().message;
  options.seq_q = (std::int64_t{1} << 29) + 1;
  EXPECT_FALSE(make_gpu_attention_spec({1, 2}, options).ok());
}

}  // namespace
}  // namespace mkernel
