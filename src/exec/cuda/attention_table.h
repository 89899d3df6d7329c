// A rank's part of a ring_attention plan as the tables that the attention kernel reads.
#pragma once
#include <cstdint>
#include <vector>

#include "exec/cuda/attention_task.h"
#include "mkernel/result.h"
#include "plan/plan.h"

namespace mkernel {

struct AttentionTable {
  std::vector<AttentionTile> tiles;      // CTA by CTA; those without queries are left out
  std::vector<std::int32_t> tile_begin;  // by CTA that computes, and one more
  std::vector<AttentionStep> steps;
  std::vector<DeviceTask> tasks;  // lane after lane: copies, then network writes
  std::vector<DeviceLane> lanes;
  std::int32_t move_lanes = 0;  // intra, then recv
  std::int32_t send_lanes = 0;
};

// `compute_ctas`: how many CTAs share out the tiles; `sms`: how many the rank has. O(compute tasks of the rank).
// Errors: kBadArgument for what the kernel has no room for, naming it.
Result<AttentionTable> make_attention_table(const PlanSource& source, std::int32_t rank, int compute_ctas, int sms);

// What a spec must be beyond validate_attention() to run on GPUs. kUnsupported or kBadArgument, naming what is not.
Status validate_gpu_attention(const PlanSpec& spec);

}  // namespace mkernel
