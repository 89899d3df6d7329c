#include "cli/values.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>

namespace mkernel::cli {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 55;  // what plan/tiling.h: validate accepts
constexpr std::size_t kLongestQuote = 60;
constexpr std::size_t kLongestSuggested = 40;

// All of `text` as a number in base 10, without sign, white space or prefix.
template <class T>
std::errc parse_digits(std::string_view text, T& value) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return std::errc::invalid_argument;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return error;
  return end == text.data() + text.size() ? std::errc{} : std::errc::invalid_argument;
}

// Levenshtein's distance.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, changed});
    }
  }
  return row[b.size()];
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

struct OpName {
  std::string_view name;
  std::string_view alias;
  Op op;
};
constexpr std::array<OpName, kOpCount> kOpNames = {{
    {op_name(Op::kAllGatherGemm), "ag_gemm", Op::kAllGatherGemm},
    {op_name(Op::kGemmReduceScatter), "gemm_rs", Op::kGemmReduceScatter},
    {op_name(Op::kGemmAllReduce), "gemm_ar", Op::kGemmAllReduce},
    {op_name(Op::kRingAttention), "ring_attn", Op::kRingAttention},
    {op_name(Op::kRingAttentionBackward), "ring_attn_bwd", Op::kRingAttentionBackward},
}};

}  // namespace

std::string quote(std::string_view text) {
  std::string_view head = text;
  std::string_view tail;
  if (text.size() > kLongestQuote) {
    head = text.substr(0, kLongestQuote - 20);
    tail = text.substr(text.size() - 15);
  }
  std::string result = "'";
  const auto append = [&](std::string_view part) {
    for (const char c : part) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x20 || byte >= 0x7f) {
        result += fmt::format("\\x{:02x}", byte);
      } else {
        result += c;
      }
    }
  };
  append(head);
  if (!tail.empty()) {
    result += "...";
    append(tail);
  }
  return result + "'";
}

std::string suggestion(std::string_view text, std::span<const std::string_view> candidates) {
  if (text.size() > kLongestSuggested) return {};
  std::size_t best = std::numeric_limits<std::size_t>::max();
  std::string_view name;
  for (const std::string_view candidate : candidates) {
    const std::size_t d = distance(text, candidate);
    if (d < best) {
      best = d;
      name = candidate;
    }
  }
  // Two slips, or one in three letters of a long word; more than that is another word.
  if (name.empty() || best > std::max<std::size_t>(2, name.size() / 3) || best >= name.size()) return {};
  return fmt::format(" (did you mean '{}'?)", name);
}

std::string one_of(std::span<const std::string_view> names) {
  std::string result;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) result += i + 1 == names.size() ? " or " : ", ";
    result += names[i];
  }
  return result;
}

Result<std::int64_t> parse_size(std::string_view option, std::string_view text) {
  const auto refuse = [&] {
    return bad_argument(
        fmt::format("{} is {}: it must be a whole number from 0 to 2^55, such as 4096 or 4k (k is x 1024, "
                    "m is x 1024 x 1024)",
                    option, quote(text)));
  };
  std::string_view digits = text;
  std::int64_t unit = 1;
  if (!digits.empty()) {
    const char last = digits.back();
    if (last == 'k' || last == 'K') unit = 1024;
    if (last == 'm' || last == 'M') unit = 1024 * 1024;
    if (unit != 1) digits.remove_suffix(1);
  }
  std::int64_t value = 0;
  if (parse_digits(digits, value) != std::errc{} || value > kMaxSize / unit) return refuse();
  return value * unit;
}

Result<std::int64_t> parse_count(std::string_view option, std::string_view text, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  if (parse_digits(text, value) != std::errc{} || value < low || value > high) {
    return bad_argument(
        fmt::format("{} is {}: it must be a whole number from {} to {}", option, quote(text), low, high));
  }
  return value;
}

Result<std::uint64_t> parse_seed(std::string_view option, std::string_view text) {
  std::uint64_t value = 0;
  if (parse_digits(text, value) != std::errc{}) {
    return bad_argument(fmt::format("{} is {}: it must be a whole number from 0 to 2^64 - 1", option, quote(text)));
  }
  return value;
}

Result<double> parse_number(std::string_view option, std::string_view text, double low, double high,
                            std::string_view unit) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(value >= low && value <= high)) {
    return bad_argument(
        fmt::format("{} is {}: it must be a number from {} to {} ({})", option, quote(text), low, high, unit));
  }
  return value == 0 ? 0.0 : value;  // no -0
}

Result<std::size_t> parse_choice(std::string_view option, std::string_view text,
                                 std::span<const std::string_view> names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    return bad_argument(
        fmt::format("{} is {}: it must be {}{}", option, quote(text), one_of(names), suggestion(text, names)));
  }
  return static_cast<std::size_t>(found - names.begin());
}

