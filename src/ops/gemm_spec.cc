#include "ops/gemm_spec.h"

#include <fmt/format.h>

#include "exec/cuda/tile_choice.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

// Whether a tiling can be chosen without overflow. validate() refuses whatever does not pass here, with a sentence.
bool can_choose(const PlanSpec& spec) {
  constexpr std::int64_t kMost = std::int64_t{1} << 55;
  const std::int64_t nodes = spec.topo.nodes;
  if (nodes < 1 || spec.topo.gpus < 1 || nodes * spec.topo.gpus > (1 << 16)) return false;
  const auto fits = [&](std::int64_t a, std::int64_t b) {
    return a >= 0 && b >= 0 && a <= kMost && b <= kMost && (a == 0 || b <= kMost / nodes / a);
  };
  return fits(spec.m, spec.n) && fits(spec.m, spec.k) && fits(spec.k, spec.n);
}

Status check_names(const GemmOptions& options) {
  if (static_cast<int>(options.op) >= kGemmOpCount) {
    return bad_argument(fmt::format("op is {}: {} (0), {} (1) or {} (2) is accepted", static_cast<int>(options.op),
                                    op_name(Op::kAllGatherGemm), op_name(Op::kGemmReduceScatter),
                                    op_name(Op::kGemmAllReduce)));
  }
  if (options.dtype != Dtype::kBf16 && options.dtype != Dtype::kFp16 && options.dtype != Dtype::kFp32) {
    return bad_argument(
        fmt::format("dtype is {}: bf16 (0), fp16 (1) or fp32 (2) is accepted", static_cast<int>(options.dtype)));
  }
  const struct {
    const char* name;
    int value;
  } cuts[] = {{"bm", options.bm},
              {"bn", options.bn},
              {"band", options.band},
              {"chunk_tiles", options.chunk_tiles},
              {"chunk_rows", options.chunk_rows},
              {"copy_rows", options.copy_rows}};
  for (const auto& cut : cuts) {
    if (cut.value < 0) {
      return bad_argument(fmt::format("{} is {}: it must be positive, or 0 to be chosen", cut.name, cut.value));
    }
  }
  return Ok{};
}

// `gpu_sms` 0: not for a GPU.
Result<PlanSpec> make_spec(const Topology& topo, const GemmOptions& options, int gpu_sms) {
  if (Status status = check_names(options); !status.ok()) return status.error();
  PlanSpec spec;
  spec.op = options.op;
  spec.topo = topo;
  spec.m = options.m;
  spec.n = options.n;
  spec.k = options.k;
  spec.dtype = options.dtype;
  spec.partial = options.fp32_partials ? Dtype::kFp32 : options.dtype;
  if (can_choose(spec)) spec.tiling = gpu_sms > 0 ? choose_gpu_tiling(spec, gpu_sms) : choose_tiling(spec);
  if (options.bm > 0) {
    spec.tiling.bm = options.bm;
    if (can_choose(spec)) spec.tiling.grid_shards = choose_grid_shards(spec, options.bm);
  }
  if (options.bn > 0) spec.tiling.bn = options.bn;
  if (options.band > 0) spec.tiling.band = options.band;
  if (options.chunk_tiles > 0) spec.tiling.chunk_tiles = options.chunk_tiles;
  if (options.chunk_rows > 0) {
    spec.tiling.chunk_rows = options.chunk_rows;
  } else if (options.bm > 0) {
    // The chunk that was chosen, in tiles of the height that was asked for.
    spec.tiling.chunk_rows =
        static_cast<std::int32_t>(ceil_div(spec.tiling.chunk_rows, std::int64_t{options.bm}) * options.bm);
  }
  if (options.copy_rows > 0) spec.tiling.copy_rows = options.copy_rows;
  if (Status status = validate(spec); !status.ok()) return status.error();
  return spec;
}

}  // namespace

Result<PlanSpec> make_gemm_spec(const Topology& topo, const GemmOptions& options) {
  return make_spec(topo, options, 0);
}

Result<PlanSpec> make_gpu_gemm_spec(const Topology& topo, const GemmOptions& options, int gpu_sms) {
  return make_spec(topo, options, gpu_sms);
}

}  // namespace mkernel
