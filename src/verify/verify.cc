#include "verify/verify.h"

#include "verify/attention.h"
#include "verify/dataflow.h"
#include "verify/memory.h"
#include "verify/network.h"
#include "verify/signals.h"

namespace mkernel {

std::string_view violation_name(ViolationKind kind) {
  switch (kind) {
    case ViolationKind::kMalformed: return "malformed task";
    case ViolationKind::kOutOfBounds: return "out of bounds";
    case ViolationKind::kNeverWritten: return "never written";
    case ViolationKind::kWrittenTwice: return "written twice";
    case ViolationKind::kWrongData: return "wrong data";
    case ViolationKind::kUnordered: return "unordered access";
    case ViolationKind::kUnbalanced: return "unbalanced flag";
    case ViolationKind::kDeadlock: return "deadlock";
    case ViolationKind::kOverwrite: return "overwrite across epochs";
    case ViolationKind::kNetwork: return "network bytes";
  }
  return "?";
}

VerifyReport verify(const PlanSource& source) {
  Findings findings;
  VerifyReport report;
  const Enumeration all(source, findings);
  report.tasks = static_cast<std::int64_t>(all.tasks().size());

  const FlagTable flags(all, findings);
  report.signals = flags.signals();

  Knowledge knowledge(all.flag_ids(), all.world());
  const std::vector<TaskId> order = run_plan(all, knowledge, findings);
  // A plan that gets stuck does not spread its signs; what it lacks would only repeat the deadlock in other words.
  const bool reuse = !findings.any(ViolationKind::kDeadlock);
  if (reuse) check_flag_reuse(all, knowledge, findings);

  check_outputs(all, flags, knowledge, findings);
  if (source.plan().spec().op == Op::kRingAttention) {
    check_attention(all, order, knowledge, reuse, findings);
  } else if (source.plan().spec().op == Op::kRingAttentionBackward) {
    check_attention_backward(all, order, knowledge, reuse, findings);
  } else {
    const WriteIndex writes(all, findings);
    check_dataflow(all, writes, knowledge, reuse, findings);
  }
  check_network(all, findings);
  for (std::int32_t rank = 0; rank < all.world(); ++rank) report.network_bytes += sent_bytes(all, rank);
  report.network_bytes_bound = network_bound(source.plan().spec());

  report.violation_count = findings.total();
  report.violations = findings.take();
  return report;
}

}  // namespace mkernel
