// What the command line asks for, checked as far as that is possible without looking at the machine or at files.
#pragma once
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "bench/link.h"
#include "cli/values.h"
#include "exec/fill.h"
#include "plan/spec.h"

namespace mkernel::cli {

// Operator, world, sizes and how they are cut: shared by all commands.
struct ProblemArgs {
  GemmOptions gemm;                    // its op names those of attention too
  AttentionBackwardOptions attention;  // of ring_attention, and of its backward
  Topology topo;
  bool sizes_given = false;  // any of --m, --n, --k
  bool dtype_given = false;

  bool is_attention() const { return attends(gemm.op); }
  bool is_backward() const { return gemm.op == Op::kRingAttentionBackward; }
};

struct RunArgs {
  ProblemArgs problem;
  WorldOptions world;  // complete but for a balanced link
  bool balanced_link = false;
  Fill fill = Fill::kUniform;
  int repeat = 5;
  bool check = true;
  bool compare = false;
  bool json = false;
  std::string network;           // between processes; empty: as the environment says
  std::filesystem::path input;   // empty: made from the seed
  std::filesystem::path output;  // empty: not written
  std::filesystem::path trace;   // empty: none
  // Which of --m, --n, --k were given, to compare with files.
  bool m_given = false;
  bool n_given = false;
  bool k_given = false;
  // Which of --nodes, --gpus were given, to be made up where a launcher says how many ranks there are.
  bool nodes_given = false;
  bool gpus_given = false;
  bool link_given = false;
};

struct SimArgs {
  ProblemArgs problem;
  std::string preset = "h200x8-ib";
  int sms = 0;  // 0: as the preset says
  Partition partition;
  int ring_depth = 256;
  double deadline_s = 600;
  std::uint64_t seed = 1;
  Fill fill = Fill::kUniform;
  bool compare = false;
  bool data = false;
  bool json = false;
  std::filesystem::path trace;
};

// `mkernel sim OP|all --seeds`: many small random worlds.
struct ExploreArgs {
  std::optional<Op> op;  // none: all operators
  SeedRange seeds;
  std::string inject_text = "all";  // as given, for the command that replays a seed
  std::vector<std::string> injections;
  bool json = false;
};

struct PlanArgs {
  ProblemArgs problem;
  int rank = 0;
  int tasks = 8;  // per lane
  bool json = false;
};

struct VerifyArgs {
  std::optional<ProblemArgs> problem;  // none: all standard cases
  bool json = false;
};

// `mkernel bench`: one case, or a suite of them.
struct BenchArgs {
  enum class What { kGemmCore, kOperator, kSuite };
  What what = What::kGemmCore;
  std::string suite;  // kSuite: one of those that parse_bench() knows
  ProblemArgs problem;
  bool b_transposed = false;  // gemm_core
  int sms = 0;                // 0: all there are
  Partition partition;
  bool sweep_partition = false;
  bench::LinkRule link;
  int rounds = 0;       // 0: 7 for gemm_core, else 3
  double block_ms = 0;  // 0: 10 for gemm_core, else 30
  std::string filter;   // of the suite's cases, those with this in their name
  std::filesystem::path measured = "bench/results/virtual_cluster-h200.json";  // sim_vs_measured
  bool calibrate = false;                                                      // sim_vs_measured
  std::filesystem::path json;                                                  // empty: no file
  std::string commit;
  std::string command;  // as given
};

struct InfoArgs {
  bool json = false;
};

// What --help or --version print.
struct TextArgs {
  std::string text;
};

using Command = std::variant<TextArgs, RunArgs, SimArgs, ExploreArgs, PlanArgs, VerifyArgs, BenchArgs, InfoArgs>;

Result<Command> parse_args(std::span<const std::string> args);

// "mkernel 0.1.0 (commit ...)".
std::string version_text();

// The names of the commands.
std::span<const std::string_view> command_names();

}  // namespace mkernel::cli
