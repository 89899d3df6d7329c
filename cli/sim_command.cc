// mkernel sim: a plan in virtual time.
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "cli/attention.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/machine.h"
#include "cli/matrices.h"
#include "cli/prepare.h"
#include "cli/problem.h"
#include "cli/report.h"
#include "exec/sim/simulator.h"
#include "plan/tiling.h"
#include "trace/perfetto.h"

namespace mkernel::cli {
namespace {

class SimSession {
 public:
  SimSession(const SimArgs& args, Console& console) : args_(args), console_(console) {}

  ExitCode run() {
    for (const auto step : {&SimSession::prepare, &SimSession::simulate_all, &SimSession::write_files}) {
      if (const Status status = (this->*step)(); !status) return console_.fail(status.error(), args_.json);
    }
    if (args_.json) {
      report_json();
    } else {
      report_text();
    }
    return ExitCode::kGood;
  }

 private:
  struct Variant {
    const char* name;
    bool fused;
    SimReport report;
    double wall_s = 0;
    std::optional<CheckReport> check;
    std::optional<GradientReport> gradients;
  };

  Status prepare() {
    // Unfused attention has slots for all chunks; what it is compared with then too.
    if (args_.compare && args_.problem.attention.slot_rounds == 0) args_.problem.attention.slot_rounds = -1;
    auto spec = make_problem_spec(args_.problem);
    if (!spec) return spec.error();
    spec_ = *spec;
    const auto cost = find_preset(args_.preset);
    if (!cost) return cost.error();
    cost_ = *cost;
    variants_.push_back({"fused", true, {}, 0, {}, {}});
    if (args_.compare) variants_.push_back({"unfused", false, {}, 0, {}, {}});

    if (const Status status = check_writable_file("--trace", args_.trace); !status) return status;
    const double world = spec_.topo.world();
    MemoryNeed need;
    if (args_.data) {
      need.matrices = is_attention() ? attention_bytes(spec_) : Matrices::bytes_needed(spec_);
      need.workspace = static_cast<double>(workspace_bytes(spec_)) * world;
    } else {
      need.workspace = 2.0 * Plan(spec_).flag_count() * 4 * world;
    }
    if (const Status status = check_memory(need); !status) return status;
    bound_ = network_bound(spec_);
    return Ok{};
  }

  bool is_attention() const { return attends(spec_.op); }

  Status simulate_all() {
    if (args_.data && args_.problem.is_backward()) {
      gradients_ = std::make_unique<BackwardProblem>(Plan(spec_), args_.seed);
    } else if (args_.data && is_attention()) {
      tensors_ = std::make_unique<AttentionProblem>(Plan(spec_), args_.seed);
    } else if (args_.data) {
      matrices_ = std::make_unique<Matrices>(spec_);
      matrices_->fill(args_.seed, args_.fill);
    }
    for (Variant& variant : variants_) {
      if (const Status status = simulate_one(variant); !status) return status;
      if (!args_.data) continue;
      if (const Status status = check(variant); !status) return status;
    }
    return Ok{};
  }

  Status simulate_one(Variant& variant) {
    SimOptions options;
    options.topo = spec_.topo;
    options.sms = args_.sms;
    options.partition = args_.partition;
    options.cost = cost_;
    options.seed = args_.seed;
    options.data = args_.data;
    options.fused = variant.fused;
    options.trace = !args_.trace.empty() && &variant == &variants_[0];
    options.ring_depth = args_.ring_depth;
    options.deadline_s = args_.deadline_s;
    const PlanSource source{Plan(spec_)};
    const PlanSource* const operators[] = {&source};
    SimCall calls[1];
    if (tensors_) {
      calls[0].arguments = tensors_->arguments();
    } else if (gradients_) {
      calls[0].arguments = gradients_->arguments();
    } else if (matrices_) {
      matrices_->poison();
      const std::vector<GemmArguments> arguments = matrices_->arguments();
      calls[0].arguments.assign(arguments.begin(), arguments.end());
    }
    Progress progress(console_, fmt::format("simulating {} ranks, {}", spec_.topo.world(), variant.name));
    const auto start = std::chrono::steady_clock::now();
    variant.report = simulate(options, operators, calls);
    variant.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (const std::string& warning : variant.report.warnings) console_.note("mkernel: warning: " + warning);
    if (variant.report.error) return *variant.report.error;
    return Ok{};
  }

