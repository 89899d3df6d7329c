#include "ops/attention_spec.h"

#include <fmt/format.h>

#include <cmath>

#include "exec/cuda/attention_config.h"
#include "exec/cuda/attention_table.h"
#include "plan/attention_tiling.h"
#include "plan/ring_attention.h"

namespace mkernel {
namespace {

Status check_options(const AttentionOptions& options) {
  if (options.dtype != Dtype::kBf16 && options.dtype != Dtype::kFp16 && options.dtype != Dtype::kFp32) {
    return bad_argument(
        fmt::format("dtype is {}: bf16 (0), fp16 (1) or fp32 (2) is accepted", static_cast<int>(options.dtype)));
  }
  if (options.bm < 0) return bad_argument(fmt::format("bm is {}: it must be positive, or 0 to be chosen", options.bm));
  if (options.chunk_rows < 0) {
    return bad_argument(fmt::format("chunk_rows is {}: it must be positive, or 0 to be chosen", options.chunk_rows));
  }
  if (options.slot_rounds < -1) {
    return bad_argument(
        fmt::format("slot_rounds is {}: it must be positive, 0 to be chosen or -1 for all", options.slot_rounds));
  }
  if (options.packed && options.batch != 1) {
    return bad_argument(fmt::format("batch is {}: packed sequences stand in one batch", options.batch));
  }
  return Ok{};
}

}  // namespace

Result<PlanSpec> make_attention_spec(const Topology& topo, const AttentionOptions& options) {
  if (Status status = check_options(options); !status.ok()) return status.error();
  PlanSpec spec;
  spec.op = Op::kRingAttention;
  spec.topo = topo;
  spec.dtype = spec.partial = options.dtype;
  AttentionSpec& a = spec.attention;
  a.batch = options.batch;
  a.heads = options.heads;
  a.kv_heads = options.kv_heads == 0 ? options.heads : options.kv_heads;
  a.dim = options.dim;
  a.seq_q = options.seq_q;
  a.seq_k = options.seq_k == -1 ? options.seq_q : options.seq_k;
  a.zigzag = options.zigzag;
  a.packed = options.packed;
  a.mask = {options.causal, options.window_left, options.window_right};
  a.scale = static_cast<float>(options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(a.dim)));
  if (Status status = validate_attention_shape(spec); !status.ok()) return status.error();
  spec.tiling = choose_attention_tiling(spec);
  if (options.bm > 0) spec.tiling.bm = options.bm;
  if (options.chunk_rows > 0) spec.tiling.chunk_rows = options.chunk_rows;
  if (options.slot_rounds > 0) a.slot_rounds = options.slot_rounds;
  if (Status status = validate_attention(spec); !status.ok()) return status.error();
  // A call that is not fused takes in everything before anything is read.
  if (options.slot_rounds == 0 && options.fused) a.slot_rounds = choose_slot_rounds(spec);
  const RingAttentionPlan plan = RingAttentionPlan::make(spec);
  if (!options.fused && plan.depth < plan.rounds) {
    return bad_argument(
        fmt::format("slot_rounds is {} and fused is false: all communication before all arithmetic "
                    "wants slots for all {} rounds",
                    options.slot_rounds, plan.rounds));
  }
  return spec;
}

Result<PlanSpec> make_gpu_attention_spec(const Topology& topo, const AttentionOptions& options) {
  AttentionOptions on_gpu = options;
  if (options.bm == 0) on_gpu.bm = kAttentionRows;
  if (options.slot_rounds == 0) on_gpu.slot_rounds = -1;
  Result<PlanSpec> spec = make_attention_spec(topo, on_gpu);
  if (!spec.ok()) return spec;
  if (Status status = validate_gpu_attention(*spec); !status.ok()) return status.error();
  return spec;
}

}  // namespace mkernel
