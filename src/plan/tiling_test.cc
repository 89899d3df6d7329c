#include "plan/tiling.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <utility>

#include "plan/plan.h"

namespace mkernel {
namespace {

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};

std::string text(const PlanSpec& spec) {
  return fmt::format("{} {}x{} m {} n {} k {} tiles {}x{} chunks {} tiles {} rows", op_name(spec.op), spec.topo.nodes,
                     spec.topo.gpus, spec.m, spec.n, spec.k, spec.tiling.bm, spec.tiling.bn, spec.tiling.chunk_tiles,
                     spec.tiling.chunk_rows);
}

PlanSpec good_spec(Op op = Op::kGemmAllReduce) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = {2, 4};
  spec.m = spec.n = spec.k = 512;
  spec.tiling = choose_tiling(spec);
  return spec;
}

// A size whose number of bits is evenly spread, up to `bits`.
std::int64_t random_size(std::mt19937_64& random, int bits) {
  const int length = static_cast<int>(random() % static_cast<unsigned>(bits + 1));
  return static_cast<std::int64_t>(random() & ((std::uint64_t{1} << length) - 1));
}

PlanSpec random_spec(std::mt19937_64& random, int bits) {
  PlanSpec spec;
  spec.op = kOps[random() % 3];
  spec.topo.nodes = static_cast<std::int32_t>(1 + random_size(random, 7));
  spec.topo.gpus = static_cast<std::int32_t>(1 + random_size(random, 4));
  spec.m = random_size(random, bits);
  spec.n = random_size(random, bits);
  spec.k = random_size(random, bits);
  spec.dtype = static_cast<Dtype>(random() % 3);
  spec.partial = random() % 2 == 0 ? Dtype::kFp32 : spec.dtype;
  return spec;
}

// What the rest of the project counts on once validate() has passed, in arithmetic that cannot overflow.
void expect_everything_fits(const PlanSpec& spec) {
  const Plan plan(spec);
  constexpr std::int64_t kInt32 = (std::int64_t{1} << 31) - 1;
  EXPECT_LE(plan.flag_count(), kInt32) << text(spec);
  const std::int32_t last_rank = spec.topo.world() - 1;
  for (const std::int32_t rank : {0, last_rank}) {
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
        const std::int64_t count = plan.count(rank, role, lane);
        EXPECT_GE(count, 0) << text(spec);
        EXPECT_LE(count, kInt32) << text(spec);
        if (role == Role::kSend && count > 0) {
          EXPECT_LT(send_id(plan, {lane, count - 1}), std::int64_t{1} << 24) << text(spec);
        }
      }
    }
  }
  __extension__ using Wide = __int128;
  Wide bytes = Wide{2} * plan.flag_count() * 4;
  for (int b = 0; b < kBufferCount; ++b) {
    const auto buffer = static_cast<Buffer>(b);
    EXPECT_GE(plan.buffer_elements(buffer), 0) << text(spec);
    bytes += Wide{2} * plan.buffer_elements(buffer) * dtype_bytes(plan.buffer_dtype(buffer));
  }
  EXPECT_TRUE(Wide{workspace_bytes(spec)} == bytes) << text(spec);
}

TEST(ChooseTiling, IsValidForThousandsOfRandomSpecs) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 5000; ++round) {
    PlanSpec spec = random_spec(random, 17);
    spec.tiling = choose_tiling(spec);
    const Status status = validate(spec);
    ASSERT_TRUE(status.ok()) << text(spec) << ": " << status.error().message;
    expect_everything_fits(spec);
  }
}

TEST(ChooseTiling, LargeMatricesGetLargeTilesAndChunksForTheNetwork) {
  for (const Op op : kOps) {
    PlanSpec spec = good_spec(op);
    spec.m = spec.n = spec.k = 32768;
    const Tiling tiling = choose_tiling(spec);
    EXPECT_EQ(tiling.bm, 128) << op_name(op);
    EXPECT_EQ(tiling.bn, 256) << op_name(op);
    const std::int64_t tiles_bytes = std::int64_t{tiling.chunk_tiles} * tiling.bm * tiling.bn * 2;
    EXPECT_GE(tiles_bytes, 256 * 1024) << op_name(op);
    EXPECT_LE(tiles_bytes, 1024 * 1024) << op_name(op);
  }
}

