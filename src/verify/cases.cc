#include "verify/cases.h"

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "plan/attention_tiling.h"
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
    if (dealt_ % 4 == 1) spec.tiling.grid_shards = choose_grid_shards(spec, spec.tiling.bm);
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

// Attention over `topo`, the `turn`-th: every mask, every sharing of heads, both divisions, few slots and all, lengths
// below the world and 0, unequal numbers of queries and keys.
PlanSpec attention_case(const Topology& topo, std::size_t turn) {
  constexpr std::int64_t kLengths[] = {37, 0, 130, 7, 64, 1, 99};
  constexpr AttentionMask kMasks[] = {{}, {true, -1, -1}, {true, 9, -1}, {false, 5, 3}, {false, 0, 0}, {false, -1, 2}};
  constexpr struct {
    std::int64_t batch, heads, kv_heads;
  } kHeads[] = {{1, 1, 1}, {1, 4, 2}, {2, 3, 1}, {1, 2, 2}, {2, 2, 1}};
  constexpr std::int64_t kRounds[] = {1, 0, 2, 3};
  PlanSpec spec;
  spec.op = Op::kRingAttention;
  spec.topo = topo;
  spec.dtype = spec.partial = kTypes[turn % std::size(kTypes)].dtype;
  AttentionSpec& a = spec.attention;
  a.seq_q = kLengths[turn % std::size(kLengths)];
  a.seq_k = turn % 3 == 2 ? kLengths[turn / 3 % std::size(kLengths)] : a.seq_q;
  const auto& heads = kHeads[turn % std::size(kHeads)];
  a.batch = heads.batch;
  a.heads = heads.heads;
  a.kv_heads = heads.kv_heads;
  a.dim = 8;
  a.mask = kMasks[turn % std::size(kMasks)];
  a.zigzag = turn % 4 < 2;
  a.packed = a.batch == 1 && turn % 7 == 3;
  a.slot_rounds = kRounds[turn / 2 % std::size(kRounds)];
  if (turn % 5 == 4) {
    spec.tiling = choose_attention_tiling(spec);
  } else {
    spec.tiling.bm = 4 << turn % 3;
    spec.tiling.chunk_rows = static_cast<std::int32_t>(1 + turn * 5 % 11);
  }
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

// Its backward, with other tiles of keys, and partial gradients in either type.
PlanSpec backward_case(const Topology& topo, std::size_t turn) {
  PlanSpec spec = attention_case(topo, turn);
  spec.op = Op::kRingAttentionBackward;
  if (turn % 3 == 0) spec.partial = Dtype::kFp32;
  if (turn % 5 == 4) {
    spec.tiling = choose_backward_tiling(spec);
  } else {
    spec.tiling.bn = static_cast<std::int32_t>(1 + turn * 3 % 7);
  }
  return spec;
}

// Eight query heads over one key head, as one GPU of a larger model has them.
PlanSpec attention_field_case(const Topology& topo, std::int64_t tokens, bool causal) {
  PlanSpec spec;
  spec.op = Op::kRingAttention;
  spec.topo = topo;
  AttentionSpec& a = spec.attention;
  a.heads = 8;
  a.dim = 128;
  a.seq_q = a.seq_k = tokens;
  a.mask.causal = a.zigzag = causal;
  a.slot_rounds = causal ? 2 : 0;
  spec.tiling = choose_attention_tiling(spec);
  return spec;
}

// Every way in which shards can share tiles of 64 rows, for fewer rows than ranks and for several rows each.
void add_shared(Op op, const Topology& topo, std::vector<PlanSpec>& cases) {
  for (const std::int64_t m : {std::int64_t{topo.world()} / 2, std::int64_t{2} * topo.world() + 1, std::int64_t{64}}) {
    PlanSpec spec;
    spec.op = op;
    spec.topo = topo;
    spec.m = m;
    spec.n = 3 * topo.world() + 1;
    spec.k = 40;
    spec.partial = cases.size() % 2 == 0 ? Dtype::kFp32 : Dtype::kBf16;
    spec.tiling = {.bm = 64, .bn = 8, .band = 1, .chunk_tiles = 2, .chunk_rows = 64, .copy_rows = 3, .pitch_align = 8};
    for (std::int32_t shards = 2; shards <= topo.world(); ++shards) {
      spec.tiling.grid_shards = shards;
      if (validate(spec)) cases.push_back(spec);
    }
  }
}

PlanSpec decode_case(Op op, const Topology& topo, std::int64_t m) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = topo;
  spec.m = m;
  spec.n = spec.k = 8192;
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
    for (const bool causal : {false, true}) {
      cases.push_back(attention_field_case(topo, 32768, causal));
      PlanSpec backward = cases.back();
      backward.op = Op::kRingAttentionBackward;
      backward.attention.seq_q = backward.attention.seq_k = 16384;
      backward.tiling = choose_backward_tiling(backward);
      cases.push_back(backward);
    }
  }
  return cases;
}

std::vector<PlanSpec> small_cases() {
  constexpr int kPerTopology = 6;
  constexpr int kAttentionPerTopology = 9;
  constexpr int kBackwardWorld = 15;  // a task for each pair of tiles: they are many
  std::vector<PlanSpec> cases;
  Dealer dealer;
  std::size_t attention_turn = 0;
  for (const std::int32_t world : kWorlds) {
    for (std::int32_t nodes = 1; nodes <= world; ++nodes) {
      if (world % nodes != 0) continue;
      const Topology topo{nodes, world / nodes};
      for (const Op op : kOps) {
        for (int i = 0; i < kPerTopology; ++i) cases.push_back(dealer.deal(op, topo));
        cases.push_back(scarce(op, topo));
        if (op != Op::kGemmAllReduce) add_shared(op, topo, cases);
      }
      for (int i = 0; i < kAttentionPerTopology; ++i) {
        if (topo.world() <= kBackwardWorld) cases.push_back(backward_case(topo, attention_turn));
        cases.push_back(attention_case(topo, attention_turn++));
      }
    }
  }
  // Few rows, as in decoding.
  for (const Op op : kOps) {
    for (const Topology& topo : {Topology{1, 8}, Topology{2, 4}, Topology{2, 8}, Topology{8, 1}}) {
      for (const std::int64_t m : {1, 16, 128, 512}) cases.push_back(decode_case(op, topo, m));
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
