// mkernel run: an operator with real data through the public API.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "cli/attention.h"
#include "cli/commands.h"
#include "cli/device_matrices.h"
#include "cli/format.h"
#include "cli/matrices.h"
#include "cli/prepare.h"
#include "cli/problem.h"
#include "cli/ranks.h"
#include "cli/report.h"
#include "ops/gemm_spec.h"
#include "plan/tiling.h"
#include "trace/perfetto.h"
#include "world/memory_limit.h"
#include "world/world_impl.h"

namespace mkernel::cli {
namespace {

constexpr int kBalanceRuns = 3;

class RunSession {
 public:
  RunSession(const RunArgs& args, Console& console) : args_(args), console_(console) {
    args_.world.on_warning = [&](const std::string& text) { console_.note("mkernel: warning: " + text); };
  }

  ExitCode run() {
    for (const auto step : {&RunSession::join_processes, &RunSession::resolve_problem, &RunSession::check_resources,
                            &RunSession::load_input, &RunSession::balance_link, &RunSession::create,
                            &RunSession::time_runs, &RunSession::check_result, &RunSession::write_files}) {
      if (const Status status = (this->*step)(); !status) return console_.fail(status.error(), args_.json);
    }
    if (!ranks_.leads()) return ExitCode::kGood;
    if (args_.json) {
      report_json();
    } else {
      report_text();
    }
    return ExitCode::kGood;
  }

 private:
  // One way of running: fused or not.
  struct Variant {
    const char* name;
    bool fused;
    std::unique_ptr<Operator> op;
    Times times;
    RunReport last;
  };

  GemmOptions& gemm() { return args_.problem.gemm; }

  // What a launcher says, if one has started us.
  Status join_processes() {
    const auto processes = processes_from_environment();
    if (!processes) return processes.error();
    ranks_ = Ranks(*processes);
    if (!ranks_.several()) {
      if (args_.network.empty()) return Ok{};
      return bad_argument("--network is between processes: start them with mpirun, torchrun or srun (docs/cluster.md)");
    }
    console_.speak_for_rank(ranks_.own());
    args_.world.processes = *processes;
    if (!args_.network.empty()) args_.world.processes.network = args_.network;
    Topology& topo = args_.problem.topo;
    const int size = processes->size;
    if (!args_.nodes_given && !args_.gpus_given) topo = {size, 1};
    if (!args_.nodes_given && args_.gpus_given) topo.nodes = std::max(1, size / topo.gpus);
    if (args_.nodes_given && !args_.gpus_given) topo.gpus = std::max(1, size / topo.nodes);
    if (std::int64_t{topo.nodes} * topo.gpus != size) {
      return bad_argument(
          fmt::format("--nodes {} x --gpus {} is {} ranks, but {} processes were started: there must be "
                      "as many",
                      topo.nodes, topo.gpus, std::int64_t{topo.nodes} * topo.gpus, size));
    }
    args_.world.nodes = topo.nodes;
    args_.world.gpus = topo.gpus;
    if (args_.link_given) {
      return bad_argument("--link is the network inside one process: leave it out, or the launcher");
    }
    if (!args_.output.empty() && gemm().op != Op::kGemmAllReduce) {
      return bad_argument(
          "--output needs all of C in one process, which only gemm_all_reduce has: leave it out, or the "
          "launcher");
    }
    return Ok{};
  }

  Status resolve_problem() {
    if (!args_.input.empty()) {
      if (const Status status = take_sizes_from_files(); !status) return status;
    }
    if (on_gpu()) {  // how many SMs there are decides the tiles
      if (const Status status = create_world(); !status) return status;
    }
    auto spec = on_gpu() ? make_gpu_gemm_spec(args_.problem.topo, gemm(), world_->impl()->plan_sms)
                         : make_gemm_spec(args_.problem.topo, gemm());
    if (!spec) return spec.error();
    spec_ = *spec;
    // What was chosen is what is shown and what runs.
    gemm().bm = spec_.tiling.bm;
    gemm().bn = spec_.tiling.bn;
    gemm().band = spec_.tiling.band;
    gemm().chunk_tiles = spec_.tiling.chunk_tiles;
    gemm().chunk_rows = spec_.tiling.chunk_rows;
    gemm().copy_rows = spec_.tiling.copy_rows;
    if (args_.problem.gemm.fused) variants_.push_back({"fused", true, nullptr, {}, {}});
    if (args_.compare || !args_.problem.gemm.fused) variants_.push_back({"unfused", false, nullptr, {}, {}});
    return Ok{};
  }

