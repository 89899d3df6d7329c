// The commands. Each prints its result and returns its exit code.
#pragma once
#include "cli/args.h"
#include "cli/console.h"

namespace mkernel::cli {

ExitCode run_command(const RunArgs& args, Console& console);
ExitCode sim_command(const SimArgs& args, Console& console);
ExitCode explore_command(const ExploreArgs& args, Console& console);
ExitCode plan_command(const PlanArgs& args, Console& console);
ExitCode verify_command(const VerifyArgs& args, Console& console);
ExitCode bench_command(const BenchArgs& args, Console& console);
ExitCode info_command(const InfoArgs& args, Console& console);

}  // namespace mkernel::cli
