// Words on the command line turned into values. A word that cannot be taken becomes one sentence that names the option,
// quotes the word and says what would be accepted.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/mkernel.h"

namespace mkernel::cli {

// 'text' for a message: control characters are escaped, the middle of long words is left out, so it is one line.
std::string quote(std::string_view text);

// " (did you mean 'x'?)" for the candidate that differs least, or nothing when none is close.
std::string suggestion(std::string_view text, std::span<const std::string_view> candidates);

// "a, b or c".
std::string one_of(std::span<const std::string_view> names);

// 0 to 2^55, plain digits or digits with k (x 1024) or m (x 1024 x 1024).
Result<std::int64_t> parse_size(std::string_view option, std::string_view text);

// A whole number from `low` to `high`.
Result<std::int64_t> parse_count(std::string_view option, std::string_view text, std::int64_t low, std::int64_t high);

Result<std::uint64_t> parse_seed(std::string_view option, std::string_view text);

// A decimal number from `low` to `high`; `unit` is for the message.
Result<double> parse_number(std::string_view option, std::string_view text, double low, double high,
                            std::string_view unit);

// The index of `text` in `names`.
Result<std::size_t> parse_choice(std::string_view option, std::string_view text,
                                 std::span<const std::string_view> names);

// gemm_all_reduce, gemm_ar, gemm-ar and so on.
Result<Op> parse_op(std::string_view text);
// The same, with words such as "all" offered in the message.
Result<Op> parse_op(std::string_view text, std::string_view other_word);

Result<Dtype> parse_dtype(std::string_view option, std::string_view text);

// "c,i,r".
Result<Partition> parse_partition(std::string_view option, std::string_view text);

struct LinkChoice {
  Link link;
  bool balanced = false;  // `link` is still to be measured
};
// none | ib | efa | balanced | GBPS[:LATENCY_US][:unordered].
Result<LinkChoice> parse_link(std::string_view option, std::string_view text);

struct SeedRange {
  std::uint64_t first = 1;
  std::int64_t count = 0;
};
// FIRST:COUNT.
Result<SeedRange> parse_seed_range(std::string_view option, std::string_view text);

// Names divided by commas. "all" gives all of them, "none" an empty list.
Result<std::vector<std::string>> parse_names(std::string_view option, std::string_view text,
                                             std::span<const std::string_view> names);

}  // namespace mkernel::cli
