#include "cli/run_cli.h"

#include <unistd.h>

#include <iostream>
#include <new>

#include "cli/args.h"
#include "cli/commands.h"
#include "cli/console.h"

namespace mkernel::cli {
namespace {

struct Execute {
  Console& console;
  ExitCode operator()(const TextArgs& args) const {
    console.out() << args.text << std::flush;
    return ExitCode::kGood;
  }
  ExitCode operator()(const RunArgs& args) const { return run_command(args, console); }
  ExitCode operator()(const SimArgs& args) const { return sim_command(args, console); }
  ExitCode operator()(const ExploreArgs& args) const { return explore_command(args, console); }
  ExitCode operator()(const PlanArgs& args) const { return plan_command(args, console); }
  ExitCode operator()(const VerifyArgs& args) const { return verify_command(args, console); }
  ExitCode operator()(const BenchArgs& args) const { return bench_command(args, console); }
  ExitCode operator()(const InfoArgs& args) const { return info_command(args, console); }
};

}  // namespace

int run_cli(std::span<const std::string> args, std::ostream& out, std::ostream& err, bool parse_only) {
  Console console(out, err, &err == &std::cerr && isatty(STDERR_FILENO) == 1);
  const auto command = parse_args(args);
  if (!command) return static_cast<int>(console.fail(command.error()));
  if (parse_only) return 0;
  try {
    const ExitCode code = std::visit(Execute{console}, *command);
    if (!out.flush()) return static_cast<int>(console.fail({ErrorKind::kIo, "standard output cannot be written"}));
    return static_cast<int>(code);
  } catch (const std::bad_alloc&) {
    return static_cast<int>(console.fail({ErrorKind::kIo, "memory ran out: take smaller sizes or fewer ranks"}));
  }
}

}  // namespace mkernel::cli