  Status take_sizes_from_files() {
    const auto headers = read_headers(args_.input);
    if (!headers) return headers.error();
    const struct {
      const char* option;
      bool given;
      std::int64_t& value;
      std::int64_t in_file;
    } sizes[] = {{"--m", args_.m_given, gemm().m, headers->m},
                 {"--n", args_.n_given, gemm().n, headers->n},
                 {"--k", args_.k_given, gemm().k, headers->k}};
    for (const auto& size : sizes) {
      if (size.given && size.value != size.in_file) {
        return bad_argument(fmt::format("{} is {}, but the files in {} say {}: leave it out", size.option, size.value,
                                        args_.input.string(), size.in_file));
      }
      size.value = size.in_file;
    }
    if (!args_.problem.dtype_given) {
      if (!headers->dtype) {
        return bad_argument(
            fmt::format("the files in {} hold {}: give --dtype bf16, fp16 or fp32 to say what they are to "
                        "be rounded to",
                        args_.input.string(), headers->type_names));
      }
      gemm().dtype = *headers->dtype;
    } else if (headers->dtype != gemm().dtype) {
      rounded_from_ = headers->type_names;
    }
    return Ok{};
  }

  Status check_resources() {
    if (const Status status = check_writable_folder("--output", args_.output); !status) return status;
    if (const Status status = check_writable_file("--trace", args_.trace); !status) return status;
    MemoryNeed need;
    need.matrices = Matrices::bytes_needed(spec_, ranks_.own());
    if (on_gpu()) return check_memory(need);  // the rest is the GPU's
    need.workspace = static_cast<double>(workspace_bytes(spec_)) * ranks_here() * static_cast<double>(variants_.size());
    // Tile scratch of every thread (exec/tile_math.h: two panels and two accumulators, twice for Eigen's own).
    const double tile = spec_.tiling.bm * spec_.tiling.bn + (spec_.tiling.bm + spec_.tiling.bn) * kGemmPanelK;
    const double threads =
        static_cast<double>(ranks_here()) * (args_.world.device == Device::kHost ? args_.world.sms : 1);
    need.other = threads * tile * 4 * 4;
    if (const Status status = check_memory(need); !status) return status;
    bound_ = network_bound(spec_);  // takes time in proportion to the chunks, so only for what fits into memory
    if (args_.balanced_link && bound_.busiest == 0) {
      return bad_argument("--link balanced has nothing to balance: with these sizes no byte goes over the network");
    }
    return Ok{};
  }

  Status load_input() {
    matrices_ = std::make_unique<Matrices>(spec_, ranks_.own());
    Progress progress(console_, args_.input.empty() ? "making the input" : "reading the input");
    if (args_.input.empty()) {
      matrices_->fill(args_.world.seed, args_.fill);
      return Ok{};
    }
    const auto limit = static_cast<std::uint64_t>(available_memory());
    auto a = read_matrix(args_.input / "A.npy", spec_.dtype, limit);
    if (!a) return a.error();
    auto b = read_matrix(args_.input / "B.npy", spec_.dtype, limit);
    if (!b) return b.error();
    const auto size = static_cast<std::size_t>(dtype_bytes(spec_.dtype));
    if (a->size() != static_cast<std::size_t>(spec_.m * spec_.k) * size ||
        b->size() != static_cast<std::size_t>(spec_.k * spec_.n) * size) {
      return bad_argument(fmt::format("the files in {} changed while they were read", args_.input.string()));
    }
    matrices_->load(std::move(a).value(), std::move(b).value());
    return Ok{};
  }

  // The network is made as slow as the arithmetic: whoever overlaps nothing then takes twice as long.
  Status balance_link() {
    if (!args_.balanced_link) return Ok{};
    Progress progress(console_, "timing the unfused computation to balance the link");
    WorldOptions options = args_.world;
    if (options.device == Device::kHost) options.link = {};  // on Device::kSim it is the fastest there is
    auto world = World::create(options);
    if (!world) return world.error();
    GemmOptions unfused = gemm();
    unfused.fused = false;
    auto op = Operator::create(*world, unfused);
    if (!op) return op.error();
    Times times;
    for (int i = 0; i < kBalanceRuns; ++i) {
      const auto report = op->run(matrices_->arguments());
      if (!report) return report.error();
      times.add(report->time_us);
    }
    args_.world.link.gigabytes_per_s = static_cast<double>(bound_.busiest) / times.median() * 1e-3;
    compute_us_ = times.median();
    return Ok{};
  }

