// A rank's part of a plan as the rows that the persistent kernel reads.
#pragma once
#include <cstdint>
#include <vector>

#include "exec/cuda/device_task.h"
#include "exec/cuda/tile_choice.h"
#include "mkernel/result.h"
#include "plan/plan.h"

namespace mkernel {

struct TaskTable {
  std::vector<DeviceTask> tasks;      // lane after lane; slots without work are left out
  std::vector<DeviceLane> lanes;      // compute, then intra, then recv
  std::vector<DeviceRecord> records;  // network writes, by the signal that completes what they wait for
  std::int32_t tile_rows = 0;         // of the tallest GEMM tile
  std::uint32_t parts = 0;            // of tiles whose K is cut, in all
};

// How K of a rank's tiles is cut.
struct SplitK {
  int sms = 0;             // for the choice: how many the rank has
  std::int32_t parts = 1;  // 0: chosen; else of every tile, where its kernel can
};

// O(tasks of the rank). Errors: kBadArgument for sizes beyond the 31-bit coordinates of TMA, naming them.
Result<TaskTable> make_task_table(const PlanSource& source, std::int32_t rank, const SplitK& split_k = {});

}  // namespace mkernel