TEST(ChooseTiling, IsAFunctionOfWhatAllRanksShare) {
  const PlanSpec spec = good_spec();
  PlanSpec other = spec;
  other.tiling = {.bm = 16, .bn = 16, .band = 9, .chunk_tiles = 3, .chunk_rows = 16, .copy_rows = 1, .pitch_align = 1};
  const Tiling a = choose_tiling(spec);
  const Tiling b = choose_tiling(other);
  EXPECT_EQ(a.bm, b.bm);
  EXPECT_EQ(a.bn, b.bn);
  EXPECT_EQ(a.band, b.band);
  EXPECT_EQ(a.chunk_tiles, b.chunk_tiles);
  EXPECT_EQ(a.chunk_rows, b.chunk_rows);
  EXPECT_EQ(a.grid_shards, b.grid_shards);
}

TEST(ChooseGridShards, TakesAsManyAsFitIntoOneTileAndDealsThemEvenly) {
  const struct {
    Topology topo;
    std::int64_t m;
    std::int32_t bm;
    std::int32_t gather;
    std::int32_t scatter;
  } cases[] = {
      {{2, 4}, 16, 64, 8, 8},   {{2, 4}, 128, 64, 4, 4},   {{2, 4}, 128, 128, 4, 8},   {{2, 4}, 512, 128, 1, 1},
      {{2, 4}, 512, 64, 1, 1},  {{2, 4}, 1024, 128, 1, 1}, {{2, 4}, 16384, 128, 1, 1}, {{2, 4}, 1024, 1024, 1, 1},
      {{2, 4}, 0, 16, 8, 8},    {{1, 1}, 5, 64, 1, 1},     {{1, 8}, 170, 64, 2, 2},    {{1, 8}, 168, 64, 3, 3},
      {{4, 2}, 192, 128, 2, 4}, {{3, 1}, 3, 64, 3, 3},     {{3, 1}, 300, 128, 1, 1},  // whole tiles of their own
      {{3, 1}, 150, 128, 1, 2},  // all_gather_gemm with one GPU per node: of one node or of all
  };
  for (const auto& c : cases) {
    const std::string what = fmt::format("{} x {}, m {}, bm {}", c.topo.nodes, c.topo.gpus, c.m, c.bm);
    PlanSpec spec = good_spec(Op::kAllGatherGemm);
    spec.topo = c.topo;
    spec.m = c.m;
    EXPECT_EQ(choose_grid_shards(spec, c.bm), c.gather) << what;
    spec.op = Op::kGemmReduceScatter;
    EXPECT_EQ(choose_grid_shards(spec, c.bm), c.scatter) << what;
    spec.op = Op::kGemmAllReduce;
    EXPECT_EQ(choose_grid_shards(spec, c.bm), 1) << what;
  }
}

// Large matrices have the plans that they had before shards could share tiles.
TEST(ChooseTiling, ShardsOf65RowsAndMoreShareNothing) {
  for (const Op op : kOps) {
    for (const Topology topo : {Topology{1, 8}, Topology{2, 4}, Topology{3, 1}, Topology{4, 8}}) {
      for (const std::int64_t rows : {65, 128, 1000}) {
        PlanSpec spec = good_spec(op);
        spec.topo = topo;
        spec.m = rows * topo.world();
        EXPECT_EQ(choose_tiling(spec).grid_shards, 1) << text(spec);
      }
    }
  }
}

