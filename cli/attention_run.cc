// mkernel run ring_attention and ring_attention_backward: real data through the public API, all ranks in this process.
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "cli/attention.h"
#include "cli/device_tensors.h"
#include "cli/format.h"
#include "cli/prepare.h"
#include "cli/problem.h"
#include "cli/report.h"
#include "exec/attention_problem.h"
#include "ops/attention_spec.h"
#include "plan/tiling.h"
#include "trace/perfetto.h"

namespace mkernel::cli {
namespace {

constexpr double kAllRowsProducts = 1 << 30;  // some seconds of one core
constexpr std::int64_t kSampledRows = 64;

// What differs between forward and backward.
struct Forward {
  using Problem = AttentionProblem;
  using Arguments = AttentionArguments;
  using Options = AttentionOptions;
  using Report = CheckReport;
};
struct Backward {
  using Problem = BackwardProblem;
  using Arguments = AttentionBackwardArguments;
  using Options = AttentionBackwardOptions;
  using Report = GradientReport;
};

template <class Way>
class AttentionRun {
  static constexpr bool kForward = std::is_same_v<Way, Forward>;

 public:
  AttentionRun(const RunArgs& args, Console& console) : args_(args), console_(console) {
    args_.world.on_warning = [&](const std::string& text) { console_.note("mkernel: warning: " + text); };
  }

