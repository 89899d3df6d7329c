#include "cli/args.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "cli/apply.h"
#include "cli/attention_args.h"
#include "cli/bench_args.h"
#include "cli/option_set.h"
#include "cli/problem.h"
#include "exec/schedule.h"
#include "exec/sim/cost_model.h"
#include "exec/sim/explore.h"
#include "world/network.h"

#ifndef MKERNEL_VERSION
#define MKERNEL_VERSION "0.0.0"
#endif

namespace mkernel::cli {
namespace {

constexpr std::array<std::string_view, 6> kCommands = {"run", "sim", "plan", "verify", "bench", "info"};
constexpr std::int64_t kMaxRanks = 65536;  // what plan/tiling.h: validate accepts, as nodes x gpus
constexpr std::int64_t kMaxSms = 1024;
constexpr int kHostSms = 3;                 // one each that first computes, copies in the node, and receives
constexpr std::int64_t kMaxThreads = 4096;  // what world/world.cc accepts on the host
constexpr std::int64_t kMaxTile = 1024;
constexpr std::int64_t kMaxInt = (std::int64_t{1} << 31) - 1;

constexpr std::string_view kOpHelp =
    "all_gather_gemm (ag_gemm), gemm_reduce_scatter (gemm_rs),\ngemm_all_reduce (gemm_ar), ring_attention "
    "(ring_attn) or\nring_attention_backward (ring_attn_bwd)";

constexpr std::string_view kUnits =
    "Sizes are whole numbers, with k for x 1024 and m for x 1024 x 1024. MiB are 2^20 bytes, GB/s 10^9 bytes per "
    "second.\n"
    "Exit code: 0 good, 1 a check failed, 2 bad arguments (nothing was started), 3 the run failed.";

OptionSet::Apply fill_into(const char* option, Fill& target) {
  return into(target, [option](const std::string& text) {
    static constexpr std::array<std::string_view, 2> kNames = {"uniform", "integer"};
    return parse_choice(option, text, kNames);
  });
}
static_assert(static_cast<int>(Fill::kUniform) == 0 && static_cast<int>(Fill::kInteger) == 1);

struct Defaults {
  Topology topo;
  std::int64_t size = 512;
  AttentionDefaults attention;
};
constexpr Defaults kHostDefaults = {{2, 4}, 512, {1024, 4, 64}};
constexpr Defaults kSimDefaults = {{2, 8}, 8192, {65536, 16, 128}};

ProblemArgs problem_defaults(const Defaults& defaults) {
  ProblemArgs problem;
  problem.topo = defaults.topo;
  problem.gemm.m = problem.gemm.n = problem.gemm.k = defaults.size;
  return problem;
}

// The options that decide a plan. `problem` outlives the set.
void add_problem(OptionSet& options, ProblemArgs& problem, const Defaults& defaults) {
  GemmOptions& gemm = problem.gemm;
  options.group("problem: C (M x N) = A (M x K) * B (K x N)");
  options.value("--nodes", "N", fmt::format("nodes [{}]", defaults.topo.nodes),
                count_into("--nodes", problem.topo.nodes, 1, kMaxRanks));
  options.value("--gpus", "G", fmt::format("GPUs of a node; there are N x G ranks [{}]", defaults.topo.gpus),
                count_into("--gpus", problem.topo.gpus, 1, kMaxRanks));
  options.value("--m", "SIZE", fmt::format("rows of A and C, over all ranks [{}]", defaults.size),
                size_into("--m", gemm.m));
  options.value("--n", "SIZE", fmt::format("columns of B and C, over all ranks [{}]", defaults.size),
                size_into("--n", gemm.n));
  options.value("--k", "SIZE", fmt::format("columns of A and rows of B, over all ranks [{}]", defaults.size),
                size_into("--k", gemm.k));
  options.value("--dtype", "TYPE", "bf16, fp16 or fp32, of A, B and C; sums are fp32 [bf16]",
                into(gemm.dtype, [](const std::string& text) { return parse_dtype("--dtype", text); }));
  options.flag("--fp32-partials", "sums travel between GPUs in fp32, not in TYPE", &gemm.fp32_partials);
  options.group("how it is cut; what is left out is chosen from the sizes");
  options.value("--bm", "ROWS", "rows (queries) of a tile, a power of two up to 1024",
                count_into("--bm", gemm.bm, 1, kMaxTile));
  options.value("--bn", "COLS", "columns of a tile, a power of two up to 1024; keys of one (ring_attn_bwd)",
                count_into("--bn", gemm.bn, 1, kMaxTile));
  options.value("--band", "TILES", "tile rows that are visited together", count_into("--band", gemm.band, 1, kMaxInt));
  options.value("--chunk-tiles", "TILES", "tiles per network write (gemm_rs, gemm_ar)",
                count_into("--chunk-tiles", gemm.chunk_tiles, 1, kMaxInt));
  options.value("--chunk-rows", "ROWS",
                "rows of A per network write (ag_gemm), a multiple of --bm;\ntokens (ring_attention)",
                count_into("--chunk-rows", gemm.chunk_rows, 1, kMaxInt));
  add_attention(options, problem.attention, defaults.attention);
}

void add_operator(OptionSet& options, ProblemArgs& problem) {
  options.positional("OP", std::string(kOpHelp),
                     into(problem.gemm.op, [](const std::string& text) { return parse_op(text); }));
}

Status require_operator(const OptionSet& options, std::string_view command) {
  if (options.given("OP")) return Ok{};
  return bad_argument(
      fmt::format("mkernel {} wants an operator: all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce, "
                  "ring_attention or ring_attention_backward",
                  command));
}

Status note_given(const OptionSet& options, ProblemArgs& problem) {
  problem.sizes_given = options.given("--m") || options.given("--n") || options.given("--k");
  problem.dtype_given = options.given("--dtype");
  return settle_attention(options, problem);
}

// What ring_attention and its backward have not got.
Status check_attention_run(const OptionSet& options, const RunArgs& run, bool balanced) {
  const std::string_view op = op_name(run.problem.gemm.op);
  if (run.problem.is_backward()) {
    if (run.world.device == Device::kCuda) {
      return Error{ErrorKind::kUnsupported,
                   "--device cuda: ring_attention_backward has no kernel for GPUs yet: take --device host or sim"};
    }
    for (const char* name : {"--unfused", "--compare"}) {
      if (!options.given(name)) continue;
      return bad_argument(fmt::format("{} is not for run {}: mkernel sim --compare shows it", name, op));
    }
  }
  if (balanced) return bad_argument(fmt::format("--link balanced is not for {} so far: give a number", op));
  for (const char* name : {"--input", "--output", "--fill", "--network"}) {
    if (options.given(name)) return bad_argument(fmt::format("{} is not for {} so far", name, op));
  }
  return Ok{};
}

// What GPUs have not got.
Status check_cuda_run(const RunArgs& run, bool unfused, bool balanced) {
  if (unfused) return bad_argument("--unfused and --compare are not for --device cuda: `mkernel bench` compares there");
  if (balanced) return bad_argument("--link balanced is not for --device cuda: `mkernel bench` has it");
  if (run.problem.gemm.dtype == Dtype::kFp32) {
    return bad_argument("--dtype is fp32: with --device cuda it must be bf16 or fp16");
  }
  return Ok{};
}

Result<Command> parse_run(std::span<const std::string> args) {
  RunArgs run;
  run.problem = problem_defaults(kHostDefaults);
  WorldOptions& world = run.world;
  std::array<std::string_view, 3> devices = {"host", "sim", "cuda"};
  bool no_check = false;
  bool want_check = false;
  bool unfused = false;

  OptionSet options(
      "mkernel run OP [options]",
      "Runs an operator with real data on this machine: all ranks in this process, threads instead of SMs\n"
      "(or virtual time), the network behind a link model. Checks the result against fp64.\n"
      "Started by mpirun, torchrun or srun every process runs one rank, and --network joins them.");
  add_operator(options, run.problem);
  add_problem(options, run.problem, kHostDefaults);
  options.group("where and how");
  options.value("--device", "DEVICE",
                "host: CPU threads, real time; sim: virtual time of 8-GPU H200 nodes;\n"
                "cuda: Hopper GPUs, ranks share them where there are too few [host]",
                into(world.device, [&](const std::string& text) { return parse_choice("--device", text, devices); }));
  options.value("--sms", "COUNT", "SMs of a rank: threads on the host [host: 3, sim: 132, cuda: all there are]",
                count_into("--sms", world.sms, 1, kMaxSms));
  options.value("--partition", "C,I,R",
                "SMs that first compute, copy and reduce in the node, and receive;\n"
                "they add up to --sms [chosen from the plan]",
                into(world.partition, [](const std::string& text) { return parse_partition("--partition", text); }));
  LinkChoice link;
  options.value("--link", "LINK",
                "network of a rank, each direction [host: none, sim: ib]:\n"
                "none            as fast as memory allows\n"
                "ib              50 GB/s, 2 us\n"
                "efa             50 GB/s, 15 us, writes overtake each other\n"
                "GBPS[:LATENCY_US][:unordered]   such as 0.5:10\n"
                "balanced        as slow as the arithmetic: the unfused computation is timed\n"
                "                first, then the busiest rank's network gets the same time",
                into(link, [](const std::string& text) { return parse_link("--link", text); }));
  options.value("--network", "NAME",
                "between processes: libfabric, verbs (RDMA), verbs-counted (the same,\n"
                "nothing assumed about order), efa [MKERNEL_NETWORK, else libfabric]",
                into(run.network, [](const std::string& text) -> Result<std::string> {
                  const auto known = parse_choice("--network", text, network_names());
                  if (!known) return known.error();
                  return text;
                }));
  options.flag("--copy-engine", "cuda: the copy engine moves the network's bytes, not spare SMs",
               &world.copy_engine_wire);
  options.value("--ring-depth", "COUNT",
                "network commands in flight per destination node, a power of two\nup to 65536 [256]",
                count_into("--ring-depth", world.ring_depth, 1, 65536));
  options.value("--deadline", "SECONDS", "a wait that lasts longer fails the run, 0.001 to 1e6 [600]",
                into(world.deadline_s,
                     [](const std::string& text) { return parse_number("--deadline", text, 1e-3, 1e6, "seconds"); }));
  options.value("--repeat", "COUNT", "timed runs; the median is shown [5]",
                count_into("--repeat", run.repeat, 1, 1'000'000));
  options.flag("--unfused", "communication and GEMM one after the other, same tasks", &unfused);
  options.flag("--compare", "fused and unfused in turn, and their ratio", &run.compare);
  options.group("data");
  options.value("--seed", "SEED", "of the input, and of the simulator's schedule [1]",
                into(world.seed, [](const std::string& text) { return parse_seed("--seed", text); }));
  options.value("--fill", "KIND", "uniform: from [-1, 1); integer: -2 to 2 [uniform]", fill_into("--fill", run.fill));
  options.value("--input", "DIR",
                "reads A.npy (M x K) and B.npy (K x N): sizes and type come from the files,\n"
                "with --dtype they are rounded to it",
                path_into("--input", run.input));
  options.value("--output", "DIR", "writes C.npy (M x N)", path_into("--output", run.output));
  options.flag("--check", "compare with fp64: all rows up to 2^32 products, else 64 of them [on]", &want_check);
  options.flag("--no-check", "do not", &no_check);
  options.group("what is shown");
  options.flag("--json", "one JSON object on stdout, nothing else", &run.json);
  options.value("--trace", "FILE", "timeline of one more run, for ui.perfetto.dev", path_into("--trace", run.trace));
  options.footer(
      "examples:\n"
      "  mkernel run gemm_ar --m 1k --n 1k --k 8k --link balanced --compare\n"
      "  mkernel run ag_gemm --nodes 3 --gpus 1 --m 1000 --link 0.5:10 --trace trace.json\n"
      "  mkernel run gemm_rs --input in --output out --dtype bf16\n"
      "  mkernel run ring_attention --nodes 2 --gpus 2 --seq 2k --heads 8 --kv-heads 2 --causal --zigzag\n\n" +
      std::string(kUnits));

  auto help = parse_or_help(options, args);
  if (!help) return help.error();
  if (*help) return Command(**help);
  if (const Status status = require_operator(options, "run"); !status) return status.error();
  if (const Status status = note_given(options, run.problem); !status) return status.error();
  run.m_given = options.given("--m");
  run.n_given = options.given("--n");
  run.k_given = options.given("--k");
  run.nodes_given = options.given("--nodes");
  run.gpus_given = options.given("--gpus");
  run.link_given = options.given("--link");

  if (want_check && no_check) return bad_argument("--check and --no-check are both given: give one of them");
  if (unfused && run.compare) return bad_argument("--unfused and --compare are both given: --compare runs both ways");
  if (options.given("--fill") && options.given("--input")) {
    return bad_argument("--fill and --input are both given: input comes from one of them");
  }
  if (run.problem.is_attention()) {
    if (const Status status = check_attention_run(options, run, link.balanced); !status) return status.error();
  }
  run.check = !no_check;
  run.problem.gemm.fused = !unfused;
  if (world.device == Device::kSim && !options.given("--link")) link = *parse_link("--link", "ib");
  run.balanced_link = link.balanced;
  world.link = link.link;
  if (world.device == Device::kSim) {
    // To the simulator 0 means "as its preset says", so "as fast as can be" needs a number.
    if (world.link.gigabytes_per_s == 0) world.link.gigabytes_per_s = 1e6;
    if (world.link.latency_us == 0) world.link.latency_us = 1e-3;
  }
  world.nodes = run.problem.topo.nodes;
  world.gpus = run.problem.topo.gpus;
  if (!options.given("--sms")) {
    world.sms = world.device == Device::kSim ? CostModel{}.sms : world.device == Device::kHost ? kHostSms : 0;
  }
  if (world.device == Device::kCuda) {
    if (const Status status = check_cuda_run(run, unfused || run.compare, link.balanced); !status)
      return status.error();
  }
  if (link.balanced && world.nodes == 1) {
    return bad_argument("--link balanced with --nodes 1 has no network to balance: take --nodes 2 or more");
  }
  if ((world.ring_depth & (world.ring_depth - 1)) != 0) {
    return bad_argument(fmt::format("--ring-depth is {}: it must be a power of two from 1 to 65536", world.ring_depth));
  }
  if (world.sms > 0) {  // else it is checked when the GPU has been asked
    if (const Status status = validate_partition(world.partition, world.sms); !status) return status.error();
  }
  const std::int64_t threads = std::int64_t{world.nodes} * world.gpus * world.sms;
  if (world.device == Device::kHost && threads > kMaxThreads) {
    return bad_argument(
        fmt::format("--nodes {} x --gpus {} x --sms {} is {} threads: at most {} are accepted with "
                    "--device host",
                    world.nodes, world.gpus, world.sms, threads, kMaxThreads));
  }
  // With files the sizes are not known yet.
  if (run.input.empty()) {
    if (const auto spec = make_problem_spec(run.problem); !spec) return spec.error();
  }
  return Command(std::move(run));
}

// `explore` gives seeds, so nothing that describes one world may be there.
Status refuse_with_seeds(const OptionSet& options) {
  for (const char* name :
       {"--preset",        "--nodes",      "--gpus",     "--m",        "--n",           "--k",          "--dtype",
        "--fp32-partials", "--bm",         "--bn",       "--band",     "--chunk-tiles", "--chunk-rows", "--sms",
        "--partition",     "--ring-depth", "--deadline", "--seed",     "--fill",        "--compare",    "--data",
        "--trace",         "--batch",      "--heads",    "--kv-heads", "--dim",         "--seq",        "--seq-k",
        "--causal",        "--window",     "--zigzag",   "--packed",   "--scale",       "--slots"}) {
    if (options.given(name)) {
      return bad_argument(
          fmt::format("{} and --seeds are both given: with --seeds every seed makes up its own world, "
                      "shape and schedule",
                      name));
    }
  }
  return Ok{};
}

Result<Command> parse_sim(std::span<const std::string> args) {
  SimArgs sim;
  sim.problem = problem_defaults(kSimDefaults);
  ExploreArgs explore;
  bool all = false;

  OptionSet options(
      "mkernel sim OP [options]\n       mkernel sim OP|all --seeds FIRST:COUNT [--inject LIST] [--json]",
      "Runs a plan in virtual time, from 1 to 65536 ranks: how long it would take on a cluster. With --seeds\n"
      "it looks for mistakes instead: small random worlds with real data, faults and a race detector.");
  options.positional("OP", std::string(kOpHelp) + "; with --seeds also all", [&](const std::string& text) -> Status {
    all = text == "all";
    if (all) return Ok{};
    const auto op = parse_op(text, "(with --seeds) all");
    if (!op) return op.error();
    sim.problem.gemm.op = *op;
    explore.op = *op;
    return Ok{};
  });
  add_problem(options, sim.problem, kSimDefaults);
  options.group("the cluster");
  options.value("--preset", "NAME", fmt::format("{} [{}]", one_of(preset_names()), sim.preset),
                [&](const std::string& text) -> Status {
                  const std::vector<std::string_view> names = preset_names();
                  const auto index = parse_choice("--preset", text, names);
                  if (!index) return index.error();
                  sim.preset = names[*index];
                  return Ok{};
                });
  options.value("--sms", "COUNT", "SMs of a rank that the operator may use [132]",
                count_into("--sms", sim.sms, 1, kMaxSms));
  options.value("--partition", "C,I,R",
                "SMs that first compute, copy and reduce in the node, and receive;\n"
                "they add up to --sms [chosen from the plan]",
                into(sim.partition, [](const std::string& text) { return parse_partition("--partition", text); }));
  options.value("--ring-depth", "COUNT",
                "network commands in flight per destination node, a power of two\nup to 65536 [256]",
                count_into("--ring-depth", sim.ring_depth, 1, 65536));
  options.value("--deadline", "SECONDS", "a wait that lasts longer (in virtual time) fails the run, 0.001 to 1e6 [600]",
                into(sim.deadline_s,
                     [](const std::string& text) { return parse_number("--deadline", text, 1e-3, 1e6, "seconds"); }));
  options.value("--seed", "SEED", "of the schedule, and of the input with --data [1]",
                into(sim.seed, [](const std::string& text) { return parse_seed("--seed", text); }));
  options.flag("--compare", "fused and unfused, and their ratio", &sim.compare);
  options.flag("--data", "move real data and compare the result with fp64; else only time passes", &sim.data);
  options.value("--fill", "KIND", "uniform: from [-1, 1); integer: -2 to 2; with --data [uniform]",
                fill_into("--fill", sim.fill));
  options.group("looking for mistakes");
  options.value("--seeds", "FIRST:COUNT", "one random world, shape, tiling and schedule for each seed",
                into(explore.seeds, [](const std::string& text) { return parse_seed_range("--seeds", text); }));
  options.value(
      "--inject", "LIST",
      fmt::format("faults that seeds may draw: all, none, or some of\n{} [all]", fmt::join(injection_names(), ",\n")),
      [&](const std::string& text) -> Status {
        auto names = parse_names("--inject", text, injection_names());
        if (!names) return names.error();
        explore.injections = std::move(names).value();
        explore.inject_text = text;
        return Ok{};
      });
  options.group("what is shown");
  options.flag("--json", "one JSON object on stdout, nothing else", &sim.json);
  options.value("--trace", "FILE", "timeline for ui.perfetto.dev", path_into("--trace", sim.trace));
  options.footer(
      "examples:\n"
      "  mkernel sim gemm_ar --m 8k --n 8k --k 512 --compare\n"
      "  mkernel sim ag_gemm --preset h200x8-efa --nodes 4 --m 16k --n 1k --k 16k --trace trace.json\n"
      "  mkernel sim gemm_rs --nodes 128 --m 16k --n 16k --k 16k\n"
      "  mkernel sim ring_attention --nodes 4 --seq 128k --causal --zigzag --compare\n"
      "  mkernel sim all --seeds 1:1000 --inject all\n\n" +
      std::string(kUnits));

  auto help = parse_or_help(options, args);
  if (!help) return help.error();
  if (*help) return Command(**help);
  if (const Status status = require_operator(options, "sim"); !status) return status.error();
  if (options.given("--seeds")) {
    if (const Status status = refuse_with_seeds(options); !status) return status.error();
    if (!options.given("--inject")) explore.injections = *parse_names("--inject", "all", injection_names());
    explore.json = sim.json;
    return Command(std::move(explore));
  }
  if (all) return bad_argument("operator 'all' wants --seeds FIRST:COUNT here: without it, name one operator");
  if (options.given("--inject"))
    return bad_argument("--inject wants --seeds FIRST:COUNT: faults are drawn from a seed");
  if (options.given("--fill") && sim.problem.is_attention()) {
    return bad_argument(fmt::format("--fill is not for {} so far", op_name(sim.problem.gemm.op)));
  }
  if (options.given("--fill") && !sim.data) return bad_argument("--fill wants --data: without it no data is moved");
  if (const Status status = note_given(options, sim.problem); !status) return status.error();
  const auto cost = find_preset(sim.preset);
  if (!cost) return cost.error();
  if (sim.sms == 0) sim.sms = cost->sms;
  if ((sim.ring_depth & (sim.ring_depth - 1)) != 0) {
    return bad_argument(fmt::format("--ring-depth is {}: it must be a power of two from 1 to 65536", sim.ring_depth));
  }
  if (const Status status = validate_partition(sim.partition, sim.sms); !status) return status.error();
  if (const auto spec = make_problem_spec(sim.problem); !spec) return spec.error();
  return Command(std::move(sim));
}

Result<Command> parse_plan(std::span<const std::string> args) {
  PlanArgs plan;
  plan.problem = problem_defaults(kHostDefaults);
  OptionSet options("mkernel plan OP [options]",
                    "Prints what one rank does: every lane of every role, what each task waits for, does and signals.");
  add_operator(options, plan.problem);
  options.group("what is shown");
  options.value("--rank", "RANK", "whose plan, from 0 to N x G - 1 [0]",
                count_into("--rank", plan.rank, 0, kMaxRanks - 1));
  options.value("--tasks", "COUNT", "tasks of a lane that are shown, first and last [8]",
                count_into("--tasks", plan.tasks, 0, kMaxInt));
  options.flag("--json", "one JSON object on stdout, nothing else", &plan.json);
  add_problem(options, plan.problem, kHostDefaults);
  options.footer(
      "examples:\n"
      "  mkernel plan gemm_ar --rank 3\n"
      "  mkernel plan ag_gemm --nodes 3 --gpus 2 --m 1000 --tasks 100\n\n" +
      std::string(kUnits));

  auto help = parse_or_help(options, args);
  if (!help) return help.error();
  if (*help) return Command(**help);
  if (const Status status = require_operator(options, "plan"); !status) return status.error();
  if (const Status status = note_given(options, plan.problem); !status) return status.error();
  if (const auto spec = make_problem_spec(plan.problem); !spec) return spec.error();
  const int world = plan.problem.topo.world();
  if (plan.rank >= world) {
    return bad_argument(
        fmt::format("--rank is {}: it must be from 0 to {}, since there are {} ranks", plan.rank, world - 1, world));
  }
  return Command(std::move(plan));
}

Result<Command> parse_verify(std::span<const std::string> args) {
  VerifyArgs verify;
  ProblemArgs problem = problem_defaults(kHostDefaults);
  bool all = false;
  OptionSet options(
      "mkernel verify OP [options]\n       mkernel verify all [--json]",
      "Proves by enumeration that a plan is right: every byte of the result is written once, signals and waits "
      "balance,\n"
      "no partition of SMs can deadlock, no call overwrites what another still needs, and the network carries\n"
      "no byte more than the operator needs. `all` proves the standard cases: all operators, many worlds and "
      "shapes.");
  options.positional("OP", std::string(kOpHelp) + ", or all", [&](const std::string& text) -> Status {
    all = text == "all";
    if (all) return Ok{};
    const auto op = parse_op(text, "all");
    if (!op) return op.error();
    problem.gemm.op = *op;
    return Ok{};
  });
  add_problem(options, problem, kHostDefaults);
  options.group("what is shown");
  options.flag("--json", "one JSON object on stdout, nothing else", &verify.json);
  options.footer(
      "examples:\n"
      "  mkernel verify all\n"
      "  mkernel verify gemm_rs --nodes 3 --gpus 5 --m 1000 --n 700 --k 64\n"
      "  mkernel verify ring_attention --nodes 3 --gpus 2 --seq 10000 --slots 2\n\n" +
      std::string(kUnits));

  auto help = parse_or_help(options, args);
  if (!help) return help.error();
  if (*help) return Command(**help);
  if (!options.given("OP")) {
    return bad_argument(
        "mkernel verify wants all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce, ring_attention, "
        "ring_attention_backward or all");
  }
  if (all) {
    if (options.given_count() > (verify.json ? 2u : 1u)) {
      return bad_argument("mkernel verify all takes no sizes: name one operator to verify sizes of your own");
    }
    return Command(verify);
  }
  if (const Status status = note_given(options, problem); !status) return status.error();
  if (const auto spec = make_problem_spec(problem); !spec) return spec.error();
  verify.problem = problem;
  return Command(std::move(verify));
}

Result<Command> parse_info(std::span<const std::string> args) {
  InfoArgs info;
  OptionSet options("mkernel info [--json]", "Says what this build holds, what this machine has, and what is missing.");
  options.flag("--json", "one JSON object on stdout, nothing else", &info.json);
  auto help = parse_or_help(options, args);
  if (!help) return help.error();
  if (*help) return Command(**help);
  return Command(info);
}

std::string overview() {
  return std::string(
             "usage: mkernel COMMAND [options]\n\n"
             "Fused GEMM or attention and communication over nodes of GPUs, as plans that are proved, simulated and "
             "run.\n\n"
             "commands:\n"
             "  run OP      run an operator with real data on this machine and check the result\n"
             "  sim OP      run it in virtual time on a cluster, or look for mistakes over many seeds\n"
             "  plan OP     print what each rank does\n"
             "  verify OP   prove a plan right; `verify all` proves the standard cases\n"
             "  bench OP    measure on a GPU against cuBLAS and unfused ways; `bench suite NAME` measures many shapes\n"
             "  info        what this build and this machine have\n"
             "  COMMAND --help shows the options of a command; --version the version.\n\n"
             "operators:\n"
             "  all_gather_gemm (ag_gemm)        every rank has some rows of A and some columns of B;\n"
             "                                   it gets its columns of C\n"
             "  gemm_reduce_scatter (gemm_rs)    every rank has some columns of A and rows of B;\n"
             "                                   it gets some rows of C\n"
             "  gemm_all_reduce (gemm_ar)        the same; every rank gets all of C\n"
             "  ring_attention (ring_attn)       every rank has some tokens of Q, K and V; it gets its tokens of O\n"
             "  ring_attention_backward (ring_attn_bwd)\n"
             "                                   the same, with O and its gradient; it gets the gradients of its "
             "tokens\n"
             "                                   of Q, K and V (not on GPUs yet)\n\n"
             "examples:\n"
             "  mkernel run gemm_ar --m 1k --n 1k --k 8k --link balanced --compare\n"
             "  mkernel sim gemm_ar --m 8k --n 8k --k 512 --compare\n"
             "  mkernel verify all\n\n") +
         std::string(kUnits) + "\n";
}

}  // namespace

std::span<const std::string_view> command_names() { return kCommands; }

std::string version_text() {
#ifdef MKERNEL_GIT_COMMIT
  return "mkernel " MKERNEL_VERSION " (commit " MKERNEL_GIT_COMMIT ")";
#else
  return "mkernel " MKERNEL_VERSION;
#endif
}

Result<Command> parse_args(std::span<const std::string> args) {
  if (args.empty()) {
    return bad_argument(fmt::format("a command is missing: give {}, or --help", one_of(kCommands)));
  }
  const std::string& first = args[0];
  const std::span<const std::string> rest = args.subspan(1);
  if (first == "run") return parse_run(rest);
  if (first == "sim") return parse_sim(rest);
  if (first == "plan") return parse_plan(rest);
  if (first == "verify") return parse_verify(rest);
  if (first == "bench") return parse_bench(rest);
  if (first == "info") return parse_info(rest);
  if (first == "--help" || first == "-h" || first == "help" || first == "--version") {
    if (!rest.empty() && first == "help") {
      const std::vector<std::string> again = {rest[0], "--help"};
      if (rest.size() == 1 && rest[0] != "help") return parse_args(again);
    }
    if (!rest.empty()) {
      return bad_argument(fmt::format("argument {} is one too many after {}", quote(rest[0]), first));
    }
    return Command(TextArgs{first == "--version" ? version_text() + "\n" : overview()});
  }
  return bad_argument(fmt::format("command {} is not known: it must be {}{}", quote(first), one_of(kCommands),
                                  suggestion(first, kCommands)));
}

}  // namespace mkernel::cli