  int ranks_here() const { return ranks_.several() ? 1 : spec_.topo.world(); }

  bool on_gpu() const { return args_.world.device == Device::kCuda; }

  Status create_world() {
    auto world = World::create(args_.world);
    if (!world) return world.error();
    world_ = std::make_unique<World>(std::move(world).value());
    return Ok{};
  }

  Status create() {
    if (!world_) {
      if (const Status status = create_world(); !status) return status;
    }
    if (on_gpu()) {
      auto device = DeviceMatrices::create(*world_, spec_);
      if (!device) return device.error();
      device_ = std::make_unique<DeviceMatrices>(std::move(device).value());
      if (const Status status = device_->upload_inputs(matrices_->arguments()); !status) return status;
    }
    for (Variant& variant : variants_) {
      GemmOptions options = gemm();
      options.fused = variant.fused;
      auto op = Operator::create(*world_, options);
      if (!op) return op.error();
      variant.op = std::make_unique<Operator>(std::move(op).value());
    }
    return Ok{};
  }

  Status time_runs() {
    Progress progress(console_, "running");
    std::vector<GemmArguments> arguments = device_ ? device_->arguments() : matrices_->arguments();
    if (ranks_.several()) arguments = {arguments[static_cast<std::size_t>(ranks_.own())]};
    for (int i = 0; i < args_.repeat; ++i) {
      for (Variant& variant : variants_) {
        progress.set(fmt::format("{} run {} of {}", variant.name, i + 1, args_.repeat));
        if (const Status status = run_once(variant, arguments, false); !status) return status;
        variant.times.add(variant.last.time_us);
      }
    }
    if (!args_.trace.empty()) {
      progress.set("run for the trace");
      const RunReport untraced = variants_[0].last;
      if (const Status status = run_once(variants_[0], arguments, true); !status) return status;
      trace_ = std::move(variants_[0].last.trace);
      variants_[0].last = untraced;
    }
    return Ok{};
  }

  Status run_once(Variant& variant, std::span<const GemmArguments> arguments, bool trace) {
    matrices_->poison();
    if (device_) {
      if (const Status status = device_->upload_outputs(matrices_->arguments()); !status) return status;
    }
    auto report = variant.op->run(arguments, trace);
    if (!report) return report.error();
    if (device_) {
      if (const Status status = device_->download_outputs(matrices_->arguments()); !status) return status;
    }
    variant.last = std::move(report).value();
    ++runs_;
    if (!args_.check) return Ok{};
    const std::uint64_t digest = matrices_->digest();
    if (digest_ && *digest_ != digest) {
      return Error{ErrorKind::kCheckFailed,
                   fmt::format("run {} ({}) gave other bits than the runs before it", runs_, variant.name)};
    }
    digest_ = digest;
    return Ok{};
  }

  // Every rank's verdict is everybody's.
  Status check_result() { return ranks_.confirm(*world_, "say whether C is right", check_own_result()); }

  Status check_own_result() {
    if (args_.check || !args_.output.empty()) {
      if (const auto rank = matrices_->first_different_rank()) {
        return Error{ErrorKind::kCheckFailed, fmt::format("C of rank {} has other bits than C of rank 0", *rank)};
      }
      if (spec_.op == Op::kGemmAllReduce) {
        if (const Status same = ranks_.same_bits(*world_, matrices_->digest()); !same) return same;
      }
    }
    if (!args_.check) return Ok{};
    Progress progress(console_, fmt::format("checking {} rows against fp64", Matrices::rows_to_check(spec_).size()));
    const auto worst = ranks_.worst(*world_, matrices_->check(), spec_.op != Op::kAllGatherGemm);
    if (!worst) return worst.error();
    check_ = *worst;
    if (check_->ok) return Ok{};
    return Error{ErrorKind::kCheckFailed, fmt::format("C[{}, {}] is wrong: {}", check_->worst_row, check_->worst_col,
                                                      check_text(spec_, *check_))};
  }

  Status write_files() {
    if (!ranks_.leads()) return Ok{};
    if (!args_.output.empty()) {
      if (const Status status = matrices_->write(args_.output); !status) return not_refused(status);
    }
    if (args_.trace.empty()) return Ok{};
    const std::string title = fmt::format("{} {} on {}: {}", variants_[0].name, op_name(spec_.op),
                                          describe_world(spec_.topo), describe_problem(spec_));
    return write_trace(args_.trace, trace_, spec_.topo, title);
  }

