// Which operator the n-th launch of each rank was. All ranks of a world launch the same operators in the same order;
// one that does not is told so at once, instead of hanging until a deadline.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace mkernel {

class LaunchLog {
 public:
  // Launches by which the fastest rank may be ahead of the slowest.
  static constexpr std::uint64_t kCapacity = 4096;

  struct Entry {
    std::uint32_t op = 0;
    std::int32_t rank = 0;  // that was the first to make this launch
  };

  explicit LaunchLog(std::int32_t world) : entries_(kCapacity), counts_(static_cast<std::size_t>(world)) {}

  std::uint64_t count(std::int32_t rank) const { return counts_[rank]; }
  std::int32_t slowest_rank() const {
    return static_cast<std::int32_t>(std::min_element(counts_.begin(), counts_.end()) - counts_.begin());
  }
  // Whether the next launch of `rank` is one that the log has no room for.
  bool too_far_ahead(std::int32_t rank) const {
    return counts_[rank] == first_count_ && counts_[rank] >= kCapacity &&
           counts_[slowest_rank()] <= counts_[rank] - kCapacity;
  }

  // Notes that `rank` launches `op` next. When another rank launched something else in its place, returns that and
  // notes nothing.
  std::optional<Entry> note(std::int32_t rank, std::uint32_t op) {
    const std::uint64_t number = counts_[rank];
    Entry& entry = entries_[number % kCapacity];
    if (number == first_count_) {
      entry = {op, rank};
      ++first_count_;
    } else if (entry.op != op) {
      return entry;
    }
    ++counts_[rank];
    return std::nullopt;
  }

 private:
  std::vector<Entry> entries_;
  std::vector<std::uint64_t> counts_;  // launches by rank
  std::uint64_t first_count_ = 0;      // launches of the rank that is furthest ahead
};

}  // namespace mkernel