Result<Op> parse_op(std::string_view text) { return parse_op(text, {}); }

Result<Op> parse_op(std::string_view text, std::string_view other_word) {
  std::string word(text.substr(0, kLongestSuggested));
  std::replace(word.begin(), word.end(), '-', '_');
  std::vector<std::string_view> names;
  std::string list;
  for (const OpName& entry : kOpNames) {
    if (text.size() == word.size() && (word == entry.name || word == entry.alias)) return entry.op;
    names.push_back(entry.name);
    names.push_back(entry.alias);
    if (!list.empty()) list += &entry == &kOpNames.back() && other_word.empty() ? " or " : ", ";
    list += fmt::format("{} ({})", entry.name, entry.alias);
  }
  if (!other_word.empty()) {
    names.push_back(other_word);
    list += fmt::format(" or {}", other_word);
  }
  return bad_argument(fmt::format("operator {} is not known: it must be {}{}", quote(text), list,
                                  text.size() == word.size() ? suggestion(word, names) : ""));
}

Result<Dtype> parse_dtype(std::string_view option, std::string_view text) {
  static constexpr std::array<std::string_view, 3> kNames = {"bf16", "fp16", "fp32"};
  const auto index = parse_choice(option, text, kNames);
  if (!index) return index.error();
  return static_cast<Dtype>(*index);
}

Result<Partition> parse_partition(std::string_view option, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ',');
  std::array<int, 3> sms{};
  bool good = parts.size() == 3;
  for (std::size_t i = 0; good && i < 3; ++i) good = parse_digits(parts[i], sms[i]) == std::errc{} && sms[i] <= 1 << 20;
  if (!good) {
    return bad_argument(
        fmt::format("{} is {}: it must be three whole numbers COMPUTE,INTRA,RECV that add up to --sms, "
                    "such as 100,16,16",
                    option, quote(text)));
  }
  return Partition{sms[0], sms[1], sms[2]};
}

Result<LinkChoice> parse_link(std::string_view option, std::string_view text) {
  if (text == "none") return LinkChoice{};
  if (text == "balanced") return LinkChoice{{}, true};
  if (text == "ib") return LinkChoice{{50, 2, false}, false};
  if (text == "efa") return LinkChoice{{50, 15, true}, false};
  const auto refuse = [&] {
    static constexpr std::array<std::string_view, 4> kNames = {"none", "ib", "efa", "balanced"};
    return bad_argument(
        fmt::format("{} is {}: it must be none, ib, efa, balanced or GBPS[:LATENCY_US][:unordered], such "
                    "as 50:2, with GBPS from 0 to 1e6 and LATENCY_US from 0 to 1e9{}",
                    option, quote(text), suggestion(text, kNames)));
  };
  std::vector<std::string_view> parts = split(text, ':');
  LinkChoice choice;
  if (parts.size() > 1 && parts.back() == "unordered") {
    choice.link.unordered = true;
    parts.pop_back();
  }
  if (parts.size() > 2) return refuse();
  const auto bandwidth = parse_number(option, parts[0], 0, 1e6, "GB/s");
  if (!bandwidth) return refuse();
  choice.link.gigabytes_per_s = *bandwidth;
  if (parts.size() == 2) {
    const auto latency = parse_number(option, parts[1], 0, 1e9, "us");
    if (!latency) return refuse();
    choice.link.latency_us = *latency;
  }
  return choice;
}

Result<SeedRange> parse_seed_range(std::string_view option, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  SeedRange range;
  constexpr std::int64_t kMaxSeeds = 1'000'000'000;
  if (parts.size() != 2 || parse_digits(parts[0], range.first) != std::errc{} ||
      parse_digits(parts[1], range.count) != std::errc{} || range.count < 1 || range.count > kMaxSeeds ||
      range.first > std::numeric_limits<std::uint64_t>::max() - static_cast<std::uint64_t>(range.count)) {
    return bad_argument(
        fmt::format("{} is {}: it must be FIRST:COUNT with COUNT from 1 to 10^9, such as 1:500", option, quote(text)));
  }
  return range;
}

Result<std::vector<std::string>> parse_names(std::string_view option, std::string_view text,
                                             std::span<const std::string_view> names) {
  std::vector<std::string> result;
  if (text == "none") return result;
  if (text == "all") {
    result.assign(names.begin(), names.end());
    return result;
  }
  for (const std::string_view part : split(text, ',')) {
    const auto found = std::find(names.begin(), names.end(), part);
    if (found == names.end()) {
      return bad_argument(fmt::format("{} names {}: it must be all, none or a list of {}, divided by commas{}", option,
                                      quote(part), one_of(names), suggestion(part, names)));
    }
    if (std::find(result.begin(), result.end(), part) == result.end()) result.emplace_back(part);
  }
  return result;
}

}  // namespace mkernel::cli