TEST(Validate, WhatPassesCannotOverflowWhateverTheTiling) {
  std::mt19937_64 random(13);
  int passed = 0;
  for (int round = 0; round < 20000; ++round) {
    PlanSpec spec = random_spec(random, 40);
    spec.tiling.bm = 1 << random() % 11;
    spec.tiling.bn = 1 << random() % 11;
    spec.tiling.band = static_cast<std::int32_t>(1 + random_size(random, 30));
    spec.tiling.chunk_tiles = static_cast<std::int32_t>(1 + random_size(random, 30));
    spec.tiling.chunk_rows = spec.tiling.bm * static_cast<std::int32_t>(1 + random_size(random, 19));
    spec.tiling.copy_rows = static_cast<std::int32_t>(1 + random_size(random, 30));
    spec.tiling.pitch_align = static_cast<std::int32_t>(1 + random() % 1024);
    spec.tiling.grid_shards = random() % 2 == 0 ? 1 : static_cast<std::int32_t>(1 + random_size(random, 7));
    if (!validate(spec).ok()) continue;
    ++passed;
    expect_everything_fits(spec);
  }
  EXPECT_GT(passed, 2000);
}

TEST(Validate, AcceptsZeroSizes) {
  for (const Op op : kOps) {
    for (int zero = 0; zero < 8; ++zero) {
      PlanSpec spec = good_spec(op);
      if (zero & 1) spec.m = 0;
      if (zero & 2) spec.n = 0;
      if (zero & 4) spec.k = 0;
      spec.tiling = choose_tiling(spec);
      EXPECT_TRUE(validate(spec).ok()) << text(spec);
    }
  }
}

// One sentence that names the argument and its value.
struct Refusal {
  const char* name;
  void (*spoil)(PlanSpec&);
  const char* says;
};

constexpr std::int64_t kHuge = std::int64_t{1} << 62;

