#include "cli/option_set.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "cli/values.h"

namespace mkernel::cli {
namespace {

constexpr std::size_t kHelpColumn = 30;

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// `text` after `head`, which is padded to the help column; later lines of `text` are indented alike.
std::string help_row(const std::string& head, const std::string& text) {
  std::string row = "  " + head;
  row += row.size() < kHelpColumn ? std::string(kHelpColumn - row.size(), ' ') : "\n" + std::string(kHelpColumn, ' ');
  for (const char c : text) {
    row += c;
    if (c == '\n') row.append(kHelpColumn, ' ');
  }
  return row + "\n";
}

}  // namespace

OptionSet::OptionSet(std::string usage, std::string summary) : usage_(std::move(usage)), summary_(std::move(summary)) {}

void OptionSet::group(std::string title) { group_ = std::move(title); }

void OptionSet::positional(std::string name, std::string help, Apply apply) {
  options_.push_back({Kind::kPositional, std::move(name), "", std::move(help), "arguments", std::move(apply)});
}

void OptionSet::value(std::string name, std::string metavar, std::string help, Apply apply) {
  options_.push_back({Kind::kValue, std::move(name), std::move(metavar), std::move(help), group_, std::move(apply)});
}

void OptionSet::flag(std::string name, std::string help, bool* target) {
  options_.push_back({Kind::kFlag, std::move(name), "", std::move(help), group_, nullptr, target});
}

void OptionSet::footer(std::string text) { footer_ = std::move(text); }

const OptionSet::Option* OptionSet::find(std::string_view name) const {
  for (const Option& option : options_) {
    if (option.kind != Kind::kPositional && option.name == name) return &option;
  }
  return nullptr;
}

Status OptionSet::refuse_unknown(std::span<const std::string> unknown) const {
  std::vector<std::string_view> names = {"--help"};
  for (const Option& option : options_) {
    if (option.kind != Kind::kPositional) names.push_back(option.name);
  }
  for (const std::string& word : unknown) {
    if (word == "--") break;  // what follows are no options
    if (word.size() < 2 || word[0] != '-') continue;
    const std::string name = word.substr(0, word.find('='));
    return bad_argument(fmt::format("option {} is not known here{}; --help lists what is", quote(name),
                                    suggestion(name, names)));
  }
  // The first form is enough: a message is one line.
  return bad_argument(fmt::format("argument {} is one too many: the form is {}", quote(unknown[0]),
                                  usage_.substr(0, usage_.find('\n'))));
}

Status OptionSet::refuse_missing(const Option& option) {
  return bad_argument(fmt::format("{} has no value: give {} {}", option.name, option.name, option.metavar));
}

Result<OptionSet::Outcome> OptionSet::parse(std::span<const std::string> args) {
  given_.clear();
  CLI::App app;
  app.allow_extras();
  app.set_help_flag("-h,--help", "");
  struct Slot {
    const Option* option;
    CLI::Option* parsed;
    std::string text;
    bool set = false;
  };
  std::vector<Slot> slots(options_.size());  // CLI11 keeps pointers into it
  for (std::size_t i = 0; i < options_.size(); ++i) {
    Slot& slot = slots[i];
    slot.option = &options_[i];
    if (slot.option->kind == Kind::kFlag) {
      slot.parsed = app.add_flag(slot.option->name, slot.set, "")->disable_flag_override();
    } else {
      slot.parsed = app.add_option(slot.option->name, slot.text, "");
    }
  }

  for (const std::string& word : args) {
    if (word == "--") break;
    const Option* option = find(word.substr(0, word.find('=')));
    if (option != nullptr && option->kind == Kind::kFlag && word != option->name) {
      return bad_argument(fmt::format("{} takes no value, {} gives one", option->name, quote(word)));
    }
  }
  std::vector<std::string> reversed(args.rbegin(), args.rend());  // as CLI11 wants it
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {
    return Outcome::kHelpWanted;
  } catch (const CLI::Error& error) {
    // What is left for CLI11 to find: an option without its value, or twice.
    for (const Slot& slot : slots) {
      const std::string& name = slot.option->name;
      if (slot.option->kind == Kind::kFlag) continue;
      if (slot.parsed->count() > 1) {
        return bad_argument(fmt::format("{} is given {} times: give it once", name, slot.parsed->count()));
      }
      if (std::string_view(error.what()).starts_with(name + ":")) return refuse_missing(*slot.option).error();
    }
    return bad_argument(fmt::format("the arguments cannot be understood: {}", one_line(error.what())));
  }

  const std::vector<std::string> unknown = app.remaining();
  if (!unknown.empty()) return refuse_unknown(unknown).error();
  for (const Slot& slot : slots) {
    if (slot.parsed->count() == 0) continue;
    given_.insert(slot.option->name);
    if (slot.option->kind == Kind::kFlag) {
      *slot.option->flag = true;
    } else if (slot.option->kind == Kind::kValue && slot.text.starts_with("--")) {
      return refuse_missing(*slot.option).error();  // the next option was taken for the value
    } else if (const Status status = slot.option->apply(slot.text); !status) {
      return status.error();
    }
  }
  return Outcome::kParsed;
}

std::string OptionSet::help() const {
  std::string text = fmt::format("usage: {}\n\n{}\n", usage_, summary_);
  std::string group;
  for (const Option& option : options_) {
    if (option.group != group) {
      group = option.group;
      text += fmt::format("\n{}:\n", group);
    }
    text += help_row(option.metavar.empty() ? option.name : option.name + " " + option.metavar, option.help);
  }
  text += help_row("-h, --help", "this text");
  if (!footer_.empty()) text += "\n" + footer_ + "\n";
  return text;
}

}  // namespace mkernel::cli
