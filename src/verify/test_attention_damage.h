// Damage done to plans of ring_attention and its backward. For tests only.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "plan/print.h"
#include "verify/mutated_source.h"
#include "verify/verify.h"

namespace mkernel::test {

struct AttentionDamage {
  using Apply = std::function<bool(const MutatedSource&, const Place&, Task&)>;

  std::string name;
  std::vector<ViolationKind> kinds;  // one of them must be reported
  Apply apply;                       // false when it does not apply to this task
};

inline void PrintTo(const AttentionDamage& damage, std::ostream* out) { *out << damage.name; }

inline std::string text_of(const PlanSpec& spec) {
  return fmt::format("{} {}x{} {}, {} rounds", op_name(spec.op), spec.topo.nodes, spec.topo.gpus, attention_text(spec),
                     spec.attention.slot_rounds);
}

inline std::string messages(const VerifyReport& report) {
  std::string text;
  for (const Violation& violation : report.violations) {
    text += fmt::format("\n  {}: {}", violation_name(violation.kind), violation.message);
  }
  return text;
}

inline bool has(const VerifyReport& report, ViolationKind kind) {
  return std::any_of(report.violations.begin(), report.violations.end(),
                     [=](const Violation& violation) { return violation.kind == kind; });
}

template <class F>
void for_each_place(const PlanSource& source, F&& f) {
  const Plan& plan = source.plan();
  for (std::int32_t rank = 0; rank < plan.topo().world(); ++rank) {
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
        for (std::int64_t i = 0; i < source.count(rank, role, lane); ++i) f(Place{rank, role, lane, i});
      }
    }
  }
}

// The first, a middle and the last task that the damage applies to, in every plan.
inline void expect_caught(const AttentionDamage& damage, const std::vector<PlanSpec>& specs) {
  int bites = 0;
  for (const PlanSpec& spec : specs) {
    const MutatedSource good(spec);
    std::vector<Place> places;
    for_each_place(good, [&](const Place& place) {
      Task task = good.at(place);
      if (damage.apply(good, place, task)) places.push_back(place);
    });
    if (places.size() > 3) places = {places.front(), places[places.size() / 2], places.back()};
    for (const Place& victim : places) {
      MutatedSource damaged = good;
      Task task = good.at(victim);
      damage.apply(good, victim, task);
      damaged.set_task(victim, task);
      const VerifyReport report = verify(damaged);
      const bool found =
          std::any_of(damage.kinds.begin(), damage.kinds.end(), [&](ViolationKind kind) { return has(report, kind); });
      EXPECT_TRUE(found) << damage.name << " of " << task_name(victim.rank, victim.role, victim.lane, victim.index)
                         << " in " << text_of(spec) << ":" << messages(report);
      ++bites;
    }
  }
  EXPECT_GT(bites, 0);
}

}  // namespace mkernel::test
