// The options of one command in one table: CLI11 takes the arguments apart, the table checks them and writes --help.
#pragma once
#include <functional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/result.h"

namespace mkernel::cli {

class OptionSet {
 public:
  // Takes the text of a value; refuses it with a sentence that names the option.
  using Apply = std::function<Status(const std::string& text)>;

  // `usage` is the line after "usage: ", `summary` what the command does.
  OptionSet(std::string usage, std::string summary);

  // Options that follow stand under this title in the help.
  void group(std::string title);
  void positional(std::string name, std::string help, Apply apply);
  void value(std::string name, std::string metavar, std::string help, Apply apply);
  void flag(std::string name, std::string help, bool* target);
  // Text below the options: examples, units.
  void footer(std::string text);

  enum class Outcome { kParsed, kHelpWanted };
  // Calls the Apply functions in the order of the table. Stops at the first word that cannot be taken.
  Result<Outcome> parse(std::span<const std::string> args);

  // Whether the last parse saw this option.
  bool given(const std::string& name) const { return given_.count(name) > 0; }
  std::size_t given_count() const { return given_.size(); }
  std::string help() const;

 private:
  enum class Kind { kPositional, kValue, kFlag };
  struct Option {
    Kind kind;
    std::string name;
    std::string metavar;
    std::string help;
    std::string group;
    Apply apply;
    bool* flag = nullptr;
  };

  Status refuse_unknown(std::span<const std::string> unknown) const;
  static Status refuse_missing(const Option& option);
  const Option* find(std::string_view name) const;

  std::string usage_;
  std::string summary_;
  std::string footer_;
  std::string group_ = "options";
  std::vector<Option> options_;
  std::set<std::string> given_;
};

}  // namespace mkernel::cli
