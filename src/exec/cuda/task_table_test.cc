// Tables say what the plan says.
#include "exec/cuda/task_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "exec/cuda/kernel_config.h"
#include "exec/cuda/tile_choice.h"
#include "plan/operands.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

constexpr Topology kWorlds[] = {{1, 1}, {1, 3}, {1, 8}, {2, 1}, {2, 4}, {3, 1}, {3, 2}, {5, 1}};
constexpr std::int64_t kShapes[][3] = {{512, 768, 256}, {1000, 777, 333}, {200, 512, 256}, {128, 512, 256},
                                       {5, 300, 129},   {0, 64, 64},      {64, 64, 0}};

std::vector<PlanSpec> specs() {
  std::vector<PlanSpec> result;
  for (int op = 0; op < kGemmOpCount; ++op) {
    for (const Topology& topo : kWorlds) {
      for (const auto& [m, n, k] : kShapes) {
        PlanSpec spec;
        spec.op = static_cast<Op>(op);
        spec.topo = topo;
        spec.m = m;
        spec.n = n;
        spec.k = k;
        spec.partial = result.size() % 3 == 0 ? Dtype::kFp32 : Dtype::kBf16;
        spec.tiling = choose_gpu_tiling(spec, topo.world() > 4 ? 16 : 132);
        result.push_back(spec);
      }
    }
  }
  return result;
}

// Calls f(row, task, role) for every row of a rank's table beside the task it stands for, and checks that none is left.
template <class F>
void for_each_row(const PlanSource& source, std::int32_t rank, const TaskTable& table, F f) {
  const Plan& plan = source.plan();
  std::size_t lane_index = 0;
  std::size_t rows = 0;
  const auto go_through = [&](Role role, std::int32_t lane) {
    const DeviceLane& entry = table.lanes[lane_index++];
    EXPECT_EQ(entry.first, rows);
    for (std::int64_t index = 0; index < plan.count(rank, role, lane); ++index) {
      const Task task = plan.task(rank, role, lane, index);
      if (task.action == Action::kNone) continue;
      ASSERT_LT(rows, table.tasks.size());
      const DeviceTask& row = table.tasks[rows++];
      EXPECT_EQ(row.index, index);
      EXPECT_EQ(row.role_lane & 3, static_cast<int>(role));
      f(row, task, role);
    }
    EXPECT_EQ(entry.first + entry.count, rows);
  };
  go_through(Role::kCompute, 0);
  for (const Role role : {Role::kIntra, Role::kRecv}) {
    for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) go_through(role, lane);
  }
  EXPECT_EQ(rows, table.tasks.size());
  EXPECT_EQ(lane_index, table.lanes.size());
}

TEST(TaskTable, HasEveryTaskWithItsWaitsAndSignals) {
  for (const PlanSpec& spec : specs()) {
    ASSERT_TRUE(validate(spec).ok());
    const PlanSource source{Plan(spec)};
    const Topology& topo = spec.topo;
    for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
      const auto table = make_task_table(source, rank);
      ASSERT_TRUE(table.ok());
      for_each_row(source, rank, *table, [&](const DeviceTask& row, const Task& task, Role) {
        for (int i = 0; i < 2; ++i) {
          EXPECT_EQ(row.waits[i], task.waits[i]);
          std::set<std::int32_t> wanted;
          for_each_rank(topo, rank, task.signals[i], task.peer, [&](std::int32_t r) { wanted.insert(topo.gpu_of(r)); });
          std::set<std::int32_t> reached;
          for (int gpu = row.signals[i].gpu_begin; gpu < row.signals[i].gpu_end; ++gpu) reached.insert(gpu);
          EXPECT_EQ(reached, wanted);
          if (!wanted.empty()) {
            EXPECT_EQ(row.signals[i].flag, task.signals[i].flag);
          }
        }
        EXPECT_EQ(row.rows, task.block.rows);
        EXPECT_EQ(row.dst_offset, task.dst_offset);
        // The columns of copies include the padding of the gather buffer.
        EXPECT_GE(row.cols, task.block.cols);
        if (task.dst != Buffer::kGather) {
          EXPECT_EQ(row.cols, task.block.cols);
        }
      });
    }
  }
}

