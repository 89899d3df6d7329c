// Proves a plan by enumerating the tasks of all ranks: coverage, data flow, balance of signals and waits, no deadlock
// for any SM partition, no overwrite across epochs, and network bytes equal to the lower bound.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace mkernel {

enum class ViolationKind : std::uint8_t {
  kMalformed,     // a task that no executor could run: fields that do not fit its action or its role
  kOutOfBounds,   // memory or flags that do not exist
  kNeverWritten,  // an element of C that nobody writes, or a read of workspace that nobody has written
  kWrittenTwice,  // two writes of the same memory in one epoch
  kWrongData,     // memory that holds something else than the operator's result needs there
  kUnordered,     // two accesses that no chain of signals puts in order
  kUnbalanced,    // a flag whose raises per use are not what its waits want
  kDeadlock,      // a task that never runs
  kOverwrite,     // memory or a flag that is written again while it may still be in use, in this epoch or two later
  kNetwork,       // bytes that differ from the lower bound, or a path off the rail
};
inline constexpr int kViolationKindCount = 10;

// "deadlock", "written twice" and so on.
std::string_view violation_name(ViolationKind kind);

// What is wrong, and with which task. The message names the task, and what it does, in words.
struct Violation {
  ViolationKind kind = ViolationKind::kMalformed;
  std::int32_t rank = 0;
  Role role = Role::kCompute;
  std::int32_t lane = 0;
  std::int64_t index = -1;  // -1: the rank as a whole, or the completion of its call
  std::string message;
};

struct VerifyReport {
  std::vector<Violation> violations;     // the first few of each kind
  std::int64_t violation_count = 0;      // all that were found
  std::int64_t tasks = 0;                // slots without work included
  std::int64_t signals = 0;              // flags raised per epoch
  std::int64_t network_bytes = 0;        // of all ranks
  std::int64_t network_bytes_bound = 0;  // the least that the operator's pattern allows

  bool ok() const { return violation_count == 0; }
};

// Pure, and of no side effect. The spec must have passed validate(). Time and memory are proportional to the tasks of
// all ranks (about 1 us and 250 bytes each).
VerifyReport verify(const PlanSource& source);

}  // namespace mkernel
