#include "verify/verify.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <tuple>

#include "plan/print.h"
#include "plan/test_spec.h"
#include "plan/tiling.h"
#include "verify/cases.h"

namespace mkernel {
namespace {

using test::make_spec;

std::string spec_text(const PlanSpec& spec) {
  if (spec.op == Op::kRingAttention) {
    return fmt::format("{}x{} {}, tiles of {}, chunks of {}, {} rounds", spec.topo.nodes, spec.topo.gpus,
                       attention_text(spec), spec.tiling.bm, spec.tiling.chunk_rows, spec.attention.slot_rounds);
  }
  return fmt::format("{} {}x{} m {} n {} k {} {}/{} tiles {}x{} band {} chunks {} tiles {} rows copies {} pitch {}",
                     op_name(spec.op), spec.topo.nodes, spec.topo.gpus, spec.m, spec.n, spec.k, dtype_name(spec.dtype),
                     dtype_name(spec.partial), spec.tiling.bm, spec.tiling.bn, spec.tiling.band,
                     spec.tiling.chunk_tiles, spec.tiling.chunk_rows, spec.tiling.copy_rows, spec.tiling.pitch_align);
}

void expect_proved(const PlanSpec& spec) {
  const VerifyReport report = verify(PlanSource(Plan(spec)));
  EXPECT_TRUE(report.ok()) << spec_text(spec) << ": " << report.violation_count << " violations, the first: "
                           << (report.violations.empty() ? "" : report.violations.front().message);
  EXPECT_EQ(report.network_bytes, report.network_bytes_bound) << spec_text(spec);
}

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};
constexpr Op kAllOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce, Op::kRingAttention};

TEST(Verify, EveryStandardCaseIsAValidSpec) {
  for (const PlanSpec& spec : standard_cases()) {
    const Status status = validate(spec);
    EXPECT_TRUE(status.ok()) << spec_text(spec) << ": " << status.error().message;
  }
}

TEST(Verify, StandardCasesHoldEveryFieldShapeAndEveryFactorizationOfEveryWorld) {
  const std::vector<PlanSpec> cases = standard_cases();
  EXPECT_GE(cases.size(), 300u);
  std::set<std::tuple<Op, int, int>> topologies;
  std::set<std::tuple<Op, int, std::int64_t>> field;
  bool small_m = false, zero_k = false, zero_m = false, wide_partials = false;
  for (const PlanSpec& spec : cases) {
    topologies.insert({spec.op, spec.topo.nodes, spec.topo.gpus});
    if (spec.op == Op::kRingAttention) continue;
    if (spec.topo.gpus == 8 && spec.m == spec.n && spec.n == spec.k) field.insert({spec.op, spec.topo.nodes, spec.m});
    small_m = small_m || (spec.m > 0 && spec.m < spec.topo.world());
    zero_k = zero_k || (spec.k == 0 && spec.m > 0 && spec.n > 0);
    zero_m = zero_m || spec.m == 0;
    wide_partials = wide_partials || dtype_bytes(spec.partial) > dtype_bytes(spec.dtype);
  }
  EXPECT_TRUE(small_m && zero_k && zero_m && wide_partials);
  for (const Op op : kAllOps) {
    for (const int world : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 24}) {
      for (int nodes = 1; nodes <= world; ++nodes) {
        if (world % nodes != 0) continue;
        EXPECT_TRUE(topologies.contains({op, nodes, world / nodes})) << op_name(op) << " " << nodes;
      }
    }
    if (op == Op::kRingAttention) continue;
    for (const int nodes : {2, 4}) {
      for (const std::int64_t size : {2048, 4096, 8192, 16384, 24576, 32768}) {
        EXPECT_TRUE(field.contains({op, nodes, size})) << op_name(op) << " " << nodes << " " << size;
      }
    }
  }
}

TEST(Verify, AllSmallCasesAreProved) {
  for (const PlanSpec& spec : small_cases()) expect_proved(spec);
}

TEST(Verify, FieldShapesUpTo8192AreProved) {
  for (const PlanSpec& spec : field_cases()) {
    if (spec.m <= 8192) expect_proved(spec);
  }
}

TEST(Verify, EverySizeFrom0To9MeetsEverySmallWorld) {
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{1, 1}, Topology{1, 3}, Topology{3, 1}, Topology{2, 2}, Topology{2, 3}}) {
      for (std::int64_t m = 0; m < 10; ++m) {
        for (std::int64_t n = 0; n < 10; n += 3) {
          for (const std::int64_t k : {0, 5}) {
            PlanSpec spec = make_spec(op, topo, m, n, k);
            spec.tiling = {
                .bm = 2, .bn = 2, .band = 2, .chunk_tiles = 2, .chunk_rows = 2, .copy_rows = 1, .pitch_align = 4};
            expect_proved(spec);
          }
        }
      }
    }
  }
}

// More ranks than one word of the verifier's rank sets has bits.
TEST(Verify, WorldsBeyond64RanksAreProved) {
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{33, 2}, Topology{13, 5}, Topology{1, 65}, Topology{16, 8}}) {
      expect_proved(make_spec(op, topo, 150, 40, 9));
    }
  }
}

TEST(Verify, ReportCountsTasksSignalsAndBytes) {
  // 2 x 1: each rank has one tile per shard, so 2 products, 1 put and 1 sum; each product and each put signals once.
  const VerifyReport report = verify(PlanSource(Plan(make_spec(Op::kGemmReduceScatter, {2, 1}, 16, 8, 4))));
  EXPECT_EQ(report.tasks, 2 * (2 + 1 + 1));
  EXPECT_EQ(report.signals, 2 * (2 + 1));
  EXPECT_EQ(report.network_bytes, 2 * 8 * 8 * 2);  // each rank sends 8 x 8 bf16 to the other
  EXPECT_EQ(report.network_bytes_bound, report.network_bytes);
}

TEST(Verify, ViolationNamesAreDistinct) {
  std::set<std::string_view> names;
  for (int kind = 0; kind < kViolationKindCount; ++kind) names.insert(violation_name(static_cast<ViolationKind>(kind)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kViolationKindCount));
  EXPECT_FALSE(names.contains("?"));
}

// The bar of the whole list is 60 s on one or two cores. Four of its largest plans stand for it: together 3 million
// tasks, of 8 million in the list.
TEST(VerifyTiming, AMillionTasksTakeSeconds) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "needs a build without sanitizers";
#endif
  const auto begin = std::chrono::steady_clock::now();
  std::int64_t tasks = 0;
  for (const PlanSpec& spec : field_cases()) {
    if (spec.m < 32768 || spec.op == Op::kAllGatherGemm) continue;  // attention's m is 0
    const VerifyReport report = verify(PlanSource(Plan(spec)));
    EXPECT_TRUE(report.ok()) << spec_text(spec);
    tasks += report.tasks;
  }
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  EXPECT_GT(tasks, 3'000'000);
  EXPECT_LT(time.count() * 8.0 / 3.0, 60.0);
}

}  // namespace
}  // namespace mkernel
