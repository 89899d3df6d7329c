// How sequences are divided over ranks, for callers.
#include <cstring>

#include "mkernel/attention.h"
#include "plan/attention_spec.h"

namespace mkernel {

std::vector<SequencePart> sequence_parts(std::int64_t tokens, int ranks, int rank, bool zigzag) {
  const SequenceSplit split{tokens, ranks, zigzag};
  std::vector<SequencePart> parts;
  for (std::int32_t segment = 0; segment < split.segments(); ++segment) {
    parts.push_back({split.begin(rank, segment), split.size(rank, segment)});
  }
  return parts;
}

void split_sequence(const void* whole, std::int64_t tokens, std::int64_t row_bytes, int ranks, int rank, bool zigzag,
                    void* part) {
  auto* to = static_cast<std::byte*>(part);
  for (const SequencePart& run : sequence_parts(tokens, ranks, rank, zigzag)) {
    const auto bytes = static_cast<std::size_t>(run.count * row_bytes);
    if (bytes == 0) continue;
    std::memcpy(to, static_cast<const std::byte*>(whole) + run.begin * row_bytes, bytes);
    to += bytes;
  }
}

void join_sequence(const void* part, std::int64_t tokens, std::int64_t row_bytes, int ranks, int rank, bool zigzag,
                   void* whole) {
  const auto* from = static_cast<const std::byte*>(part);
  for (const SequencePart& run : sequence_parts(tokens, ranks, rank, zigzag)) {
    const auto bytes = static_cast<std::size_t>(run.count * row_bytes);
    if (bytes == 0) continue;
    std::memcpy(static_cast<std::byte*>(whole) + run.begin * row_bytes, from, bytes);
    from += bytes;
  }
}

}  // namespace mkernel
