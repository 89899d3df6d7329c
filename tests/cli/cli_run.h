// Runs the program in this process and keeps what it said.
#pragma once
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_cli.h"

namespace mkernel::cli {

struct CliRun {
  int code = 0;
  std::string out;
  std::string err;
};

inline CliRun run(const std::vector<std::string>& args, bool parse_only = false) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = run_cli(args, out, err, parse_only);
  return {code, out.str(), err.str()};
}

// "a b c" as arguments.
inline std::vector<std::string> words(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

inline CliRun run(const std::string& line) { return run(words(line)); }

}  // namespace mkernel::cli
