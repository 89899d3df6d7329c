// Which keys each query of a tile sees, row by row: the mask of the plan, and the ends of packed sequences that a call
// brings.
#pragma once
#include "mkernel/attention.h"
#include "plan/attention_spec.h"

namespace mkernel {

// The ends of packed sequences, as AttentionArguments has them. Not looked at where the plan is not for packed ones.
struct PackedEnds {
  const std::int32_t* q = nullptr;
  const std::int32_t* k = nullptr;
  std::int32_t sequences = 0;
};

// `ranges[i]`: which of the keys [keys.begin, keys.begin + keys.count) query queries.begin + i sees, counted from the
// first of them. Positions are those in the whole sequence.
void fill_key_ranges(const AttentionSpec& spec, const PackedEnds& ends, const SequencePart& queries,
                     const SequencePart& keys, KeyRange* ranges);

}  // namespace mkernel