TEST(TaskTable, NamesEveryNetworkWriteOnceByTheSignalThatCompletesItsWait) {
  for (const PlanSpec& spec : specs()) {
    const PlanSource source{Plan(spec)};
    const Plan& plan = source.plan();
    for (std::int32_t rank = 0; rank < spec.topo.world(); ++rank) {
      const auto table = make_task_table(source, rank);
      ASSERT_TRUE(table.ok());
      std::set<std::uint32_t> named;
      for (const DeviceRecord& record : table->records) {
        EXPECT_TRUE(named.insert(record.task).second);
        const SendId id = send_of(plan, record.task);
        const Task task = plan.task(rank, Role::kSend, id.lane, id.index);
        EXPECT_EQ(spec.topo.node_of(task.peer), static_cast<std::int32_t>(record.node));
      }
      std::size_t sends = 0;
      for (std::int32_t lane = 0; lane < plan.lanes(Role::kSend); ++lane) {
        for (std::int64_t i = 0; i < plan.count(rank, Role::kSend, lane); ++i) {
          sends += plan.task(rank, Role::kSend, lane, i).action != Action::kNone;
        }
      }
      EXPECT_EQ(named.size(), sends);
      for (const DeviceTask& row : table->tasks) {
        for (const DeviceSignal& signal : row.signals) {
          for (std::uint32_t i = 0; i < signal.records; ++i) {
            const SendId id = send_of(plan, table->records[signal.record + i].task);
            const Wait wait = plan.task(rank, Role::kSend, id.lane, id.index).waits[0];
            EXPECT_EQ(wait.flag, signal.flag);
            EXPECT_EQ(wait.count, signal.record_count);
          }
        }
      }
    }
  }
}

// A TMA store writes 64 x 64 boxes, clipped at the edge of the matrix only: nothing beside the tile may be inside.
TEST(TaskTable, StoresByTmaOnlyWhereWholeBoxesAreTheTiles) {
  for (const PlanSpec& spec : specs()) {
    const PlanSource source{Plan(spec)};
    const auto table = make_task_table(source, 0);
    ASSERT_TRUE(table.ok());
    const Plan::Extent c = source.plan().c_extent(0);
    for (const DeviceTask& row : table->tasks) {
      if (row.action != DeviceAction::kGemm || row.path != Path::kTensor) continue;
      if (row.dst == Buffer::kC) {
        EXPECT_TRUE(row.rows == spec.tiling.bm || row.row + row.rows == c.rows);
        EXPECT_TRUE(row.cols == spec.tiling.bn || row.col + row.cols == c.cols);
      } else {
        EXPECT_EQ(row.rows, spec.tiling.bm);
        EXPECT_EQ(row.cols, spec.tiling.bn);
        EXPECT_EQ(row.dst_offset % spec.tiling.bn, 0);
        EXPECT_NE(spec.partial, Dtype::kFp32);
      }
    }
  }
}

TEST(TileChoice, GivesTilesThatHaveAKernelAndPlansThatAreValid) {
  for (const int sms : {8, 16, 32, 64, 78, 108, 132, 148}) {
    for (const PlanSpec& base : specs()) {
      PlanSpec spec = base;
      spec.tiling = choose_gpu_tiling(spec, sms);
      EXPECT_TRUE(validate(spec).ok());
      const TileShape shape{spec.tiling.bm, spec.tiling.bn};
      EXPECT_NE(std::find(std::begin(kTileShapes), std::end(kTileShapes), shape), std::end(kTileShapes));
    }
  }
}

TEST(TileChoice, TakesLargeTilesWhereThereAreManyAndSmallOnesWhereFew) {
  PlanSpec spec;
  spec.m = spec.n = spec.k = 8192;
  EXPECT_EQ(choose_gpu_tiling(spec, 132).bm, 128);
  EXPECT_EQ(choose_gpu_tiling(spec, 132).bn, 256);
  spec.m = 16;
  EXPECT_EQ(choose_gpu_tiling(spec, 132).bm, 64);
}

// A rank reads B once, or twice where that fills the SMs better, not once per rank.
TEST(TileChoice, GivesShardsOfFewRowsTheSameTiles) {
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmReduceScatter}) {
    for (const std::int64_t size : {4096, 8192}) {
      for (const int sms : {16, 132}) {
        PlanSpec spec;
        spec.op = op;
        spec.topo = {2, 4};
        spec.m = 16;
        spec.n = spec.k = size;
        spec.tiling = choose_gpu_tiling(spec, sms);
        EXPECT_EQ(spec.tiling.grid_shards, 8);
        EXPECT_EQ(spec.tiling.bm, 64);
        spec.m = 128;
        spec.tiling = choose_gpu_tiling(spec, sms);
        EXPECT_GE(spec.tiling.grid_shards, 4);
        spec.m = 8 * 65;
        EXPECT_EQ(choose_gpu_tiling(spec, sms).grid_shards, 1);
      }
    }
  }
}

