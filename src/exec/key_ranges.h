// Which keys each query of a tile sees, row by row: the mask of the plan, and the ends of packed sequences that a call
// brings.
#pragma once
#include "mkernel/attention.h"
#include "plan/attention_spec.h"

namespace mkernel {

// `ranges[i]`: which of the keys [keys.begin, keys.begin + keys.count) query queries.begin + i sees, counted from the
// first of them. Positions are those in the whole sequence.
void fill_key_ranges(const AttentionSpec& spec, const AttentionArguments& arguments, const SequencePart& queries,
                     const SequencePart& keys, KeyRange* ranges);

}  // namespace mkernel
