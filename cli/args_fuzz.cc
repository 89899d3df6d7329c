// Any list of arguments, divided by newlines, is either taken or refused with one line and exit code 2.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "cli/run_cli.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> args;
  std::istringstream text(std::string(reinterpret_cast<const char*>(data), size));
  for (std::string line; std::getline(text, line);) args.push_back(line);

  std::ostringstream out;
  std::ostringstream err;
  const int code = mkernel::cli::run_cli(args, out, err, true);
  const std::string message = err.str();
  MK_CHECK(code == 0 || code == 2);
  MK_CHECK(out.str().empty());
  MK_CHECK_OP(std::count(message.begin(), message.end(), '\n'), ==, code == 2 ? 1 : 0);
  const bool printable =
      std::all_of(message.begin(), message.end(), [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7f); });
  MK_CHECK(printable);
  MK_CHECK(message.size() < 2000);
  return 0;
}
