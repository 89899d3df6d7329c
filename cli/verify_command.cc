// mkernel verify: proves one plan, or all standard cases.
#include <fmt/format.h>

#include <chrono>
#include <vector>

#include "cli/commands.h"
#include "cli/format.h"
#include "cli/machine.h"
#include "cli/prepare.h"
#include "cli/problem.h"
#include "cli/report.h"
#include "verify/cases.h"
#include "verify/verify.h"

namespace mkernel::cli {
namespace {

constexpr double kBytesPerTask = 250;  // verify/verify.h
constexpr std::int64_t kShownViolations = 20;

std::string case_name(const PlanSpec& spec) {
  return fmt::format("{} on {}, {}", op_name(spec.op), describe_world(spec.topo), describe_problem(spec));
}

// An upper bound, from the rank with the most: rank 0.
double task_estimate(const PlanSpec& spec) {
  const Plan plan(spec);
  double tasks = 0;
  for (int role = 0; role < kRoleCount; ++role) {
    for (std::int32_t lane = 0; lane < plan.lanes(static_cast<Role>(role)); ++lane) {
      tasks += static_cast<double>(plan.count(0, static_cast<Role>(role), lane));
    }
  }
  return tasks * spec.topo.world();
}

struct Totals {
  std::int64_t cases = 0;
  std::int64_t failed = 0;
  std::int64_t tasks = 0;
  std::int64_t signals = 0;
  std::int64_t violations = 0;
  std::int64_t network_bytes = 0;
  std::int64_t network_bytes_bound = 0;
};

}  // namespace

ExitCode verify_command(const VerifyArgs& args, Console& console) {
  std::vector<PlanSpec> specs;
  if (args.problem) {
    const auto spec = make_problem_spec(*args.problem);
    if (!spec) return console.fail(spec.error());
    if (const Status status = check_memory({.other = task_estimate(*spec) * kBytesPerTask}); !status) {
      return console.fail(status.error());
    }
    specs.push_back(*spec);
  } else {
    specs = standard_cases();
  }

  Totals totals;
  nlohmann::ordered_json shown = nlohmann::ordered_json::array();
  const auto start = std::chrono::steady_clock::now();
  {
    Progress progress(console, "starting");
    for (const PlanSpec& spec : specs) {
      progress.set(fmt::format("case {} of {}: {}", totals.cases + 1, specs.size(), case_name(spec)));
      const VerifyReport report = verify(PlanSource(Plan(spec)));
      ++totals.cases;
      totals.tasks += report.tasks;
      totals.signals += report.signals;
      totals.violations += report.violation_count;
      totals.network_bytes += report.network_bytes;
      totals.network_bytes_bound += report.network_bytes_bound;
      if (report.ok()) continue;
      ++totals.failed;
      if (!args.json) {
        console.out() << fmt::format("FAILED {}: {} violations\n", case_name(spec), report.violation_count);
      }
      for (const Violation& violation : report.violations) {
        if (static_cast<std::int64_t>(shown.size()) == kShownViolations) break;
        shown.push_back({{"case", case_name(spec)},
                         {"kind", violation_name(violation.kind)},
                         {"rank", violation.rank},
                         {"message", violation.message}});
        if (!args.json) console.out() << fmt::format("  {}: {}\n", violation_name(violation.kind), violation.message);
      }
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  if (args.json) {
    nlohmann::ordered_json object = {{"ok", totals.failed == 0}, {"command", "verify"}};
    if (args.problem) object.update(spec_json(specs[0]));
    object["cases"] = totals.cases;
    object["failed"] = totals.failed;
    object["tasks"] = totals.tasks;
    object["signals"] = totals.signals;
    object["network_bytes"] = totals.network_bytes;
    object["network_bytes_bound"] = totals.network_bytes_bound;
    object["violation_count"] = totals.violations;
    object["violations"] = shown;
    object["real_s"] = seconds;
    object["peak_resident_bytes"] = peak_resident_bytes();
    console.json(object);
  } else {
    const std::string what = args.problem ? case_name(specs[0]) : fmt::format("{} cases", totals.cases);
    console.out() << fmt::format(
                         "{} {}: {} tasks, {} signals, {} over the network (lower bound {}), {} violations; {}\n",
                         totals.failed == 0 ? "proved" : "NOT PROVED:", what, format_count(totals.tasks),
                         format_count(totals.signals), format_bytes(static_cast<double>(totals.network_bytes)),
                         format_bytes(static_cast<double>(totals.network_bytes_bound)), totals.violations,
                         format_us(seconds * 1e6))
                  << std::flush;
  }
  return totals.failed == 0 ? ExitCode::kGood : ExitCode::kCheckFailed;
}

}  // namespace mkernel::cli