  // After the run nothing counts as refused before it.
  static Status not_refused(const Status& status) { return Error{ErrorKind::kIo, status.error().message}; }

  std::string link_text() const {
    if (spec_.topo.nodes == 1) return "none: one node";
    if (ranks_.several()) {
      return fmt::format("{} between the processes of {} nodes", world_->impl()->group->endpoint()->name(),
                         spec_.topo.nodes);
    }
    const Link& link = args_.world.link;
    std::string text = link.gigabytes_per_s == 0
                           ? "as fast as memory allows"
                           : fmt::format("{:.4g} GB/s per GPU and direction", link.gigabytes_per_s);
    text += fmt::format(", {:.4g} us{}", link.latency_us, link.unordered ? ", unordered" : "");
    if (compute_us_)
      text += fmt::format(" (balanced: the bytes take as long as the arithmetic, {})", format_us(*compute_us_));
    return text;
  }

  std::string place_text() const {
    const int sms = world_->options().sms;
    switch (args_.world.device) {
      case Device::kHost:
        if (ranks_.several()) return fmt::format("a process each, {} thread{} each as SMs", sms, sms == 1 ? "" : "s");
        return fmt::format("this process, {} thread{} each as SMs", sms, sms == 1 ? "" : "s");
      case Device::kSim: return fmt::format("virtual time, {} SMs each", sms);
      case Device::kCuda: break;
    }
    return fmt::format("{}, {} SMs of a GPU each", ranks_.several() ? "a process each" : "this process", sms);
  }
  std::string_view device_name() const {
    constexpr std::string_view kNames[] = {"host", "sim", "cuda"};
    return kNames[static_cast<int>(args_.world.device)];
  }

  void report_text() {
    std::ostream& out = console_.out();
    out << fmt::format("{} on {}: {} ranks in {}\n", op_name(spec_.op), describe_world(spec_.topo), spec_.topo.world(),
                       place_text());
    out << "  problem   " << describe_problem(spec_) << "\n";
    if (!args_.input.empty()) {
      out << "  input     " << args_.input.string();
      if (!rounded_from_.empty()) out << ", " << rounded_from_ << " rounded to " << dtype_name(spec_.dtype);
      out << "\n";
    }
    out << "  network   " << link_text() << "\n";
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
      out << fmt::format("            same bits in all {} runs{}\n", runs_,
                         spec_.op == Op::kGemmAllReduce ? " and on all ranks" : "");
    } else {
      out << "  check     left out\n";
    }
    if (!args_.output.empty()) out << "  wrote     " << (args_.output / "C.npy").string() << "\n";
    if (!args_.trace.empty()) out << "  trace     " << args_.trace.string() << " (open it in ui.perfetto.dev)\n";
    out << std::flush;
  }

  void report_json() {
    nlohmann::ordered_json object = {{"ok", true}, {"command", "run"}};
    object.update(spec_json(spec_));
    object["device"] = device_name();
    object["processes"] = ranks_.processes().size;
    if (ranks_.several()) {
      object["transport"] = args_.world.processes.network;
      object["provider"] = ranks_.processes().provider;
    }
    object["sms"] = world_->options().sms;
    object["partition"] = partition_json(variants_[0].last.partition);
    object["link"] = {{"gigabytes_per_s", args_.world.link.gigabytes_per_s},
                      {"latency_us", args_.world.link.latency_us},
                      {"unordered", args_.world.link.unordered},
                      {"balanced", args_.balanced_link}};
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
    if (!rounded_from_.empty()) object["rounded_from"] = rounded_from_;
    if (!args_.output.empty()) object["output"] = (args_.output / "C.npy").string();
    if (!args_.trace.empty()) object["trace"] = args_.trace.string();
    console_.json(object);
  }

  RunArgs args_;
  Ranks ranks_;
  Console& console_;
  PlanSpec spec_;
  NetworkBound bound_;
  std::string rounded_from_;
  std::unique_ptr<Matrices> matrices_;
  std::optional<double> compute_us_;
  std::unique_ptr<World> world_;
  std::unique_ptr<DeviceMatrices> device_;  // null where ranks work on `matrices_` themselves
  std::vector<Variant> variants_;           // after world_: operators go first
  int runs_ = 0;
  std::optional<std::uint64_t> digest_;
  std::optional<CheckReport> check_;
  std::vector<TraceEvent> trace_;
};

}  // namespace

ExitCode run_command(const RunArgs& args, Console& console) {
  return args.problem.is_attention() ? run_attention(args, console) : RunSession(args, console).run();
}

}  // namespace mkernel::cli
