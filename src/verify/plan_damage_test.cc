// Damage that takes more than one task, and changes that do no harm.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plan/test_spec.h"
#include "verify/mutated_source.h"
#include "verify/verify.h"

namespace mkernel {
namespace {

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};
constexpr Topology kTopologies[] = {{1, 2}, {2, 1}, {3, 1}, {2, 2}, {3, 2}};

PlanSpec make_spec(Op op, Topology topo, std::int64_t m, std::int64_t n, std::int64_t k) {
  Tiling tiling = test::kTinyTiles;
  tiling.chunk_tiles = 1;
  return test::make_spec(op, topo, m, n, k, tiling);
}

std::string messages(const VerifyReport& report) {
  std::string text;
  for (const Violation& violation : report.violations) {
    text += fmt::format("\n  {}: {}", violation_name(violation.kind), violation.message);
  }
  return text;
}

const Violation* find(const VerifyReport& report, ViolationKind kind) {
  const auto found = std::find_if(report.violations.begin(), report.violations.end(),
                                  [=](const Violation& violation) { return violation.kind == kind; });
  return found != report.violations.end() ? &*found : nullptr;
}

bool only(const VerifyReport& report, ViolationKind kind) {
  return !report.ok() && std::all_of(report.violations.begin(), report.violations.end(),
                                     [=](const Violation& violation) { return violation.kind == kind; });
}

Place last_of(const PlanSource& source, std::int32_t rank, Role role, std::int32_t lane) {
  return {rank, role, lane, source.count(rank, role, lane) - 1};
}

TEST(PlanDamage, APutThatIsMadeTwiceIsCaught) {
  for (const Op op : kOps) {
    MutatedSource source(make_spec(op, {2, 2}, 64, 24, 5));
    const Place last = last_of(source, 1, Role::kSend, 0);
    const Task put = source.at(last);
    ASSERT_GT(put.length, 0);
    Place again = last;
    ++again.index;
    source.set_count(again, again.index + 1);
    source.set_task(again, put);
    const VerifyReport report = verify(source);
    const Violation* twice = find(report, ViolationKind::kWrittenTwice);
    ASSERT_NE(twice, nullptr) << op_name(op) << messages(report);
    EXPECT_EQ(twice->rank, 1);
    EXPECT_EQ(twice->role, Role::kSend);
    EXPECT_EQ(twice->index, again.index);
    const Violation* stamp = find(report, ViolationKind::kUnbalanced);
    ASSERT_NE(stamp, nullptr) << op_name(op) << messages(report);
    EXPECT_EQ(stamp->index, again.index);
    const Violation* bytes = find(report, ViolationKind::kNetwork);
    ASSERT_NE(bytes, nullptr) << op_name(op) << messages(report);
    EXPECT_EQ(bytes->rank, 1);
    EXPECT_GT(report.network_bytes, report.network_bytes_bound);
  }
}

// The same in place of a slot without work, so that the lane's length is as it should be.
TEST(PlanDamage, ATaskInASlotWithoutWorkIsCaught) {
  MutatedSource source(make_spec(Op::kGemmAllReduce, {1, 2}, 8, 8, 5));
  const Place slot{0, Role::kCompute, 0, 1};  // GPU 1 would sum this chunk, and there is only one tile
  ASSERT_EQ(source.at(slot).action, Action::kNone);
  source.set_task(slot, source.task(0, Role::kCompute, 0, 0));
  const VerifyReport report = verify(source);
  const Violation* twice = find(report, ViolationKind::kWrittenTwice);
  ASSERT_NE(twice, nullptr) << messages(report);
  EXPECT_EQ(twice->rank, 0);
  EXPECT_EQ(twice->role, Role::kCompute);
}

TEST(PlanDamage, ALaneWithoutItsLastTaskIsCaught) {
  for (const Op op : kOps) {
    for (const Topology topo : kTopologies) {
      const PlanSpec spec = make_spec(op, topo, topo.world() * 16, topo.world() * 8, 9);
      const MutatedSource good(spec);
      for (int r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        for (std::int32_t lane = 0; lane < good.plan().lanes(role); ++lane) {
          const Place last = last_of(good, 0, role, lane);
          if (last.index < 0 || good.at(last).action == Action::kNone) continue;
          MutatedSource source = good;
          source.set_count(last, last.index);
          const VerifyReport report = verify(source);
          const bool output = find(report, ViolationKind::kNeverWritten) != nullptr;
          const bool stuck = find(report, ViolationKind::kDeadlock) != nullptr;
          EXPECT_TRUE(output || stuck) << op_name(op) << " " << topo.nodes << "x" << topo.gpus << " " << r << "/"
                                       << lane << messages(report);
        }
      }
    }
  }
}

TEST(PlanDamage, ARankThatSendsFarLessThanTheOthersIsCaught) {
  for (const Topology topo : {Topology{2, 2}, Topology{4, 2}}) {
    MutatedSource source(make_spec(Op::kGemmAllReduce, topo, 256, 256, 4));
    for (std::int32_t lane = 0; lane < source.plan().lanes(Role::kSend); ++lane) {
      source.set_count({1, Role::kSend, lane, 0}, 0);
    }
    const VerifyReport report = verify(source);
    bool share = false;
    for (const Violation& violation : report.violations) {
      share = share || (violation.kind == ViolationKind::kNetwork && violation.rank == 1 &&
                        violation.message.find("away from the mean") != std::string::npos);
    }
    EXPECT_TRUE(share) << messages(report);
    EXPECT_LT(report.network_bytes, report.network_bytes_bound);
  }
}

TEST(PlanDamage, NegativeCountsAreCaught) {
  MutatedSource source(make_spec(Op::kGemmReduceScatter, {2, 2}, 32, 8, 4));
  source.set_count({2, Role::kIntra, 0, 0}, -1);
  const VerifyReport report = verify(source);
  const Violation* malformed = find(report, ViolationKind::kMalformed);
  ASSERT_NE(malformed, nullptr) << messages(report);
  EXPECT_EQ(malformed->rank, 2);
  EXPECT_EQ(malformed->role, Role::kIntra);
}

// gemm_reduce_scatter has no completion to lose: its own lanes wait for everything.
TEST(PlanDamage, AMissingCompletionIsCaught) {
  for (const Topology topo : kTopologies) {
    MutatedSource source(make_spec(Op::kGemmAllReduce, topo, 40, 24, 9));
    source.set_completion(0, {});
    const VerifyReport report = verify(source);
    const Violation* unheard = find(report, ViolationKind::kUnbalanced);
    ASSERT_NE(unheard, nullptr) << topo.nodes << "x" << topo.gpus << messages(report);
    EXPECT_NE(unheard->message.find("of rank 0, for which nobody there waits"), std::string::npos) << unheard->message;
    if (topo.gpus == 1) continue;  // all tiles are written by own tasks
    const Violation* unordered = find(report, ViolationKind::kUnordered);
    ASSERT_NE(unordered, nullptr) << messages(report);
    EXPECT_NE(unordered->message.find("writes C of rank 0"), std::string::npos) << unordered->message;
  }
  // Rank 0 has columns of C to compute, rank 1 has none: only its completion waits for the rows it gets.
  for (const Topology topo : {Topology{1, 2}, Topology{2, 1}, Topology{2, 2}}) {
    MutatedSource source(make_spec(Op::kAllGatherGemm, topo, 40, 1, 9));
    source.set_completion(1, {});
    const VerifyReport report = verify(source);
    const Violation* unheard = find(report, ViolationKind::kUnbalanced);
    ASSERT_NE(unheard, nullptr) << topo.nodes << "x" << topo.gpus << messages(report);
    EXPECT_NE(unheard->message.find("of rank 1, for which nobody there waits"), std::string::npos) << unheard->message;
  }
}

TEST(PlanDamage, ACompletionThatWantsMoreIsADeadlockOfThatRank) {
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmAllReduce}) {
    MutatedSource source(make_spec(op, {2, 2}, 40, 24, 9));
    Wait wait = source.completion(3);
    ++wait.count;
    source.set_completion(3, wait);
    const VerifyReport report = verify(source);
    const Violation* stuck = find(report, ViolationKind::kDeadlock);
    ASSERT_NE(stuck, nullptr) << messages(report);
    EXPECT_EQ(stuck->rank, 3);
    EXPECT_EQ(stuck->index, -1);
  }
}

