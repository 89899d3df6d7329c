// mkernel sim --seeds: many small random worlds, to find mistakes.
#include <fmt/format.h>

#include <chrono>
#include <vector>

#include "cli/commands.h"
#include "cli/format.h"
#include "cli/machine.h"
#include "exec/sim/explore.h"

namespace mkernel::cli {
namespace {

constexpr std::int64_t kShownFailures = 10;  // the rest is only counted

std::string replay_command(const ExploreArgs& args, std::uint64_t seed) {
  return fmt::format("mkernel sim {} --seeds {}:1 --inject {}", args.op ? op_name(*args.op) : "all", seed,
                     args.inject_text);
}

}  // namespace

ExitCode explore_command(const ExploreArgs& args, Console& console) {
  const auto start = std::chrono::steady_clock::now();
  std::int64_t failures = 0;
  bool wrong = false;
  nlohmann::ordered_json shown = nlohmann::ordered_json::array();
  std::string only_scenario;
  {
    Progress progress(console, "starting");
    for (std::int64_t i = 0; i < args.seeds.count; ++i) {
      const std::uint64_t seed = args.seeds.first + static_cast<std::uint64_t>(i);
      progress.set(fmt::format("seed {} ({} of {}), {} failed", seed, i + 1, args.seeds.count, failures));
      const ExploreResult result = explore_seed(args.op, seed, args.injections);
      only_scenario = result.scenario;
      if (!result.failure) continue;
      wrong = wrong || result.failure->kind == ErrorKind::kCheckFailed;
      if (++failures > kShownFailures) continue;
      const std::string replay = replay_command(args, seed);
      shown.push_back({{"seed", seed},
                       {"scenario", result.scenario},
                       {"kind", kind_name(result.failure->kind)},
                       {"message", result.failure->message},
                       {"replay", replay}});
      if (args.json) continue;
      console.out() << fmt::format("FAILED {}\n  {}\n  replay: {}\n", result.scenario, result.failure->message, replay)
                    << std::flush;
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string operators = args.op ? std::string(op_name(*args.op)) : "all operators";
  if (args.json) {
    console.json({{"ok", failures == 0},
                  {"command", "sim"},
                  {"operator", args.op ? op_name(*args.op) : "all"},
                  {"first_seed", args.seeds.first},
                  {"seeds", args.seeds.count},
                  {"inject", args.injections},
                  {"failures", failures},
                  {"failed", shown},
                  {"real_s", seconds},
                  {"peak_resident_bytes", peak_resident_bytes()}});
  } else {
    if (args.seeds.count == 1 && failures == 0) console.out() << only_scenario << "\n";
    if (failures > kShownFailures) console.out() << fmt::format("... and {} more\n", failures - kShownFailures);
    console.out() << fmt::format("{}: {} seeds from {}, {} failed; {:.0f} seeds/s, {} at most\n", operators,
                                 args.seeds.count, args.seeds.first, failures,
                                 static_cast<double>(args.seeds.count) / seconds,
                                 format_bytes(static_cast<double>(peak_resident_bytes())))
                  << std::flush;
  }
  if (failures == 0) return ExitCode::kGood;
  return wrong ? ExitCode::kCheckFailed : ExitCode::kRunFailed;
}

}  // namespace mkernel::cli