// Every block of K of every tile is in one part, and no part is empty.
TEST(TaskTable, CutsTilesAlongKIntoPartsThatCoverIt) {
  for (const std::int64_t k : {1, 64, 100, 1000, 16384}) {
    for (const std::int32_t parts : {0, 1, 2, 5, 300}) {
      PlanSpec spec;
      spec.m = 300;
      spec.n = 200;
      spec.k = k;
      spec.op = Op::kGemmAllReduce;
      spec.topo = {1, 1};
      spec.tiling = choose_gpu_tiling(spec, 132);
      const auto table = make_task_table(PlanSource{Plan(spec)}, 0, {132, parts});
      ASSERT_TRUE(table.ok());
      const auto blocks = static_cast<std::int32_t>(ceil_div(k, kBlockK));
      // By tile, in the order of K.
      std::map<std::uint32_t, std::vector<TilePart>> tiles;
      for (const DeviceTask& task : table->tasks) tiles[task.index].push_back(task.part);
      std::uint32_t sum_slots = 0;
      for (auto& [tile, parts_of] : tiles) {
        std::ranges::sort(parts_of, {}, &TilePart::number);
        const TilePart first = parts_of[0];
        ASSERT_EQ(first.count, parts_of.size());
        std::int32_t next_block = 0;
        for (std::size_t p = 0; p < parts_of.size(); ++p) {
          EXPECT_EQ(parts_of[p].number, p);
          EXPECT_EQ(parts_of[p].slot, first.slot);
          EXPECT_EQ(parts_of[p].first_block, next_block);
          EXPECT_GT(parts_of[p].blocks, 0);
          next_block += parts_of[p].blocks;
        }
        EXPECT_EQ(next_block, blocks);
        if (first.count > 1) {
          EXPECT_EQ(first.slot, sum_slots);
          sum_slots += first.count;
        }
        if (parts > 1 && has_parts(spec.tiling.bn)) {
          EXPECT_EQ(first.count, std::min(parts, blocks));
        }
      }
      EXPECT_EQ(table->parts, sum_slots);
    }
  }
}

// Those of GpuOperator.IsRightWhereKIsCutOverCtas, on a whole H200.
TEST(TaskTable, CutsTheTilesOfTheShapesThatTheGpuTestTakes) {
  constexpr std::int64_t kCut[][3] = {{100, 96, 16384}, {1, 1000, 16384}, {129, 127, 8191}, {20, 500, 8192}, {128, 1500, 8192}};
  for (const auto& [m, n, k] : kCut) {
    PlanSpec spec;
    spec.op = Op::kGemmAllReduce;
    spec.topo = {1, 1};
    spec.m = m;
    spec.n = n;
    spec.k = k;
    spec.tiling = choose_gpu_tiling(spec, 132);
    const auto table = make_task_table(PlanSource{Plan(spec)}, 0, {132, 0});
    ASSERT_TRUE(table.ok());
    EXPECT_GT(table->parts, 1u) << m << " x " << n << " x " << k;
  }
}

TEST(TileChoice, CutsKWhereTilesAreFewAndKIsLong) {
  PlanSpec spec;
  spec.op = Op::kGemmAllReduce;
  spec.topo = {1, 1};
  spec.m = spec.n = 100;
  spec.k = 16384;
  spec.tiling = choose_gpu_tiling(spec, 132);
  const std::int64_t tiles = ceil_div(spec.m, spec.tiling.bm) * ceil_div(spec.n, spec.tiling.bn);
  EXPECT_GT(choose_split(spec, tiles, 132).parts, 4);
  // Not where every SM has a tile, nor where K is short.
  spec.tiling = {.bm = 128, .bn = 128};
  spec.m = 12 * 128;
  spec.n = 11 * 128;
  EXPECT_EQ(choose_split(spec, 132, 132).parts, 1);
  spec.k = 128;
  EXPECT_EQ(choose_split(spec, 10, 132).parts, 1);
}

}  // namespace
}  // namespace mkernel
