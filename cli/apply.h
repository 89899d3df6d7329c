// What the tables of options share: functions that take the text of a value and store it.
#pragma once
#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "cli/args.h"
#include "cli/option_set.h"
#include "cli/values.h"

namespace mkernel::cli {

// Stores what `parse` makes of the text in `target`.
template <class T, class Parse>
OptionSet::Apply into(T& target, Parse parse) {
  return [&target, parse](const std::string& text) -> Status {
    auto value = parse(text);
    if (!value) return value.error();
    target = static_cast<T>(std::move(value).value());
    return Ok{};
  };
}
inline OptionSet::Apply size_into(const char* option, std::int64_t& target) {
  return into(target, [option](const std::string& text) { return parse_size(option, text); });
}
template <class T>
OptionSet::Apply count_into(const char* option, T& target, std::int64_t low, std::int64_t high) {
  return into(target, [=](const std::string& text) { return parse_count(option, text, low, high); });
}
inline OptionSet::Apply path_into(const char* option, std::filesystem::path& target) {
  return [option, &target](const std::string& text) -> Status {
    if (text.empty() || text.find('\0') != std::string::npos || text.size() > 4000) {
      return bad_argument(fmt::format("{} is {}: it must be a path of 1 to 4000 characters", option, quote(text)));
    }
    target = text;
    return Ok{};
  };
}

// Parses; a wish for help ends it with the help text.
inline Result<std::optional<TextArgs>> parse_or_help(OptionSet& options, std::span<const std::string> args) {
  const auto outcome = options.parse(args);
  if (!outcome) return outcome.error();
  if (*outcome == OptionSet::Outcome::kHelpWanted) return std::optional(TextArgs{options.help()});
  return std::optional<TextArgs>();
}

}  // namespace mkernel::cli