const Refusal kRefusals[] = {
    {"no_nodes", [](PlanSpec& s) { s.topo.nodes = 0; }, "0 nodes x 4 GPUs"},
    {"no_gpus", [](PlanSpec& s) { s.topo.gpus = 0; }, "2 nodes x 0 GPUs"},
    {"negative_nodes", [](PlanSpec& s) { s.topo.nodes = -3; }, "-3 nodes"},
    {"both_negative",
     [](PlanSpec& s) {
       s.topo = {-2, -4};
     },
     "-2 nodes x -4 GPUs"},
    {"a_world_too_large",
     [](PlanSpec& s) {
       s.topo = {1 << 16, 2};
     },
     "65536 nodes x 2 GPUs"},
    {"a_world_that_overflows",
     [](PlanSpec& s) {
       s.topo = {1 << 30, 1 << 30};
     },
     "1073741824 nodes"},
    {"negative_m", [](PlanSpec& s) { s.m = -1; }, "m is -1"},
    {"negative_n", [](PlanSpec& s) { s.n = -7; }, "n is -7"},
    {"negative_k", [](PlanSpec& s) { s.k = INT64_MIN; }, "k is -9223372036854775808"},
    {"huge_m", [](PlanSpec& s) { s.m = kHuge; }, "m is 4611686018427387904"},
    {"huge_n", [](PlanSpec& s) { s.n = INT64_MAX; }, "n is 9223372036854775807"},
    {"huge_k", [](PlanSpec& s) { s.k = kHuge; }, "k is 4611686018427387904"},
    {"huge_a",
     [](PlanSpec& s) {
       s.m = s.k = kHuge >> 30;
       s.n = 1;
     },
     "A (m x k)"},
    {"huge_b",
     [](PlanSpec& s) {
       s.n = s.k = kHuge >> 30;
       s.m = 1;
     },
     "B (k x n)"},
    {"huge_c",
     [](PlanSpec& s) {
       s.n = s.m = kHuge >> 30;
       s.k = 1;
     },
     "C (m x n)"},
    {"bm_zero", [](PlanSpec& s) { s.tiling.bm = 0; }, "a tile of 0 x"},
    {"bm_odd", [](PlanSpec& s) { s.tiling.bm = 96; }, "a tile of 96 x"},
    {"bm_negative", [](PlanSpec& s) { s.tiling.bm = INT32_MIN; }, "a tile of -2147483648 x"},
    {"bn_large", [](PlanSpec& s) { s.tiling.bn = 2048; }, "x 2048"},
    {"band_zero", [](PlanSpec& s) { s.tiling.band = 0; }, "band is 0"},
    {"chunk_tiles_zero", [](PlanSpec& s) { s.tiling.chunk_tiles = 0; }, "chunk_tiles is 0"},
    {"chunk_tiles_negative", [](PlanSpec& s) { s.tiling.chunk_tiles = -8; }, "chunk_tiles is -8"},
    {"chunk_rows_zero", [](PlanSpec& s) { s.tiling.chunk_rows = 0; }, "chunk_rows is 0"},
    {"chunk_rows_odd", [](PlanSpec& s) { s.tiling.chunk_rows = s.tiling.bm + 1; }, "multiple of bm"},
    {"copy_rows_zero", [](PlanSpec& s) { s.tiling.copy_rows = 0; }, "copy_rows is 0"},
    {"pitch_align_zero", [](PlanSpec& s) { s.tiling.pitch_align = 0; }, "pitch_align is 0"},
    {"pitch_align_large", [](PlanSpec& s) { s.tiling.pitch_align = 1025; }, "pitch_align is 1025"},
    {"grid_shards_zero", [](PlanSpec& s) { s.tiling.grid_shards = 0; }, "grid_shards is 0"},
    {"grid_shards_without_shards", [](PlanSpec& s) { s.tiling.grid_shards = 2; }, "gemm_all_reduce"},
    {"grid_shards_of_part_of_a_node",
     [](PlanSpec& s) {
       s.op = Op::kGemmReduceScatter;
       s.tiling.grid_shards = 5;
     },
     "grid_shards is 5"},
    {"grid_shards_beyond_the_world",
     [](PlanSpec& s) {
       s.op = Op::kAllGatherGemm;
       s.tiling.grid_shards = 12;
     },
     "grid_shards is 12"},
    {"grid_shards_of_some_single_gpus",
     [](PlanSpec& s) {
       s.op = Op::kAllGatherGemm;
       s.topo = {3, 1};
       s.m = 3;
       s.tiling.grid_shards = 2;
     },
     "takes 1 or all 3"},
    {"grid_shards_taller_than_a_tile",
     [](PlanSpec& s) {
       s.op = Op::kGemmReduceScatter;
       s.tiling.grid_shards = 8;
     },
     "these have 512 rows"},
    {"partials_narrower",
     [](PlanSpec& s) {
       s.dtype = Dtype::kFp32;
       s.partial = Dtype::kBf16;
     },
     "bf16 for fp32"},
    {"partials_of_another_kind", [](PlanSpec& s) { s.partial = Dtype::kFp16; }, "fp16 for bf16"},
    {"too_many_tiles",
     [](PlanSpec& s) {
       s.m = s.n = 1 << 20;
       s.tiling.bm = s.tiling.bn = 1;
       s.tiling.chunk_rows = 1;
     },
     "more than 2^31 tasks"},
    {"too_many_sends",
     [](PlanSpec& s) {
       s.m = s.n = 1 << 15;
       s.tiling.bm = s.tiling.bn = 4;
       s.tiling.chunk_tiles = 1;
     },
     "more than the 2^24"},
};

class ValidateRefuses : public testing::TestWithParam<Refusal> {};

TEST_P(ValidateRefuses, WithASentenceThatNamesTheValue) {
  PlanSpec spec = good_spec();
  GetParam().spoil(spec);
  const Status status = validate(spec);
  ASSERT_FALSE(status.ok()) << text(spec);
  EXPECT_EQ(status.error().kind, ErrorKind::kBadArgument);
  EXPECT_NE(status.error().message.find(GetParam().says), std::string::npos) << status.error().message;
}

INSTANTIATE_TEST_SUITE_P(Specs, ValidateRefuses, testing::ValuesIn(kRefusals),
                         [](const testing::TestParamInfo<Refusal>& refusal) { return refusal.param.name; });

}  // namespace
}  // namespace mkernel
