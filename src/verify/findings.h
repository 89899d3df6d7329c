// Where the parts of the verifier leave what they find.
#pragma once
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "verify/verify.h"

namespace mkernel {

// Names a task, or a rank's completion when `index` is -1.
struct Place {
  std::int32_t rank = 0;
  Role role = Role::kCompute;
  std::int32_t lane = 0;
  std::int64_t index = -1;
};

// Counts all violations and keeps the first of each kind, so that one kind cannot hide another.
class Findings {
 public:
  static constexpr std::int64_t kKeptPerKind = 8;

  // Calls `message()` only when the violation is kept: a broken plan may have a million of them.
  template <class Message>
  void add(ViolationKind kind, const Place& place, Message&& message) {
    ++total_;
    if (full(kind)) return;
    ++kept_[static_cast<std::size_t>(kind)];
    violations_.push_back({kind, place.rank, place.role, place.lane, place.index, message()});
  }

  // Whether further violations of this kind would only be counted.
  bool full(ViolationKind kind) const { return kept_[static_cast<std::size_t>(kind)] >= kKeptPerKind; }
  bool any(ViolationKind kind) const { return kept_[static_cast<std::size_t>(kind)] > 0; }
  std::int64_t total() const { return total_; }
  std::vector<Violation> take() { return std::move(violations_); }

 private:
  std::vector<Violation> violations_;
  std::array<std::int64_t, kViolationKindCount> kept_ = {};
  std::int64_t total_ = 0;
};

}  // namespace mkernel