// In the next three plans everything balances and nothing is stuck, but one rank has lost its only sign of life from
// another, so nothing keeps it from being two epochs ahead.
TEST(PlanDamage, AReduceScatterRankWithoutSignOfItsPeerIsAParityHazard) {
  // Rank 1 owns no row, so rank 0's signal to it carries no data; still it is what holds rank 1 back.
  MutatedSource source(make_spec(Op::kGemmReduceScatter, {1, 2}, 1, 8, 4));
  const Place product{0, Role::kCompute, 0, 0};
  const Place sum{1, Role::kIntra, 0, 0};
  Task task = source.at(product);
  ASSERT_TRUE(task.block.empty());
  ASSERT_EQ(task.peer, 1);
  task.signals[0] = {};
  source.set_task(product, task);
  task = source.at(sum);
  ASSERT_EQ(task.waits[0].count, 2u);
  task.waits[0].count = 1;
  source.set_task(sum, task);
  const VerifyReport report = verify(source);
  EXPECT_TRUE(only(report, ViolationKind::kOverwrite)) << messages(report);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.violations.front().rank, 1);
  EXPECT_EQ(report.violations.front().role, Role::kCompute);
}

TEST(PlanDamage, AnAllGatherRankWithoutSignOfItsPeerIsAParityHazard) {
  MutatedSource source(make_spec(Op::kAllGatherGemm, {1, 2}, 1, 8, 4));
  for (std::int64_t i = 0; i < source.count(1, Role::kIntra, 0); ++i) {
    const Place copy{1, Role::kIntra, 0, i};
    Task task = source.at(copy);
    ASSERT_EQ(task.block.rows, 0);
    task.signals[0].reach = Reach::kSelf;
    source.set_task(copy, task);
  }
  Wait wait = source.completion(0);
  ASSERT_EQ(wait.span, 2u);
  wait.span = 1;  // own chunk only
  source.set_completion(0, wait);
  const VerifyReport report = verify(source);
  EXPECT_TRUE(only(report, ViolationKind::kOverwrite)) << messages(report);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.violations.front().rank, 0);
  EXPECT_EQ(report.violations.front().role, Role::kIntra);
}

