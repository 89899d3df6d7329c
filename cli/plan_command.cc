// mkernel plan: what one rank does.
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/problem.h"
#include "cli/report.h"
#include "plan/print.h"
#include "plan/tiling.h"

namespace mkernel::cli {
namespace {

nlohmann::ordered_json lane_json(const PlanSource& source, const PlanArgs& args, Role role, std::int32_t lane) {
  const std::int64_t count = source.count(args.rank, role, lane);
  nlohmann::ordered_json tasks = nlohmann::ordered_json::array();
  // As many as asked for, from both ends.
  const std::int64_t head = min_of(count, (std::int64_t{args.tasks} + 1) / 2);
  const std::int64_t tail = min_of(count - head, args.tasks / 2);
  for (std::int64_t i = 0; i < head + tail; ++i) {
    const std::int64_t index = i < head ? i : count - tail + (i - head);
    const Task task = source.task(args.rank, role, lane, index);
    tasks.push_back({{"index", index}, {"text", describe_task(source.plan(), args.rank, role, lane, index, task)}});
  }
  return {{"role", role_name(role)}, {"lane", lane}, {"count", count}, {"tasks", tasks}};
}

}  // namespace

ExitCode plan_command(const PlanArgs& args, Console& console) {
  const auto spec = make_problem_spec(args.problem);
  if (!spec) return console.fail(spec.error());
  const PlanSource source{Plan(*spec)};
  if (!args.json) {
    console.out() << print_plan(source, args.rank, args.tasks) << std::flush;
    return ExitCode::kGood;
  }
  const Plan& plan = source.plan();
  nlohmann::ordered_json object = {{"ok", true}, {"command", "plan"}};
  object.update(spec_json(*spec));
  object["rank"] = args.rank;
  object["workspace_bytes"] = workspace_bytes(*spec);
  object["network_bytes"] = plan.network_bytes(args.rank);
  object["flags"] = plan.flag_count();
  object["lanes"] = nlohmann::ordered_json::array();
  for (int role = 0; role < kRoleCount; ++role) {
    for (std::int32_t lane = 0; lane < plan.lanes(static_cast<Role>(role)); ++lane) {
      object["lanes"].push_back(lane_json(source, args, static_cast<Role>(role), lane));
    }
  }
  console.json(object);
  return ExitCode::kGood;
}

}  // namespace mkernel::cli
