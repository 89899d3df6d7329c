// Damage of every kind, done to plans of every operator: each must be found, with the right kind of violation, and
// named by the damaged task or by one that depends on it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/operands.h"
#include "plan/print.h"
#include "plan/test_spec.h"
#include "plan/tiling.h"
#include "verify/damages.h"
#include "verify/verify.h"

namespace mkernel {

void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

namespace {

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

std::vector<Damage> all_damages() {
  std::vector<Damage> all;
  for (auto&& list : {flag_damages(), wait_damages(), data_damages(), put_damages()}) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

// --- The plans that are damaged.

PlanSpec make_spec(Op op, Topology topo, std::int64_t m, std::int64_t n, std::int64_t k, Dtype partial = Dtype::kBf16) {
  Tiling tiling = test::kTinyTiles;
  tiling.pitch_align = 4;
  PlanSpec spec = test::make_spec(op, topo, m, n, k, tiling);
  spec.partial = partial;
  return spec;
}

// Shards of two or three rows that share tiles, in every way that there is.
void add_shared(Op op, Topology topo, std::vector<PlanSpec>& specs) {
  PlanSpec spec = make_spec(op, topo, 2 * topo.world() + 1, 50, 29);
  spec.tiling.bm = spec.tiling.chunk_rows = 32;
  for (std::int32_t shards = 2; shards <= topo.world(); ++shards) {
    spec.tiling.grid_shards = shards;
    if (validate(spec)) specs.push_back(spec);
  }
}

std::vector<PlanSpec> specs_of(Op op) {
  std::vector<PlanSpec> specs;
  for (const Topology topo : {Topology{1, 2}, Topology{1, 3}, Topology{2, 1}, Topology{3, 1}, Topology{2, 2},
                              Topology{3, 2}, Topology{4, 3}}) {
    // Ragged edges; more than one chunk per shard; fewer rows than ranks, so that some tasks only signal; nothing.
    specs.push_back(make_spec(op, topo, 37, 61, 13));
    specs.push_back(make_spec(op, topo, topo.world() * 24, 50, 29));
    specs.push_back(make_spec(op, topo, topo.world() - 1, 20, 3));
    specs.push_back(make_spec(op, topo, 0, 20, 3));
    if (op != Op::kAllGatherGemm) specs.push_back(make_spec(op, topo, 48, 37, 13, Dtype::kFp32));
    add_shared(op, topo, specs);
  }
  return specs;
}

std::string spec_text(const PlanSpec& spec) {
  return fmt::format("{} {}x{} m {} n {} k {} partial {} tiles of {} shards", op_name(spec.op), spec.topo.nodes,
                     spec.topo.gpus, spec.m, spec.n, spec.k, dtype_name(spec.partial), spec.tiling.grid_shards);
}

// --- Who may be named.

struct Touched {
  std::set<std::pair<std::int32_t, std::uint32_t>> flags;
  std::vector<Access> memory;
  std::set<std::int32_t> ranks;
};

void touch(const Plan& plan, const Place& place, const Task& task, Touched& touched) {
  if (task.peer >= plan.topo().world()) return;
  touched.ranks.insert(place.rank);
  for (const Wait& wait : task.waits) {
    for (std::uint32_t i = 0; i < wait.span; ++i) touched.flags.insert({place.rank, wait.flag + i});
  }
  for (const Signal& signal : task.signals) {
    for_each_rank(plan.topo(), place.rank, signal, task.peer, [&](std::int32_t rank) {
      touched.flags.insert({rank, signal.flag});
      touched.ranks.insert(rank);
    });
  }
  const auto add = [&](const Access& access) {
    if (!access.empty()) touched.memory.push_back(access);
    touched.ranks.insert(access.rank);
  };
  for_each_read(plan, place.rank, task, add);
  for_each_write(plan, place.rank, task, add);
}

bool overlap(const Access& a, const Access& b) {
  if (a.rank != b.rank || a.buffer != b.buffer) return false;
  if (a.workspace()) return a.begin < b.end && b.begin < a.end;
  return a.block.row < b.block.row + b.block.rows && b.block.row < a.block.row + a.block.rows &&
         a.block.col < b.block.col + b.block.cols && b.block.col < a.block.col + a.block.cols;
}

bool same_place(const Place& a, const Violation& b) {
  return a.rank == b.rank && a.role == b.role && a.lane == b.lane && a.index == b.index;
}

// The damaged task, one that shares a flag or memory with it (damaged or not), or the completion of a rank it reaches.
bool names(const Violation& violation, const MutatedSource& damaged, const Place& victim) {
  const Plan& plan = damaged.plan();
  if (same_place(victim, violation)) return true;
  Touched by_victim;
  const Task before = plan.task(victim.rank, victim.role, victim.lane, victim.index);
  touch(plan, victim, before, by_victim);
  touch(plan, victim, damaged.at(victim), by_victim);
  if (violation.index < 0) return by_victim.ranks.contains(violation.rank);
  Touched by_other;
  const Place other{violation.rank, violation.role, violation.lane, violation.index};
  touch(plan, other, damaged.at(other), by_other);
  for (const auto& flag : by_other.flags) {
    if (by_victim.flags.contains(flag)) return true;
  }
  for (const Access& a : by_other.memory) {
    for (const Access& b : by_victim.memory) {
      if (overlap(a, b)) return true;
    }
  }
  // One move away: a reader looks through the put that carried the victim's bytes.
  return violation.message.find(task_name(victim.rank, victim.role, victim.lane, victim.index)) != std::string::npos;
}

std::string all_messages(const VerifyReport& report) {
  std::string text;
  for (const Violation& violation : report.violations) {
    text += fmt::format("\n  {}: {}", violation_name(violation.kind), violation.message);
  }
  return text;
}

bool has_kind(const Damage& damage, ViolationKind kind) {
  return std::find(damage.kinds.begin(), damage.kinds.end(), kind) != damage.kinds.end();
}

void expect_caught(const Damage& damage, const MutatedSource& damaged, const Place& victim) {
  const VerifyReport report = verify(damaged);
  const std::string context = fmt::format("{}, {}: {}", damage.name, spec_text(damaged.plan().spec()),
                                          task_name(victim.rank, victim.role, victim.lane, victim.index));
  ASSERT_FALSE(report.ok()) << context << " was not found";
  bool kind = false;
  bool named = false;
  for (const Violation& violation : report.violations) {
    if (!has_kind(damage, violation.kind)) continue;
    kind = true;
    named = named || names(violation, damaged, victim);
  }
  EXPECT_TRUE(kind) << context << " was found as something else:" << all_messages(report);
  EXPECT_TRUE(named || !kind) << context << " was blamed on others:" << all_messages(report);
}

// The first, a middle and the last task that a kind of damage applies to.
std::vector<Place> victims_of(const Damage& damage, const MutatedSource& source) {
  std::vector<Place> places;
  for_each_place(source, [&](const Place& place) {
    Task task = source.at(place);
    if (damage.apply(source, place, task)) places.push_back(place);
  });
  if (places.size() > 3) places = {places.front(), places[places.size() / 2], places.back()};
  return places;
}

class Mutation : public testing::TestWithParam<Damage> {};

TEST_P(Mutation, IsCaughtAndNamed) {
  const Damage& damage = GetParam();
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
    int bites = 0;
    for (const PlanSpec& spec : specs_of(op)) {
      const MutatedSource good(spec);
      for (const Place& victim : victims_of(damage, good)) {
        MutatedSource damaged = good;
        Task task = good.at(victim);
        damage.apply(good, victim, task);
        damaged.set_task(victim, task);
        expect_caught(damage, damaged, victim);
        ++bites;
      }
    }
    const bool expected = (damage.ops >> static_cast<int>(op) & 1) != 0;
    EXPECT_EQ(bites > 0, expected) << damage.name << " on " << op_name(op) << ": " << damage.elsewhere;
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, Mutation, testing::ValuesIn(all_damages()),
                         [](const testing::TestParamInfo<Damage>& damage) { return damage.param.name; });

}  // namespace
}  // namespace mkernel
