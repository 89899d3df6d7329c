// The argument of the attention kernel.
#pragma once
#include <cuda.h>

#include "exec/cuda/attention_task.h"

namespace mkernel {

// What one launch brings along, and what stays the same.
struct AttentionCall {
  CUtensorMap q;  // (dim, tokens, heads, batch)
  CUtensorMap k;  // the same, own keys
  CUtensorMap v;
  CUtensorMap kv[2];  // (dim, rows) of kKv, by parity
  DeviceRank rank;    // its tasks: copies, then network writes; its lanes the same
  const AttentionTile* tiles = nullptr;
  const std::int32_t* tile_begin = nullptr;  // by CTA, and one more: its tiles
  const AttentionStep* steps = nullptr;
  float4* rows_state = nullptr;  // by tile and consumer thread: maxima and sums of weights of its two rows
  AttentionView k_view;          // for copies
  AttentionView v_view;
  AttentionView o_view;
  float* lse = nullptr;                  // (batch, heads, tokens); null: not wanted
  const std::int32_t* ends_q = nullptr;  // packed sequences: their ends, from 0; else null
  const std::int32_t* ends_k = nullptr;
  std::int32_t sequences = 0;
  AttentionBand band;
  std::int32_t step_count = 0;
  std::int32_t compute_ctas = 1;
  std::int32_t move_lanes = 0;  // of the lanes, the first
  std::int32_t send_lanes = 0;  // and those behind them
  std::int32_t dim = 0;
  std::int32_t heads = 1;
  std::int32_t kv_heads = 1;
  std::int32_t q_tokens = 0;  // of the rank
  std::int32_t k_tokens = 0;
  std::int32_t tiles_in_plan = 0;
  std::int64_t state_elements = 0;  // of a tile in kState
  float scale_log2 = 1;             // scale * log2(e)
};

}  // namespace mkernel
