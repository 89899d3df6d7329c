// What ring_attention needs on a rank's GPU beside what all operators have: its tables in GPU memory, and the argument
// of a launch. Included by .cu files only.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "exec/cuda/attention_kernel_table.h"
#include "exec/cuda/attention_table.h"
#include "mkernel/attention.h"
#include "plan/heap_layout.h"

namespace mkernel {

// Bytes from the start of a block of the rank's memory, each aligned to 256.
struct AttentionMemory {
  std::int64_t tiles = 0;
  std::int64_t tile_begin = 0;
  std::int64_t steps = 0;
  std::int64_t rows_state = 0;
  std::int64_t ends = 0;  // of packed sequences: those of Q, then those of K
  std::int64_t bytes = 0;
};

// How many packed sequences a call may bring.
std::int64_t most_sequences(const AttentionSpec& spec);

AttentionMemory place_attention(const PlanSpec& spec, const AttentionTable& table);

// Fills the block at `base`, and the parts of `call` that are the same for all launches. `heap` is the rank's memory.
Status fill_attention(const Plan& plan, std::int32_t rank, const AttentionTable& table, const AttentionMemory& at,
                      std::byte* base, const std::byte* heap, cudaStream_t stream, AttentionCall& call);

// Completes `call` for the caller's tensors. Errors: kBadArgument, naming what TMA cannot read.
Status take_tensors(const Plan& plan, std::int32_t rank, const AttentionArguments& arguments, AttentionCall& call);

// Copies the ends of packed sequences to where `call` has them, in the order of `stream`.
cudaError_t upload_ends(const Plan& plan, const AttentionArguments& arguments, const AttentionCall& call,
                        cudaStream_t stream);

}  // namespace mkernel
