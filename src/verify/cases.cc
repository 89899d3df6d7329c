#include "verify/cases.h"

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "plan/tiling.h"

namespace mkernel {
namespace {

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};
constexpr std::int32_t kWorlds[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 24};

// Around the sizes of tiles and instructions. Taken in steps that are coprime to their number, so that m, n and k of
// successive cases meet in ever new combinations.
constexpr std::int64_t kSizes[] = {129, 0, 64, 17, 257, 1, 128, 65, 8, 255, 15, 127, 7, 63, 16, 300, 33};
constexpr std::size_t kSizeCount = std::size(kSizes);

constexpr Tiling kTilings[] = {
    {.bm = 8, .bn = 16, .band = 2, .chunk_tiles = 2, .chunk_rows = 8, .copy_rows = 3, .pitch_align = 1},
    {.bm = 16, .bn = 8, .band = 3, .chunk_tiles = 5, .chunk_rows = 48, .copy_rows = 16, .pitch_align = 8},
    {.bm = 4, .bn = 64, .band = 1, .chunk_tiles = 1, .chunk_rows = 4, .copy_rows = 1, .pitch_align = 3},
    {.bm = 32, .bn = 32, .band = 7, .chunk_tiles = 3, .chunk_rows = 32, .copy_rows = 8, .pitch_align = 16},
    {.bm = 2, .bn = 128, .band = 4, .chunk_tiles = 7, .chunk_rows = 6, .copy_rows = 5, .pitch_align = 1},
};

struct Types {
  Dtype dtype;
  Dtype partial;
};
constexpr Types kTypes[] = {{Dtype::kBf16, Dtype::kBf16},
                            {Dtype::kBf16, Dtype::kFp32},
                            {Dtype::kFp16, Dtype::kFp16},
                            {Dtype::kFp32, Dtype::kFp32},
                            {Dtype::kFp16, Dtype::kFp32}};

// Deals out sizes, types and tilings, always in the same order.
class Dealer {
 public:
  PlanSpec deal(Op op, const Topology& topo) {
    PlanSpec spec;
    spec.op = op;
    spec.topo = topo;
    spec.m = next(m_, 3);
    spec.n = next(n_, 5);
    spec.k = next(k_, 7);
    ++dealt_;
    const Types& types = kTypes[dealt_ % std::size(kTypes)];
    spec.dtype = types.dtype;
    spec.partial = types.partial;
    // One in four as a user would get it.
    spec.tiling = dealt_ % 4 == 0 ? choose_tiling(spec) : kTilings[dealt_ % std::size(kTilings)];
    return spec;
  }

 private:
  static std::int64_t next(std::size_t& at, std::size_t step) {
    at = (at + step) % kSizeCount;
    return kSizes[at];
  }

  std::size_t m_ = 0;
  std::size_t n_ = 6;
  std::size_t k_ = 11;
  std::size_t dealt_ = 0;
};

// M below the world, and nothing to multiply: some ranks own no rows, no columns, or no slice of K.
PlanSpec scarce(Op op, const Topology& topo) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = topo;
  spec.m = topo.world() - 1;
  spec.n = topo.world() / 2;
  spec.k = topo.world() % 2 == 0 ? 0 : topo.world() - 1;
  spec.tiling = kTilings[0];
  return spec;
}

PlanSpec field_case(Op op, const Topology& topo, std::int64_t size) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = topo;
  spec.m = spec.n = spec.k = size;
  spec.tiling = choose_tiling(spec);
  return spec;
}

}  // namespace

std::vector<PlanSpec> field_cases() {
  constexpr Topology kTopologies[] = {{2, 8}, {4, 8}};
  // Global sizes. AG+GEMM is reported for N = M / 16 per GPU, GEMM+RS and GEMM+AR for K = M / 16 per GPU.
  constexpr std::int64_t kFieldSizes[] = {2048, 4096, 8192, 16384, 24576, 32768};
  std::vector<PlanSpec> cases;
  for (const Topology& topo : kTopologies) {
    for (const Op op : kOps) {
      for (const std::int64_t size : kFieldSizes) cases.push_back(field_case(op, topo, size));
    }
  }
  return cases;
}

std::vector<PlanSpec> small_cases() {
  constexpr int kPerTopology = 6;
  std::vector<PlanSpec> cases;
  Dealer dealer;
  for (const std::int32_t world : kWorlds) {
    for (std::int32_t nodes = 1; nodes <= world; ++nodes) {
      if (world % nodes != 0) continue;
      const Topology topo{nodes, world / nodes};
      for (const Op op : kOps) {
        for (int i = 0; i < kPerTopology; ++i) cases.push_back(dealer.deal(op, topo));
        cases.push_back(scarce(op, topo));
      }
    }
  }
  return cases;
}

std::vector<PlanSpec> standard_cases() {
  std::vector<PlanSpec> cases = small_cases();
  const std::vector<PlanSpec> field = field_cases();
  cases.insert(cases.end(), field.begin(), field.end());
  return cases;
}

}  // namespace mkernel
