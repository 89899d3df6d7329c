#include "exec/sim/cost_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace mkernel {
namespace {

// Two nodes and more of eight H200 on NDR InfiniBand, one 400 Gbit/s port per GPU.
//
// 132 SMs, 990 TFLOP/s dense bf16, 450 GB/s NVLink per direction: NVIDIA H200 data sheet. Efficiency 0.68: our own
// GEMM at 8192^3 under the card's power limit, 650-700 TFLOP/s (docs/cost-model.md). 79 GB/s of reads and writes per
// reducing SM, 2.7 us GPU -> host -> GPU (half of it each way): measured on an H200, same place. Network latency
// 2 us, 0.15 us per post: ConnectX-7 figures as commonly published for small RDMA writes; not measured by us.
// Backward efficiency 0.55: what cuDNN reaches on an H200 from 4k to 16k tokens (550 to 577 TFLOP/s, 2026-12), which
// our kernel, not written yet, is meant to come near.
CostModel infiniband() { return {}; }

// The same nodes on AWS EFA: 3200 Gbit/s per node, so the same 50 GB/s per GPU, but 15 us one way and no order
// (published for SRD on p5 instances; not measured by us).
CostModel efa() {
  CostModel cost;
  cost.net_ns = 15000;
  cost.post_ns = 400;
  cost.unordered = true;
  return cost;
}

// Ranks in green contexts of one H200, as `mkernel bench` measures them: give --sms, the SMs of a rank. The seven
// figures of the second group were fitted to every second case of bench/results/virtual_cluster-h200.json, and `mkernel
// bench suite sim_vs_measured --calibrate` prints them; docs/performance.md shows what they predict of the others. Half
// of a round trip of the command ring takes 3 us (`mkernel bench suite command_ring`, H200, 2026-12-02).
CostModel virtual_cluster() {
  CostModel cost;
  cost.nvlink_bytes_per_ns = 1e6;  // the GPU's memory
  cost.record_ns = 3000;
  cost.net_bytes_per_ns = 6.06;  // 16 SMs' share of 50 GB/s
  cost.net_ns = 5000;

  cost.gemm_efficiency = 0.7361;
  cost.tile_ns = 1968;
  cost.memory_bytes_per_ns = 3427;
  cost.sm_bytes_per_ns = 87.61;
  cost.move_ns = 1679;
  cost.wire_bytes_per_ns = 25.31;
  cost.wire_ns = 2099;
  return cost;
}

}  // namespace

std::vector<std::string_view> preset_names() { return {"h200x8-ib", "h200x8-efa", "h200-virtual"}; }

Result<CostModel> find_preset(std::string_view name) {
  if (name == "h200x8-ib") return infiniband();
  if (name == "h200x8-efa") return efa();
  if (name == "h200-virtual") return virtual_cluster();
  return bad_argument(fmt::format("preset '{}' is not known: take one of {}", name, fmt::join(preset_names(), ", ")));
}

}  // namespace mkernel
