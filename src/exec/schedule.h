// Which SM serves which lane: the policy that host executor and simulator share.
#pragma once
#include <array>

#include "mkernel/mkernel.h"
#include "plan/plan.h"

namespace mkernel {

// The role that an SM serves first. SMs are numbered: compute, then intra, then recv. Roles that the plan does not use
// get no SM, and an SM whose own role has nothing ready helps the others, so every role with tasks left always has a
// server as long as the rank has one SM.
class Servers {
 public:
  Servers(const Partition& partition, const Plan& plan);

  Role first_role(int sm) const;
  // The order in which an SM looks for a ready task: its own role, then the roles that make other ranks wait.
  std::array<Role, 3> order(int sm) const;

 private:
  Partition partition_;
};

// What decides a partition before anything was measured. Per SM, in units of the device.
struct RoleCosts {
  double flops_per_ns = 1;           // GEMM
  double copy_bytes_per_ns = 1;      // bytes read plus bytes written, copies and reductions
  double task_ns = 0;                // fixed cost of a task
  double attend_flops_per_ns = 1;    // ring_attention
  double backward_flops_per_ns = 1;  // its backward
};

// SMs in proportion to the work of each role, every used role at least one SM where there are enough.
// `sms` >= 1. Pure: the same on every rank.
Partition choose_partition(const Plan& plan, int sms, const RoleCosts& costs);

// Refuses a partition that does not add up to `sms` (all zero is accepted: choose_partition decides).
Status validate_partition(const Partition& partition, int sms);

}  // namespace mkernel