TEST(PlanDamage, AnAllReduceRankWithoutSignOfItsPeerIsAParityHazard) {
  // One tile, summed by rank 0. Rank 1 no longer hears that it is done.
  MutatedSource source(make_spec(Op::kGemmAllReduce, {1, 2}, 8, 8, 4));
  const Place sum{0, Role::kIntra, 0, 0};
  Task task = source.at(sum);
  task.signals[0].reach = Reach::kSelf;
  source.set_task(sum, task);
  source.set_completion(1, {});
  const VerifyReport report = verify(source);
  const Violation* overwrite = find(report, ViolationKind::kOverwrite);
  ASSERT_NE(overwrite, nullptr) << messages(report);
  EXPECT_EQ(overwrite->rank, 1);
  EXPECT_EQ(overwrite->role, Role::kCompute);
  const Violation* unordered = find(report, ViolationKind::kUnordered);
  ASSERT_NE(unordered, nullptr) << messages(report);
  EXPECT_EQ(unordered->rank, 0);
  EXPECT_EQ(unordered->role, Role::kIntra);
}

// Rank 0 writes rank 1's C, which must not happen before rank 1 has started its call.
TEST(PlanDamage, WritingTheOutputOfARankThatMayNotHaveStartedIsCaught) {
  MutatedSource source(make_spec(Op::kGemmAllReduce, {1, 2}, 8, 8, 4));
  const Place product{1, Role::kCompute, 0, 0};
  const Place sum{0, Role::kIntra, 0, 0};
  Task task = source.at(product);
  task.signals[0] = {};
  source.set_task(product, task);
  task = source.at(sum);
  task.waits[0].count = 1;
  source.set_task(sum, task);
  const VerifyReport report = verify(source);
  bool found = false;
  for (const Violation& violation : report.violations) {
    found = found || (violation.kind == ViolationKind::kOverwrite && violation.rank == 0 &&
                      violation.message.find("without a sign that rank 1 has started") != std::string::npos);
  }
  EXPECT_TRUE(found) << messages(report);
}

