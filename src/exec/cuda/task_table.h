// A rank's part of a plan as the rows that the persistent kernel reads.
#pragma once
#include <cstdint>
#include <vector>

#include "exec/cuda/device_task.h"
#include "mkernel/result.h"
#include "plan/plan.h"

namespace mkernel {

struct TaskTable {
  std::vector<DeviceTask> tasks;      // lane after lane; slots without work are left out
  std::vector<DeviceLane> lanes;      // compute, then intra, then recv
  std::vector<DeviceRecord> records;  // network writes, by the signal that completes what they wait for
};

// O(tasks of the rank). Errors: kBadArgument for sizes beyond the 31-bit coordinates of TMA, naming them.
Result<TaskTable> make_task_table(const PlanSource& source, std::int32_t rank);

}  // namespace mkernel
