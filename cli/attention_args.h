// The options of ring_attention, which stand beside those of the GEMM operators in every command that takes both.
#pragma once
#include "cli/args.h"
#include "cli/option_set.h"

namespace mkernel::cli {

// What `run` and `sim` take when nothing is given.
struct AttentionDefaults {
  std::int64_t tokens = 1024;
  std::int64_t heads = 4;
  std::int64_t dim = 64;
};

// `attention` outlives the set.
void add_attention(OptionSet& options, AttentionOptions& attention, const AttentionDefaults& defaults);

// Takes over what both kinds of operator have, and refuses options of the kind that was not asked for.
Status settle_attention(const OptionSet& options, ProblemArgs& problem);

}  // namespace mkernel::cli