  ExitCode run() {
    for (const auto step : {&AttentionRun::prepare, &AttentionRun::create, &AttentionRun::time_runs,
                            &AttentionRun::check_result, &AttentionRun::write_files}) {
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
  bool on_gpu() const { return args_.world.device == Device::kCuda; }

  struct Variant {
    const char* name;
    bool fused;
    std::unique_ptr<Operator> op;
    Times times;
    RunReport last;
  };

  Status prepare() {
    const auto processes = processes_from_environment();
    if (!processes) return processes.error();
    if (processes->rank >= 0) {
      return bad_argument(fmt::format("run {} keeps all ranks in one process so far: leave out the launcher",
                                      op_name(args_.problem.gemm.op)));
    }
    if (args_.compare && args_.problem.attention.slot_rounds == 0) args_.problem.attention.slot_rounds = -1;
    AttentionOptions& options = args_.problem.attention;
    const auto spec =
        on_gpu() ? make_gpu_attention_spec(args_.problem.topo, options) : make_problem_spec(args_.problem);
    if (!spec) return spec.error();
    spec_ = *spec;
    if (args_.problem.gemm.fused) variants_.push_back({"fused", true, nullptr, {}, {}});
    if (args_.compare || !args_.problem.gemm.fused) variants_.push_back({"unfused", false, nullptr, {}, {}});
    if (const Status status = check_writable_file("--trace", args_.trace); !status) return status;
    MemoryNeed need;
    need.matrices = attention_bytes(spec_);
    if (!on_gpu()) {
      need.workspace =
          static_cast<double>(workspace_bytes(spec_)) * spec_.topo.world() * static_cast<double>(variants_.size());
    }
    if (const Status status = check_memory(need); !status) return status;
    problem_ = std::make_unique<typename Way::Problem>(Plan(spec_), args_.world.seed);
    for (int rank = 0; rank < spec_.topo.world(); ++rank) arguments_.push_back(problem_->arguments(rank));
    return Ok{};
  }

  Status create() {
    auto world = World::create(args_.world);
    if (!world) return world.error();
    world_ = std::make_unique<World>(std::move(world).value());
    if constexpr (kForward) {
      if (on_gpu()) {
        auto tensors = DeviceTensors::create(*world_, arguments_);
        if (!tensors) return tensors.error();
        device_.emplace(std::move(tensors).value());
      }
    }
    for (Variant& variant : variants_) {
      typename Way::Options options = args_.problem.attention;
      options.fused = variant.fused;
      auto op = Operator::create(*world_, options);
      if (!op) return op.error();
      variant.op = std::make_unique<Operator>(std::move(op).value());
    }
    return Ok{};
  }

  Status run_once(Variant& variant, bool trace) {
    std::span<const typename Way::Arguments> arguments = arguments_;
    if constexpr (kForward) {
      if (device_) arguments = device_->arguments();
    }
    auto report = variant.op->run(arguments, trace);
    if (!report) return report.error();
    variant.last = std::move(report).value();
    ++runs_;
    if (!args_.check) return Ok{};
    if constexpr (kForward) {
      if (device_) {
        if (const Status status = device_->download(arguments_); !status) return status;
      }
    }
    if (first_.empty()) {
      first_ = problem_->output();
    } else if (problem_->output() != first_) {
      return Error{ErrorKind::kCheckFailed,
                   fmt::format("run {} ({}) gave other bits than the runs before it", runs_, variant.name)};
    }
    return Ok{};
  }

  Status time_runs() {
    Progress progress(console_, "running");
    for (int i = 0; i < args_.repeat; ++i) {
      for (Variant& variant : variants_) {
        progress.set(fmt::format("{} run {} of {}", variant.name, i + 1, args_.repeat));
        if (const Status status = run_once(variant, false); !status) return status;
        variant.times.add(variant.last.time_us);
      }
    }
    if (args_.trace.empty()) return Ok{};
    progress.set("run for the trace");
    const RunReport untraced = variants_[0].last;
    if (const Status status = run_once(variants_[0], true); !status) return status;
    trace_ = std::move(variants_[0].last.trace);
    variants_[0].last = untraced;
    return Ok{};
  }

  Status check_result() {
    if (!args_.check) return Ok{};
    Progress progress(console_, "checking against fp64");
    if constexpr (kForward) {
      check_ = check_tensors(spec_, *problem_, on_gpu() ? AttentionArithmetic::gpu() : AttentionArithmetic{});
    } else {
      check_ = check_tensors(spec_, *problem_);
    }
    return wrong_tensors(spec_, *check_);
  }

  Status write_files() {
    if (args_.trace.empty()) return Ok{};
    const std::string title = fmt::format("{} {} on {}: {}", variants_[0].name, op_name(spec_.op),
                                          describe_world(spec_.topo), describe_problem(spec_));
    return write_trace(args_.trace, trace_, spec_.topo, title);
  }

  void report_text() {
    std::ostream& out = console_.out();
    const bool host = args_.world.device == Device::kHost;
    out << fmt::format("{} on {}: {} ranks in {}, {} {} each\n", op_name(spec_.op), describe_world(spec_.topo),
                       spec_.topo.world(), host || on_gpu() ? "this process" : "virtual time", world_->options().sms,
                       host ? "threads as SMs" : "SMs");
    out << "  problem   " << describe_problem(spec_) << "\n";
    for (const Variant& variant : variants_) {
      out << fmt::format("  {:<9} {}, {}\n", variant.name, variant.times.text(),
                         format_flops(flops(spec_) / (variant.times.median() * 1e-6)));
    }
    if (args_.compare) {
      out << fmt::format("  speed-up  {:.2f}x\n", variants_[1].times.median() / variants_[0].times.median());
    }
    const RunReport& last = variants_[0].last;
    out << "  sent      " << network_text(spec_, last.network_bytes, last.network_bytes_bound) << "\n";
    if (check_) {
      out << "  check     ok: " << check_text(spec_, *check_) << "\n";
      out << fmt::format("            same bits in all {} runs\n", runs_);
    } else {
      out << "  check     left out\n";
    }
    if (!args_.trace.empty()) out << "  trace     " << args_.trace.string() << " (open it in ui.perfetto.dev)\n";
    out << std::flush;
  }

  void report_json() {
    nlohmann::ordered_json object = {{"ok", true}, {"command", "run"}};
    object.update(spec_json(spec_));
    object["device"] = on_gpu() ? "cuda" : args_.world.device == Device::kHost ? "host" : "sim";
    object["sms"] = world_->options().sms;
    object["partition"] = partition_json(variants_[0].last.partition);
    for (const Variant& variant : variants_) object[variant.name] = variant.times.json(spec_);
    if (args_.compare) object["speedup"] = variants_[1].times.median() / variants_[0].times.median();
    const RunReport& last = variants_[0].last;
    object["tasks"] = last.tasks;
    object["network"] = network_json(spec_, last.network_bytes, last.network_bytes_bound);
    object["workspace_bytes_per_rank"] = last.workspace_bytes;
    if (check_) {
      object["check"] = check_json(*check_);
      object["check"]["identical_runs"] = runs_;
    }
    if (!args_.trace.empty()) object["trace"] = args_.trace.string();
    console_.json(object);
  }

  RunArgs args_;
  Console& console_;
  PlanSpec spec_;
  std::unique_ptr<typename Way::Problem> problem_;
  std::vector<typename Way::Arguments> arguments_;
  std::unique_ptr<World> world_;
  std::optional<DeviceTensors> device_;
  std::vector<Variant> variants_;  // after world_: operators go first
  int runs_ = 0;
  std::vector<std::byte> first_;  // what the first run gave
  std::optional<typename Way::Report> check_;
  std::vector<TraceEvent> trace_;
};

}  // namespace

double attention_bytes(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  const double q = static_cast<double>(a.batch * a.heads * a.dim) * static_cast<double>(a.seq_q);
  const double k = static_cast<double>(a.batch * a.kv_heads * a.dim) * static_cast<double>(a.seq_k);
  // Whole and in parts: Q and O, K and V; O of the first run. Of the backward: also dO and dQ, dK and dV, and the
  // gradients of the first run and of the check.
  const bool backward = spec.op == Op::kRingAttentionBackward;
  return static_cast<double>(dtype_bytes(spec.dtype)) * (backward ? 10 * q + 12 * k : 5 * q + 4 * k);
}

namespace {

std::int64_t rows_to_check(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  const double products =
      static_cast<double>(a.batch * a.heads * a.dim) * static_cast<double>(a.seq_q) * static_cast<double>(a.seq_k);
  return products <= kAllRowsProducts ? 0 : kSampledRows;
}

}  // namespace

CheckReport check_tensors(const PlanSpec& spec, AttentionProblem& problem, const AttentionArithmetic& arithmetic) {
  return problem.check(rows_to_check(spec), arithmetic);
}

GradientReport check_tensors(const PlanSpec& spec, BackwardProblem& problem) {
  return problem.check(rows_to_check(spec));
}

Status wrong_tensors(const PlanSpec& spec, const CheckReport& check) {
  if (check.ok) return Ok{};
  return Error{
      ErrorKind::kCheckFailed,
      fmt::format("{} of query {} is wrong: {}",
                  check.worst_col == spec.attention.dim ? "the log-sum-exp" : fmt::format("O[{}]", check.worst_col),
                  check.worst_row, check_text(spec, check))};
}

Status wrong_tensors(const PlanSpec& spec, const GradientReport& check) {
  if (check.ok()) return Ok{};
  return Error{ErrorKind::kCheckFailed,
               fmt::format("{}[{}, {}] is wrong: {}", check.worst_name(), check.worst().worst_row,
                           check.worst().worst_col, check_text(spec, check))};
}

ExitCode run_attention(const RunArgs& args, Console& console) {
  return args.problem.is_backward() ? AttentionRun<Backward>(args, console).run()
                                    : AttentionRun<Forward>(args, console).run();
}

}  // namespace mkernel::cli
