#include "exec/key_ranges.h"

#include <algorithm>

namespace mkernel {
namespace {

// The sequence that query `position` belongs to; those without queries are passed over.
std::int32_t sequence_of(const PackedEnds& ends, std::int64_t position) {
  const std::int32_t* first = ends.q + 1;
  return static_cast<std::int32_t>(std::upper_bound(first, first + ends.sequences, position) - first);
}

}  // namespace

void fill_key_ranges(const AttentionSpec& spec, const PackedEnds& ends, const SequencePart& queries,
                     const SequencePart& keys, KeyRange* ranges) {
  std::int32_t sequence = spec.packed ? sequence_of(ends, queries.begin) : 0;
  for (std::int64_t i = 0; i < queries.count; ++i) {
    const std::int64_t query = queries.begin + i;
    KeyRange range;
    if (spec.packed) {
      while (query >= ends.q[sequence + 1]) ++sequence;
      const std::int64_t q0 = ends.q[sequence];
      const std::int64_t k0 = ends.k[sequence];
      range = spec.mask.sees(query - q0, 1, ends.q[sequence + 1] - q0, ends.k[sequence + 1] - k0);
      range = {range.begin + k0, range.end + k0};
    } else {
      range = spec.mask.sees(query, 1, spec.seq_q, spec.seq_k);
    }
    ranges[i].begin = std::clamp<std::int64_t>(range.begin - keys.begin, 0, keys.count);
    ranges[i].end = std::clamp<std::int64_t>(range.end - keys.begin, ranges[i].begin, keys.count);
  }
}

}  // namespace mkernel