  Status check(Variant& variant) {
    if (gradients_) {
      variant.gradients = check_tensors(spec_, *gradients_);
      return wrong_tensors(spec_, *variant.gradients);
    }
    if (tensors_) {
      variant.check = check_tensors(spec_, *tensors_);
      return wrong_tensors(spec_, *variant.check);
    }
    if (const auto rank = matrices_->first_different_rank()) {
      return Error{ErrorKind::kCheckFailed,
                   fmt::format("{}: C of rank {} has other bits than C of rank 0", variant.name, *rank)};
    }
    Progress progress(console_, fmt::format("checking {} rows against fp64", Matrices::rows_to_check(spec_).size()));
    variant.check = matrices_->check();
    if (variant.check->ok) return Ok{};
    return Error{ErrorKind::kCheckFailed,
                 fmt::format("{}: C[{}, {}] is wrong: {}", variant.name, variant.check->worst_row,
                             variant.check->worst_col, check_text(spec_, *variant.check))};
  }

  Status write_files() {
    if (args_.trace.empty()) return Ok{};
    const std::string title = fmt::format("{} on {}, simulated with {}: {}", op_name(spec_.op),
                                          describe_world(spec_.topo), args_.preset, describe_problem(spec_));
    return write_trace(args_.trace, variants_[0].report.trace, spec_.topo, title);
  }

  static double us(const Variant& variant) { return static_cast<double>(variant.report.time_ns) * 1e-3; }

  // Of one GPU.
  double flops_per_s(const Variant& variant) const {
    return us(variant) > 0 ? flops(spec_) / spec_.topo.world() / (us(variant) * 1e-6) : 0;
  }

  void report_text() {
    std::ostream& out = console_.out();
    out << fmt::format("{} on {}: {} ranks in virtual time, {}, {} SMs each, seed {}\n", op_name(spec_.op),
                       describe_world(spec_.topo), spec_.topo.world(), args_.preset, args_.sms, args_.seed);
    out << "  problem   " << describe_problem(spec_) << "\n";
    const Partition& partition = variants_[0].report.partitions.at(0);
    out << fmt::format("  SMs       {} compute, {} intra, {} recv\n", partition.compute, partition.intra,
                       partition.recv);
    for (const Variant& variant : variants_) {
      out << fmt::format("  {:<9} {}, {} per GPU\n", variant.name, format_us(us(variant)),
                         format_flops(flops_per_s(variant)));
    }
    if (args_.compare) out << fmt::format("  speed-up  {:.2f}x\n", us(variants_[1]) / us(variants_[0]));
    out << "  sent      " << network_text(spec_, variants_[0].report.network_bytes, bound_.total) << "\n";
    if (const auto& check = variants_[0].gradients) out << "  check     ok: " << check_text(spec_, *check) << "\n";
    if (const auto& check = variants_[0].check) out << "  check     ok: " << check_text(spec_, *check) << "\n";
    std::int64_t tasks = 0;
    double wall_s = 0;
    for (const Variant& variant : variants_) {
      tasks += variant.report.tasks;
      wall_s += variant.wall_s;
    }
    out << fmt::format("  cost      {} tasks in {} of real time, {:.2f} million tasks/s, {} at most\n",
                       format_count(tasks), format_us(wall_s * 1e6), static_cast<double>(tasks) / wall_s * 1e-6,
                       format_bytes(static_cast<double>(peak_resident_bytes())));
    if (!args_.trace.empty()) out << "  trace     " << args_.trace.string() << " (open it in ui.perfetto.dev)\n";
    out << std::flush;
  }

  void report_json() {
    nlohmann::ordered_json object = {{"ok", true}, {"command", "sim"}};
    object.update(spec_json(spec_));
    object["preset"] = args_.preset;
    object["sms"] = args_.sms;
    object["seed"] = args_.seed;
    object["partition"] = partition_json(variants_[0].report.partitions.at(0));
    for (const Variant& variant : variants_) {
      object[variant.name] = {{"time_us", us(variant)},
                              {"flops_per_s_per_gpu", flops_per_s(variant)},
                              {"tasks", variant.report.tasks},
                              {"events", variant.report.events},
                              {"real_s", variant.wall_s}};
      if (variant.check) object[variant.name]["check"] = check_json(*variant.check);
      if (variant.gradients) object[variant.name]["check"] = check_json(*variant.gradients);
    }
    if (args_.compare) object["speedup"] = us(variants_[1]) / us(variants_[0]);
    object["network"] = network_json(spec_, variants_[0].report.network_bytes, bound_.total);
    object["peak_resident_bytes"] = peak_resident_bytes();
    if (!args_.trace.empty()) object["trace"] = args_.trace.string();
    console_.json(object);
  }

  SimArgs args_;
  Console& console_;
  PlanSpec spec_;
  NetworkBound bound_;
  CostModel cost_;
  std::unique_ptr<Matrices> matrices_;          // with data, of a GEMM
  std::unique_ptr<AttentionProblem> tensors_;   // with data, of ring_attention
  std::unique_ptr<BackwardProblem> gradients_;  // with data, of its backward
  std::vector<Variant> variants_;
};

}  // namespace

ExitCode sim_command(const SimArgs& args, Console& console) { return SimSession(args, console).run(); }

}  // namespace mkernel::cli
