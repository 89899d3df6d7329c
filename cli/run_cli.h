// The program without its process: what main() calls, and tests and fuzz targets too.
#pragma once
#include <ostream>
#include <span>
#include <string>

namespace mkernel::cli {

// `args` without the program's name. Returns the exit code: 0 good, 1 a check failed, 2 bad arguments (one line on
// `err`, nothing on `out`, nothing started), 3 the run failed. With `parse_only` good arguments do nothing.
int run_cli(std::span<const std::string> args, std::ostream& out, std::ostream& err, bool parse_only = false);

}  // namespace mkernel::cli
