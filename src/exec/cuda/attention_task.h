// What the attention kernel reads: a rank's part of a ring_attention plan as tables in GPU memory.
//
// A compute task of the plan is a pair (step, tile): which keys come step-th is the same for all tiles. So the device
// holds the two factors, and each CTA a list of the tiles that are its own from their first step to their last
// (docs/decisions/0013-ring-attention-on-gpus.md). Copies and network writes are rows of their own.
#pragma once
#include <cstdint>

#include "exec/cuda/device_task.h"

namespace mkernel {

// A tile of queries.
struct alignas(16) AttentionTile {
  std::int32_t token = 0;  // the first, counted on its rank
  std::int32_t rows = 0;   // at least 1
  std::int32_t head = 0;
  std::int32_t batch = 0;
  std::int32_t kv_head = 0;
  std::int32_t position = 0;  // of the first query in the whole sequence
  std::int32_t number = 0;    // in the plan
  std::int32_t unused = 0;
};
static_assert(sizeof(AttentionTile) == 32);

// A run of keys that is folded into every tile.
struct alignas(16) AttentionStep {
  std::int32_t position = 0;  // of the first key in the whole sequence
  std::int32_t keys = 0;
  std::int32_t row = 0;     // own keys: their token on the rank; a chunk: its first row in kKv
  std::int32_t own = 0;     // not 0: the caller's K and V
  std::uint32_t flag = 0;   // of the rank's heap, to wait for
  std::uint32_t count = 0;  // raises per use; 0: no wait
  std::uint32_t unused[2] = {};
};
static_assert(sizeof(AttentionStep) == 32);

// The caller's tensor: strides in elements.
struct AttentionView {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

// What a query sees, where sequences are not packed; see AttentionMask. Positions fit 30 bits.
struct AttentionBand {
  std::int32_t left = 0;   // keys before that beside it
  std::int32_t right = 0;  // keys behind it
  std::int32_t shift = 0;  // from a query's position to that of the key beside it
  std::int32_t keys = 0;   // of the whole sequence
};

}  // namespace mkernel
