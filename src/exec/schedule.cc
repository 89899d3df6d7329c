#include "exec/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace mkernel {

Servers::Servers(const Partition& partition, const Plan& plan) : partition_(partition) {
  // SMs of roles without work compute.
  if (plan.lanes(Role::kIntra) == 0) partition_.compute += std::exchange(partition_.intra, 0);
  if (plan.lanes(Role::kRecv) == 0) partition_.compute += std::exchange(partition_.recv, 0);
}

Role Servers::first_role(int sm) const {
  if (sm < partition_.compute) return Role::kCompute;
  return sm < partition_.compute + partition_.intra ? Role::kIntra : Role::kRecv;
}

std::array<Role, 3> Servers::order(int sm) const {
  switch (first_role(sm)) {
    case Role::kIntra: return {Role::kIntra, Role::kRecv, Role::kCompute};
    case Role::kRecv: return {Role::kRecv, Role::kIntra, Role::kCompute};
    default: return {Role::kCompute, Role::kIntra, Role::kRecv};
  }
}

namespace {

// What a rank's SMs do in one call: time of its arithmetic, bytes that they read and write within the node and for what
// the network brings.
struct Work {
  double compute_ns = 0;
  double intra_bytes = 0;
  double recv_bytes = 0;
};

Work attention_work(const Plan& plan, const RoleCosts& costs) {
  const PlanSpec& spec = plan.spec();
  const AttentionSpec& a = spec.attention;
  const double world = spec.topo.world();
  const double heads = static_cast<double>(a.batch * a.heads);
  const double pairs = static_cast<double>(a.seq_q) * static_cast<double>(a.seq_k) * (a.mask.causal ? 0.5 : 1.0);
  const double shard = 2.0 * static_cast<double>(a.batch * a.kv_heads * a.dim * dtype_bytes(spec.dtype)) *
                       static_cast<double>(a.seq_k) / world;
  Work work;
  const double products = heads * static_cast<double>(a.dim) * pairs / world;
  work.compute_ns = 4 * products / costs.attend_flops_per_ns;
  work.intra_bytes = shard * ((spec.topo.nodes > 1 ? 2 : 0) + spec.topo.gpus);
  work.recv_bytes = shard * (spec.topo.nodes - 1) * spec.topo.gpus;
  if (spec.op == Op::kRingAttention) return work;
  work.compute_ns = 10 * products / costs.backward_flops_per_ns;
  // A shard's gradients: the sum of the node's parts for each node of the rail, and of those of all nodes.
  const double part =
      shard * static_cast<double>(dtype_bytes(spec.partial)) / static_cast<double>(dtype_bytes(spec.dtype));
  work.intra_bytes += part * spec.topo.nodes * (spec.topo.gpus + 1);
  if (spec.topo.nodes > 1) work.recv_bytes += part * spec.topo.nodes + shard;
  return work;
}

Work gemm_work(const Plan& plan, const RoleCosts& costs) {
  const PlanSpec& spec = plan.spec();
  const std::int32_t gpus = spec.topo.gpus;
  const std::int32_t nodes = spec.topo.nodes;
  const double out =
      static_cast<double>(spec.m) * static_cast<double>(spec.n) * static_cast<double>(dtype_bytes(spec.dtype));
  const double part =
      static_cast<double>(spec.m) * static_cast<double>(spec.n) * static_cast<double>(dtype_bytes(spec.partial));
  const double gather =
      static_cast<double>(spec.m) * static_cast<double>(spec.k) * static_cast<double>(dtype_bytes(spec.dtype));
  const Plan::Extent c = plan.c_extent(0);
  const double columns = static_cast<double>(spec.op == Op::kAllGatherGemm ? c.cols : spec.n);
  const double flops = 2.0 * static_cast<double>(spec.m) * columns * static_cast<double>(plan.gemm_k(0));

  // Bytes that a rank's SMs read and write in each role.
  double intra_bytes = 0;
  double recv_bytes = 0;
  switch (spec.op) {
    case Op::kAllGatherGemm:
      // Rows must arrive ahead of the tiles that need them; an SM too few here stalls all that compute (simulated, 2x8,
      // 32768: half as many take 18 to 42 % longer, twice as many 1 %). The node's own rows are needed in the time of
      // the first of N steps, those of other nodes in the time before the last.
      intra_bytes = std::max(2, nodes) * gather / spec.topo.world() * (2 + gpus);
      recv_bytes = 2 * gather / spec.topo.world() * (nodes - 1) * gpus;
      break;
    case Op::kGemmReduceScatter:
      intra_bytes = part / gpus * (gpus + 1);
      recv_bytes = part / spec.topo.world() * (nodes + 1);
      break;
    case Op::kGemmAllReduce:
      intra_bytes = part / gpus * gpus + (nodes == 1 ? out : part / gpus);
      recv_bytes = nodes == 1 ? 0 : nodes == 2 ? (2 * part / gpus + out) : (part / gpus + out / gpus + out);
      break;
    case Op::kRingAttention:
    case Op::kRingAttentionBackward: break;  // see attention_work()
  }
  return {flops / costs.flops_per_ns, intra_bytes, recv_bytes};
}

}  // namespace

Partition choose_partition(const Plan& plan, int sms, const RoleCosts& costs) {
  const Work work = plan.is_attention() ? attention_work(plan, costs) : gemm_work(plan, costs);
  struct Load {
    Role role;
    double ns;
    int sms;
  } loads[] = {{Role::kCompute, work.compute_ns, 0},
               {Role::kIntra, work.intra_bytes / costs.copy_bytes_per_ns, 0},
               {Role::kRecv, work.recv_bytes / costs.copy_bytes_per_ns, 0}};
  double total = 0;
  for (Load& load : loads) {
    if (plan.lanes(load.role) == 0) {
      load.ns = 0;
      continue;
    }
    load.ns += costs.task_ns;
    total += load.ns;
  }
  int left = sms;
  for (Load* load : {&loads[1], &loads[2]}) {
    if (load->ns == 0 || sms < 3) continue;
    load->sms = std::clamp(static_cast<int>(std::lround(sms * load->ns / total)), 1, std::max(1, sms / 2 - 1));
    left -= load->sms;
  }
  return {left, loads[1].sms, loads[2].sms};
}

Status validate_partition(const Partition& partition, int sms) {
  if (partition == Partition{}) return Ok{};
  if (partition.compute < 0 || partition.intra < 0 || partition.recv < 0 ||
      partition.compute + partition.intra + partition.recv != sms) {
    return bad_argument(
        fmt::format("partition {},{},{} (compute,intra,recv) must be three numbers of 0 or more that add "
                    "up to the {} SMs of a rank",
                    partition.compute, partition.intra, partition.recv, sms));
  }
  return Ok{};
}

}  // namespace mkernel
