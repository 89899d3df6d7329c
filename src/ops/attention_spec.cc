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

// All but the tiling and the slots.
Result<PlanSpec> make_shape(Op op, const Topology& topo, const AttentionOptions& options) {
  if (Status status = check_options(options); !status.ok()) return status.error();
  PlanSpec spec;
  spec.op = op;
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
  return spec;
}

// With the tiling chosen.
Result<PlanSpec> complete(PlanSpec spec, const AttentionOptions& options) {
  AttentionSpec& a = spec.attention;
  if (options.bm > 0) spec.tiling.bm = options.bm;
  if (options.chunk_rows > 0) spec.tiling.chunk_rows = options.chunk_rows;
  if (options.slot_rounds > 0) a.slot_rounds = options.slot_rounds;
  if (Status status = validate_attention(spec); !status.ok()) return status.error();
  // A call that is not fused takes in everything before anything is read.
  if (options.slot_rounds == 0 && options.fused) a.slot_rounds = choose_slot_rounds(spec);
  KvRing ring;
  ring.make_ring(spec, spec.op == Op::kRingAttentionBackward);
  if (!options.fused && ring.depth < ring.rounds) {
    return bad_argument(
        fmt::format("slot_rounds is {} and fused is false: all communication before all arithmetic "
                    "wants slots for all {} rounds",
                    options.slot_rounds, ring.rounds));
  }
  return spec;
}

}  // namespace

Result<PlanSpec> make_attention_spec(const Topology& topo, const AttentionOptions& options) {
  Result<PlanSpec> spec = make_shape(Op::kRingAttention, topo, options);
  if (!spec.ok()) return spec;
  spec->tiling = choose_attention_tiling(*spec);
  return complete(*spec, options);
}

Result<PlanSpec> make_backward_spec(const Topology& topo, const AttentionBackwardOptions& options) {
  Result<PlanSpec> spec = make_shape(Op::kRingAttentionBackward, topo, options);
  if (!spec.ok()) return spec;
  if (options.bn < 0) return bad_argument(fmt::format("bn is {}: it must be positive, or 0 to be chosen", options.bn));
  if (options.fp32_partials) spec->partial = Dtype::kFp32;
  spec->tiling = choose_backward_tiling(*spec);
  if (options.bn > 0) spec->tiling.bn = options.bn;
  return complete(*spec, options);
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
