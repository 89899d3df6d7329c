#include "cli/bench_args.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <utility>

#include "cli/apply.h"
#include "exec/schedule.h"
#include "ops/gemm_spec.h"

namespace mkernel::cli {
namespace {

constexpr std::array<std::string_view, 7> kSuites = {
    "gemm_core", "virtual_cluster", "small", "hierarchical", "command_ring", "sim_vs_measured", "sim_hierarchical"};
constexpr std::int64_t kMaxRanks = 65536;
constexpr std::int64_t kMaxSms = 1024;
constexpr std::int64_t kMaxTile = 1024;
constexpr std::int64_t kMaxInt = (std::int64_t{1} << 31) - 1;
constexpr double kSlowestGigabytesPerS = 1e-3;

// What only some forms take, so that nobody believes in an option that does nothing.
struct Limited {
  const char* option;
  bool core;
  bool op;
  bool core_suite;
  bool cluster_suite;
  bool simulated_suite = false;
  bool ring_suite = false;
  bool sim_pairs_suite = false;
};
constexpr Limited kLimited[] = {
    {"--m", true, true, false, false},
    {"--n", true, true, false, false},
    {"--k", true, true, false, false},
    {"--nodes", false, true, false, false},
    {"--gpus", false, true, false, false},
    {"--dtype", true, true, true, true},
    {"--transposed", true, false, true, false},
    {"--fp32-partials", false, true, false, true},
    {"--bm", true, true, true, true},
    {"--bn", true, true, true, true},
    {"--band", true, true, true, true},
    {"--chunk-tiles", false, true, false, true},
    {"--chunk-rows", false, true, false, true},
    {"--sms", false, true, false, true},
    {"--partition", false, true, false, false},
    {"--sweep-partition", false, true, false, true},
    {"--link", false, true, false, false},
    {"--filter", false, false, true, true, true, false, true},
    {"--rounds", true, true, true, true, false, true},
    {"--block-ms", true, true, true, true},
    {"--measured", false, false, false, false, true},
    {"--calibrate", false, false, false, false, true},
};

std::string quoted_command(std::span<const std::string> args) {
  std::string text = "mkernel bench";
  for (const std::string& word : args) {
    const bool plain = !word.empty() && word.find_first_of(" \t\n\"'\\$&|;<>()*?`") == std::string::npos;
    text += plain ? " " + word : " '" + word + "'";
  }
  return text;
}

Status check_form(const OptionSet& options, const BenchArgs& bench) {
  const bool suite = bench.what == BenchArgs::What::kSuite;
  const bool core = bench.what == BenchArgs::What::kGemmCore || bench.suite == "gemm_core";
  for (const Limited& limited : kLimited) {
    const bool of_suite = bench.suite == "sim_vs_measured"    ? limited.simulated_suite
                          : bench.suite == "sim_hierarchical" ? limited.sim_pairs_suite
                          : bench.suite == "command_ring"     ? limited.ring_suite
                          : core                              ? limited.core_suite
                                                              : limited.cluster_suite;
    const bool taken = suite ? of_suite : core ? limited.core : limited.op;
    if (taken || !options.given(limited.option)) continue;
    const std::string form = suite  ? fmt::format("mkernel bench suite {}", bench.suite)
                             : core ? "mkernel bench gemm_core"
                                    : "mkernel bench OP";
    return bad_argument(fmt::format("{} is not for `{}`, which does not look at it", limited.option, form));
  }
  return Ok{};
}

Status check_problem(const BenchArgs& bench) {
  const GemmOptions& gemm = bench.problem.gemm;
  if (gemm.dtype == Dtype::kFp32) return bad_argument("--dtype is fp32: on a GPU it must be bf16 or fp16");
  if (bench.what == BenchArgs::What::kSuite) return Ok{};
  for (const auto& [name, size] : {std::pair("--m", gemm.m), std::pair("--n", gemm.n), std::pair("--k", gemm.k)}) {
    if (size < 1) return bad_argument(fmt::format("{} is {}: a benchmark wants 1 or more", name, size));
  }
  if (bench.what == BenchArgs::What::kGemmCore) return Ok{};
  if (bench.link.kind == bench::LinkRule::Kind::kBalanced && bench.problem.topo.nodes == 1) {
    return bad_argument("--link balanced with --nodes 1 has no network to balance: take --nodes 2 or more");
  }
  if (bench.sweep_partition && bench.partition != Partition{}) {
    return bad_argument("--partition and --sweep-partition are both given: the sweep finds the partition");
  }
  if (bench.sms > 0) {
    if (const Status status = validate_partition(bench.partition, bench.sms); !status) return status;
  }
  if (const auto spec = make_gemm_spec(bench.problem.topo, gemm); !spec) return spec.error();
  return Ok{};
}

void add_options(OptionSet& options, BenchArgs& bench) {
  GemmOptions& gemm = bench.problem.gemm;
  options.group("problem: C (M x N) = A (M x K) * B (K x N)");
  options.value("--nodes", "N", "nodes [2]", count_into("--nodes", bench.problem.topo.nodes, 1, kMaxRanks));
  options.value("--gpus", "G", "GPUs of a node; there are N x G ranks [4]",
                count_into("--gpus", bench.problem.topo.gpus, 1, kMaxRanks));
  options.value("--m", "SIZE", "rows of A and C, over all ranks [4096]", size_into("--m", gemm.m));
  options.value("--n", "SIZE", "columns of B and C, over all ranks [4096]", size_into("--n", gemm.n));
  options.value("--k", "SIZE", "columns of A and rows of B, over all ranks [4096]", size_into("--k", gemm.k));
  options.value("--dtype", "TYPE", "bf16 or fp16, of A, B and C; sums are fp32 [bf16]",
                into(gemm.dtype, [](const std::string& text) { return parse_dtype("--dtype", text); }));
  options.flag("--transposed", "gemm_core: B is stored as N x K", &bench.b_transposed);
  options.flag("--fp32-partials", "sums travel between GPUs in fp32, not in TYPE", &gemm.fp32_partials);
  options.group("how it is cut; what is left out is chosen from the sizes");
  options.value("--bm", "ROWS", "rows of a tile: 64 or 128", count_into("--bm", gemm.bm, 1, kMaxTile));
  options.value("--bn", "COLS", "columns of a tile: 64, 128 or 256", count_into("--bn", gemm.bn, 1, kMaxTile));
  options.value("--band", "TILES", "tile rows that are visited together", count_into("--band", gemm.band, 1, kMaxInt));
  options.value("--chunk-tiles", "TILES", "tiles per network write (gemm_rs, gemm_ar)",
                count_into("--chunk-tiles", gemm.chunk_tiles, 1, kMaxInt));
  options.value("--chunk-rows", "ROWS", "rows of A per network write (ag_gemm), a multiple of --bm",
                count_into("--chunk-rows", gemm.chunk_rows, 1, kMaxInt));
  options.group("where");
  options.value("--sms", "COUNT", "SMs of a rank [all there are]", count_into("--sms", bench.sms, 1, kMaxSms));
  options.value("--partition", "C,I,R", "SMs that first compute, and the others; they add up to --sms [chosen]",
                into(bench.partition, [](const std::string& text) { return parse_partition("--partition", text); }));
  options.flag("--sweep-partition", "tries 1 to half of the SMs for communication, and takes the fastest",
               &bench.sweep_partition);
  options.value("--link", "LINK",
                "network of a rank, each direction [scaled]:\n"
                "scaled          its SMs' share of 50 GB/s, 5 us\n"
                "balanced        the wire takes as long as the GEMM alone, 5 us\n"
                "none            as fast as the wire can\n"
                "GBPS[:LATENCY_US]",
                into(bench.link, [](const std::string& text) { return parse_bench_link("--link", text); }));
  options.group("how it is measured");
  options.value("--rounds", "COUNT", "rounds, all contestants in each; medians are shown [gemm_core: 7, else 3]",
                count_into("--rounds", bench.rounds, 1, 1000));
  options.value(
      "--block-ms", "MS", "what is timed together, 0.1 to 10000 [gemm_core: 10, else 30]",
      into(bench.block_ms, [](const std::string& text) { return parse_number("--block-ms", text, 0.1, 1e4, "ms"); }));
  options.value("--filter", "TEXT", "of a suite, the cases whose names contain TEXT",
                [&bench](const std::string& text) -> Status {
                  bench.filter = text;
                  return Ok{};
                });
  options.value("--measured", "FILE",
                "sim_vs_measured: rows of the suite virtual_cluster\n"
                "[bench/results/virtual_cluster-h200.json]",
                path_into("--measured", bench.measured));
  options.flag("--calibrate", "sim_vs_measured: fits the preset h200-virtual to every second case first",
               &bench.calibrate);
  options.group("what is shown");
  options.value("--json", "FILE", "adds rows to the JSON array in FILE", path_into("--json", bench.json));
  options.value("--commit", "HASH", "for the rows [MKERNEL_COMMIT, else unknown]",
                [&bench](const std::string& text) -> Status {
                  bench.commit = text;
                  return Ok{};
                });
}

}  // namespace

Result<bench::LinkRule> parse_bench_link(std::string_view option, std::string_view text) {
  using Rule = bench::LinkRule;
  if (text == "scaled") return Rule{Rule::Kind::kScaled};
  if (text == "balanced") return Rule{Rule::Kind::kBalanced};
  if (text == "none") return Rule{Rule::Kind::kNone};
  const auto link = parse_link(option, text);
  const bool number = !text.empty() && text[0] >= '0' && text[0] <= '9';
  if (!number || !link || link->link.unordered || link->link.gigabytes_per_s < kSlowestGigabytesPerS) {
    static constexpr std::array<std::string_view, 3> kNames = {"scaled", "balanced", "none"};
    return bad_argument(fmt::format(
        "{} is {}: it must be scaled, balanced, none or GBPS[:LATENCY_US], such as 6:5, with GBPS from 0.001 to 1e6{}",
        option, quote(text), suggestion(text, kNames)));
  }
  return Rule{Rule::Kind::kFixed, link->link.gigabytes_per_s, link->link.latency_us};
}

Result<Command> parse_bench(std::span<const std::string> args) {
  BenchArgs bench;
  bench.problem.topo = {2, 4};
  bench.problem.gemm.m = bench.problem.gemm.n = bench.problem.gemm.k = 4096;
  bench.command = quoted_command(args);
  OptionSet options(
      "mkernel bench gemm_core [options]\n       mkernel bench OP [options]\n"
      "       mkernel bench suite gemm_core|virtual_cluster|small|hierarchical|command_ring|sim_vs_measured|\n"
      "                           sim_hierarchical [options]",
      "Measures on a Hopper GPU. gemm_core: the kernel alone on a whole GPU against cublasGemmEx and the best of\n"
      "cublasLt. OP: a virtual cluster on one GPU, fused against cuBLAS followed by communication, and against cuBLAS\n"
      "in chunks overlapped with communication. Results are checked first; ratios are of paired times.\n"
      "hierarchical: N nodes of G GPUs against N x G nodes of one, fused both. Two need no GPU: sim_vs_measured, the\n"
      "simulator against results that are there, and sim_hierarchical, what it says of the cases of hierarchical.");
  options.positional(
      "OP",
      "gemm_core, all_gather_gemm (ag_gemm), gemm_reduce_scatter (gemm_rs),\n"
      "gemm_all_reduce (gemm_ar), or suite",
      [&](const std::string& text) -> Status {
        if (text == "gemm_core") return Ok{};
        bench.what = text == "suite" ? BenchArgs::What::kSuite : BenchArgs::What::kOperator;
        if (text == "suite") return Ok{};
        const auto op = parse_op(text, "gemm_core, suite");
        if (!op) return op.error();
        if (*op == Op::kRingAttentionBackward) {
          return Error{ErrorKind::kUnsupported, "bench has no ring_attention_backward: it has no kernel for GPUs yet"};
        }
        if (*op == Op::kRingAttention) {
          return Error{ErrorKind::kUnsupported,
                       "bench has no ring_attention yet: bench/attention/attention_core.py measures it"};
        }
        bench.problem.gemm.op = *op;
        return Ok{};
      });
  options.positional("NAME", "of a suite", [&](const std::string& text) -> Status {
    if (bench.what != BenchArgs::What::kSuite) {
      return bad_argument(
          fmt::format("argument {} is one too many: only `mkernel bench suite` takes a second name", quote(text)));
    }
    const auto index = parse_choice("the suite", text, kSuites);
    if (!index) return index.error();
    bench.suite = kSuites[*index];
    return Ok{};
  });
  add_options(options, bench);
  options.footer(
      "examples:\n"
      "  mkernel bench gemm_core --m 8k --n 8k --k 8k\n"
      "  mkernel bench gemm_ar --m 4k --n 4k --k 16k --link balanced --sweep-partition\n"
      "  mkernel bench ag_gemm --nodes 2 --gpus 2 --m 8k --n 4k --k 4k --link 12:5\n"
      "  mkernel bench suite gemm_core --json bench/results/gemm_core-h200.json\n"
      "  mkernel bench suite virtual_cluster --filter gemm_all_reduce\n\n"
      "cuBLAS is loaded from where the system finds it, or from the folder in MKERNEL_CUBLAS_DIR.\n"
      "Sizes are whole numbers, with k for x 1024 and m for x 1024 x 1024. GB/s are 10^9 bytes per second.\n"
      "Exit code: 0 good, 1 a check failed, 2 bad arguments or something is missing, 3 the run failed.");

  auto help = parse_or_help(options, args);
  if (!help) return help.error();
  if (*help) return Command(**help);
  if (!options.given("OP")) {
    return bad_argument("mkernel bench wants gemm_core, an operator (ag_gemm, gemm_rs, gemm_ar), or suite and a name");
  }
  if (bench.what == BenchArgs::What::kSuite && bench.suite.empty()) {
    return bad_argument(fmt::format("mkernel bench suite wants a name: {}", one_of(kSuites)));
  }
  if (const Status status = check_form(options, bench); !status) return status.error();
  if (!options.given("--link") && bench.problem.topo.nodes == 1) bench.link = {bench::LinkRule::Kind::kNone};
  if (const Status status = check_problem(bench); !status) return status.error();
  if (bench.commit.empty()) {
    const char* commit = std::getenv("MKERNEL_COMMIT");
    bench.commit = commit != nullptr && *commit != '\0' ? commit : "unknown";
  }
  return Command(std::move(bench));
}

}  // namespace mkernel::cli