TEST(PlanDamage, ACycleOfTwoRanksIsReportedAsSuch) {
  // Each rank wants the other's rows of A before it gives its own.
  PlanSpec spec = make_spec(Op::kAllGatherGemm, {1, 2}, 16, 8, 4);
  spec.tiling.copy_rows = 8;
  MutatedSource source(spec);
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    const Place copy{rank, Role::kIntra, 0, 0};
    Task task = source.at(copy);
    task.waits[0] = {source.task(1 - rank, Role::kIntra, 0, 0).signals[0].flag, 1, 1};
    source.set_task(copy, task);
  }
  const VerifyReport report = verify(source);
  const Violation* stuck = find(report, ViolationKind::kDeadlock);
  ASSERT_NE(stuck, nullptr) << messages(report);
  EXPECT_EQ(stuck->role, Role::kIntra);
  EXPECT_EQ(stuck->index, 0);
  EXPECT_NE(stuck->message.find("the waits form a cycle: rank 0 intra[0] task 0"), std::string::npos) << stuck->message;
  EXPECT_NE(stuck->message.find("waits for rank 1 intra[0] task 0"), std::string::npos) << stuck->message;
}

TEST(PlanDamage, AMillionViolationsAreCountedAndAFewKept) {
  MutatedSource source(make_spec(Op::kGemmReduceScatter, {1, 2}, 400, 400, 4));
  source.set_count({0, Role::kCompute, 0, 0}, 0);
  const VerifyReport report = verify(source);
  EXPECT_GT(report.violation_count, 1000);
  EXPECT_LE(report.violations.size(), 8u * kViolationKindCount);
}

// --- Changes that do no harm must pass: a verifier that refuses everything would pass all tests above.

// Roles feed each other in one direction only, so no lane waits for itself, and its order is a matter of speed.
TEST(PlanDamage, AnotherOrderWithinALaneIsAccepted) {
  for (const Op op : kOps) {
    for (const Topology topo : kTopologies) {
      MutatedSource source(make_spec(op, topo, topo.world() * 16, topo.world() * 8, 9));
      for (int r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        for (std::int32_t lane = 0; lane < source.plan().lanes(role); ++lane) {
          const std::int64_t count = source.count(0, role, lane);
          if (count < 2) continue;
          const Task first = source.task(0, role, lane, 0);
          source.set_task({0, role, lane, 0}, source.task(0, role, lane, count - 1));
          source.set_task({0, role, lane, count - 1}, first);
        }
      }
      const VerifyReport report = verify(source);
      EXPECT_TRUE(report.ok()) << op_name(op) << messages(report);
    }
  }
}

TEST(PlanDamage, AnOrderThroughAThirdTaskIsAccepted) {
  // Rank 1's product for rank 0 signals at home, and rank 1's sum, which waits for that, signals rank 0 in its place.
  MutatedSource source(make_spec(Op::kGemmReduceScatter, {1, 2}, 16, 8, 4));
  const Place product{1, Role::kCompute, 0, 0};
  const Place sum{1, Role::kIntra, 0, 0};
  Task task = source.at(product);
  ASSERT_EQ(task.peer, 0);
  task.signals[0].reach = Reach::kSelf;
  source.set_task(product, task);
  task = source.at(sum);
  task.waits[0].count = 3;
  task.peer = 0;
  task.signals[0] = {0, Reach::kRank, false};
  source.set_task(sum, task);
  const VerifyReport good = verify(source);
  EXPECT_TRUE(good.ok()) << messages(good);
  // Without the middle link rank 0 reads too early.
  task.waits[0] = {};
  source.set_task(sum, task);
  EXPECT_NE(find(verify(source), ViolationKind::kUnordered), nullptr);
}

TEST(PlanDamage, AnOutputThatIsAnnouncedThroughAThirdTaskIsAccepted) {
  // Two tiles, one summed by each rank. Rank 0 announces its tile at home only; a relay that waits for that, and moves
  // nothing, tells rank 1.
  MutatedSource source(make_spec(Op::kGemmAllReduce, {1, 2}, 8, 16, 4));
  const Place sum{0, Role::kIntra, 0, 0};
  Task task = source.at(sum);
  const std::uint32_t done = task.signals[0].flag;
  task.signals[0].reach = Reach::kSelf;
  source.set_task(sum, task);
  Task relay;
  relay.action = Action::kCopy;
  relay.source = Source::kOwn;
  relay.src = Buffer::kPartial;
  relay.dst = Buffer::kC;
  relay.dst_reach = Reach::kSelf;
  relay.peer = 1;
  relay.waits[0] = {done, 1, 2};
  relay.signals[0] = {done, Reach::kRank, false};
  source.set_count({0, Role::kIntra, 0, 0}, 2);
  source.set_task({0, Role::kIntra, 0, 1}, relay);
  const VerifyReport report = verify(source);
  EXPECT_TRUE(report.ok()) << messages(report);
}

}  // namespace
}  // namespace mkernel
