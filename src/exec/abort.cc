#include "exec/abort.h"

#include <fmt/format.h>

#include "plan/print.h"

namespace mkernel {

std::string describe(const Plan& plan, const AbortRecord& record) {
  const FlagName name = plan.flag_name(record.rank, record.flag);
  const std::string task =
      record.task < 0 ? "at the end of the call"
                      : fmt::format("in role {} lane {} task {}", role_name(record.role), record.lane, record.task);
  const std::string peer = name.sender >= 0 ? fmt::format("rank {}", name.sender)
                                            : fmt::format("the GPUs of node {}", plan.topo().node_of(record.rank));
  return fmt::format(
      "rank {} waited {:.1f} s in {} (operator {}), epoch {}, {}, for {} {}/{} (flag {}) from {}: wanted "
      "{}, seen {}",
      record.rank, record.waited_s, op_name(plan.spec().op), record.op, record.epoch, task, name.what, name.a, name.b,
      record.flag, peer, record.wanted, record.seen);
}

}  // namespace mkernel
