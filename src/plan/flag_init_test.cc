#include "plan/flag_init.h"

#include <gtest/gtest.h>

#include <vector>

namespace mkernel {
namespace {

PlanSpec spec_of(Op op) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = {3, 2};
  spec.m = 70;
  spec.n = 50;
  spec.k = 30;
  spec.tiling = {.bm = 16, .bn = 16, .band = 2, .chunk_tiles = 2, .chunk_rows = 16, .copy_rows = 5, .pitch_align = 1};
  return spec;
}

TEST(InitFlags, LeavesAllFlagsZeroBeforeTheFirstEpoch) {
  const PlanSource source{Plan(spec_of(Op::kGemmAllReduce))};
  std::vector<std::uint32_t> flags(2 * source.plan().flag_count());
  init_flags(source, 0, 0, flags.data());
  for (const std::uint32_t flag : flags) EXPECT_EQ(flag, 0u);
}

TEST(InitFlags, MeetsEveryWaitOfThePastAndNoneOfTheNextEpoch) {
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
    const PlanSource source{Plan(spec_of(op))};
    const HeapLayout layout(source.plan());
    for (const std::uint64_t start :
         {std::uint64_t{1}, std::uint64_t{2}, (std::uint64_t{1} << 33) - 3, (std::uint64_t{1} << 33) - 2}) {
      for (std::int32_t rank = 0; rank < 6; ++rank) {
        std::vector<std::uint32_t> flags(2 * source.plan().flag_count());
        init_flags(source, rank, start, flags.data());
        std::int64_t waits = 0;
        const auto check = [&](const Wait& wait) {
          for (std::uint32_t i = 0; i < wait.span; ++i) {
            for (int step = -1; step <= 2; ++step) {
              const std::uint64_t epoch = start + static_cast<std::uint64_t>(step);
              const std::uint32_t value = flags[layout.flag_index(wait.flag + i, epoch)];
              EXPECT_EQ(flag_reached(value, use_of_epoch(epoch) * wait.count), step <= 0) << start << " " << step;
              ++waits;
            }
          }
        };
        for (const Role role : {Role::kCompute, Role::kIntra, Role::kSend, Role::kRecv}) {
          for (std::int32_t lane = 0; lane < source.plan().lanes(role); ++lane) {
            for (std::int64_t i = 0; i < source.count(rank, role, lane); ++i) {
              const Task task = source.task(rank, role, lane, i);
              if (task.action == Action::kNone) continue;
              for (const Wait& wait : task.waits) check(wait);
            }
          }
        }
        check(source.completion(rank));
        EXPECT_GT(waits, 0);
      }
    }
  }
}

}  // namespace
}  // namespace mkernel
