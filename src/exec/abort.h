// The record that the first rank to notice a failure leaves, and the sentence it becomes.
#pragma once
#include <string>

#include "mkernel/result.h"
#include "plan/plan.h"

namespace mkernel {

// Who waited for what from whom.
struct AbortRecord {
  ErrorKind kind = ErrorKind::kTimeout;
  std::int32_t rank = -1;
  std::uint32_t op = 0;
  std::uint64_t epoch = 0;
  Role role = Role::kCompute;
  std::int32_t lane = 0;
  std::int64_t task = -1;    // -1: the completion of the call
  std::uint32_t flag = 0;    // the flag that was waited for
  std::uint32_t wanted = 0;  // raised that often in this use
  std::uint32_t seen = 0;
  double waited_s = 0;
  std::int32_t peer = -1;  // the rank that should have raised it; -1: the GPUs of the node
};

// The first flag of `wait` that has not reached its target, by `value(flag)`, as an abort record's flag fields.
// Returns false when all have.
template <class ValueOf>
bool first_missing(const Wait& wait, std::uint32_t use, ValueOf value, AbortRecord& record) {
  for (std::uint32_t i = 0; i < wait.span; ++i) {
    const std::uint32_t seen = value(wait.flag + i);
    if (flag_reached(seen, use * wait.count)) continue;
    record.flag = wait.flag + i;
    record.wanted = wait.count;
    record.seen = seen - (use - 1) * wait.count;
    return true;
  }
  return false;
}

// One sentence, for example: "rank 3 waited 600.0 s in gemm_all_reduce, epoch 4, role recv lane 0 task 17, for arrival,
// chunk/node 5/1 (flag 90) from rank 7: wanted 1, seen 0".
std::string describe(const Plan& plan, const AbortRecord& record);

}  // namespace mkernel
