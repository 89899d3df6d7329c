#include "exec/sim/explore.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "base/random.h"
#include "exec/backward_problem.h"
#include "exec/problem.h"
#include "exec/sim/simulator.h"
#include "plan/attention_tiling.h"
#include "plan/print.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

constexpr std::string_view kNames[] = {"shuffle", "delay", "reorder", "slow",    "withhold", "late",
                                       "die",     "again", "wrap",    "shallow", "long"};
constexpr Nanos kMillisecond = 1'000'000;
constexpr Nanos kSecond = 1'000'000'000;

template <class T, std::size_t kCount>
T pick(Random& random, const T (&values)[kCount]) {
  return values[random.below(kCount)];
}

// `fused` false: all chunks are taken in before any is read, so there must be slots for all.
PlanSpec random_attention_spec(Random& random, Op op, Topology topo, bool fused) {
  constexpr std::int64_t kLengths[] = {0, 1, 7, 31, 33, 64, 65, 96, 127};
  constexpr struct { std::int64_t batch, heads, kv_heads; } kHeads[] = {{1, 1, 1}, {1, 4, 2}, {2, 3, 1}, {1, 2, 2}};
  PlanSpec spec;
  spec.op = op;
  spec.topo = topo;
  spec.dtype = spec.partial = static_cast<Dtype>(random.below(3));
  AttentionSpec& a = spec.attention;
  const auto heads = pick(random, kHeads);
  a.batch = heads.batch;
  a.heads = heads.heads;
  a.kv_heads = heads.kv_heads;
  a.dim = random.chance(0.7) ? 8 : 24;
  a.seq_q = pick(random, kLengths);
  a.seq_k = random.chance(0.7) ? a.seq_q : pick(random, kLengths);
  a.mask.causal = random.chance(0.5);
  a.mask.left = random.chance(0.3) ? static_cast<std::int64_t>(random.below(40)) : -1;
  a.mask.right = random.chance(0.2) ? static_cast<std::int64_t>(random.below(10)) : -1;
  a.zigzag = random.chance(0.5);
  a.packed = random.chance(0.2) && a.batch == 1;
  const bool backward = op == Op::kRingAttentionBackward;
  if (backward && random.chance(0.3)) spec.partial = Dtype::kFp32;
  spec.tiling = backward ? choose_backward_tiling(spec) : choose_attention_tiling(spec);
  if (backward && random.chance(0.75)) spec.tiling.bn = static_cast<std::int32_t>(1 + random.below(17));
  if (random.chance(0.75)) {
    spec.tiling.bm = 8 << random.below(3);
    spec.tiling.chunk_rows = static_cast<std::int32_t>(1 + random.below(20));
  }
  const std::uint64_t rounds = random.below(4);
  a.slot_rounds = fused ? static_cast<std::int64_t>(rounds) : 0;
  return spec;
}

PlanSpec random_spec(Random& random, Op op, Topology topo, bool fused) {
  if (attends(op)) return random_attention_spec(random, op, topo, fused);
  constexpr std::int64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129};
  PlanSpec spec;
  spec.op = op;
  spec.topo = topo;
  spec.m = pick(random, kSizes);
  spec.n = pick(random, kSizes);
  spec.k = pick(random, kSizes);
  spec.dtype = static_cast<Dtype>(random.below(3));
  spec.partial = random.chance(0.25) ? Dtype::kFp32 : spec.dtype;
  spec.tiling = choose_tiling(spec);
  if (random.chance(0.75)) {  // small tiles, so that small shapes have many
    constexpr std::int32_t kTiles[] = {8, 16, 32, 64};
    spec.tiling.bm = pick(random, kTiles);
    spec.tiling.bn = pick(random, kTiles);
    spec.tiling.band = static_cast<std::int32_t>(1 + random.below(4));
    spec.tiling.chunk_tiles = static_cast<std::int32_t>(1 + random.below(5));
    spec.tiling.chunk_rows = spec.tiling.bm * static_cast<std::int32_t>(1 + random.below(3));
    spec.tiling.copy_rows =
        static_cast<std::int32_t>(1 + random.below(static_cast<std::uint64_t>(spec.tiling.chunk_rows)));
    spec.tiling.pitch_align = random.chance(0.5) ? 8 : 1;
    // Any number of shards that can share a tile, or else as many as fit.
    spec.tiling.grid_shards = static_cast<std::int32_t>(1 + random.below(static_cast<std::uint64_t>(topo.world())));
    if (!validate(spec)) spec.tiling.grid_shards = choose_grid_shards(spec, spec.tiling.bm);
  }
  return spec;
}

Topology random_topology(Random& random) {
  constexpr Topology kSmall[] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {2, 2}, {2, 3}, {2, 4},
                                 {3, 1}, {3, 2}, {4, 1}, {4, 2}, {5, 1}, {1, 7}, {3, 3}, {1, 5}};
  constexpr Topology kLarge[] = {{3, 4}, {4, 3}, {12, 1}, {5, 3}, {15, 1}, {4, 6}, {8, 3}, {2, 12}};
  return random.chance(0.06) ? pick(random, kLarge) : pick(random, kSmall);
}

std::string describe_spec(const PlanSpec& spec) {
  if (attends(spec.op)) {
    const bool backward = spec.op == Op::kRingAttentionBackward;
    return fmt::format("{} {}x{} {}, tiles of {}{}, chunks of {}, {} rounds", op_name(spec.op), spec.topo.nodes,
                       spec.topo.gpus, attention_text(spec), spec.tiling.bm,
                       backward ? fmt::format(" x {}", spec.tiling.bn) : "", spec.tiling.chunk_rows,
                       spec.attention.slot_rounds);
  }
  return fmt::format("{} {}x{} m={} n={} k={} {}{} tile {}x{} of {} shards, band {} chunk {}/{} copy {} pitch {}",
                     op_name(spec.op), spec.topo.nodes, spec.topo.gpus, spec.m, spec.n, spec.k, dtype_name(spec.dtype),
                     spec.partial != spec.dtype ? " fp32-partials" : "", spec.tiling.bm, spec.tiling.bn,
                     spec.tiling.grid_shards, spec.tiling.band, spec.tiling.chunk_tiles, spec.tiling.chunk_rows,
                     spec.tiling.copy_rows, spec.tiling.pitch_align);
}

Partition random_partition(Random& random, int sms) {
  if (random.chance(0.4)) return {};
  const int compute = static_cast<int>(random.below(static_cast<std::uint64_t>(sms) + 1));
  const int intra = static_cast<int>(random.below(static_cast<std::uint64_t>(sms - compute) + 1));
  return {compute, intra, sms - compute - intra};
}

}  // namespace

std::vector<std::string_view> injection_names() { return {std::begin(kNames), std::end(kNames)}; }

ExploreResult explore_seed(std::optional<Op> op, std::uint64_t seed, const std::vector<std::string>& injections) {
  Random random(seed);
  const auto drawn = [&](std::string_view name) {
    const bool chosen = random.chance(0.5);  // drawn always, so that naming fewer injections changes no more than these
    const bool allowed = std::any_of(injections.begin(), injections.end(),
                                     [&](const std::string& given) { return given == "all" || given == name; });
    return chosen && allowed;
  };
  const Op first = op ? *op : static_cast<Op>(random.below(kOpCount));
  SimOptions options;
  options.topo = random_topology(random);
  options.seed = random.next();
  options.sms = static_cast<int>(1 + random.below(5));
  options.partition = random_partition(random, options.sms);
  options.races = true;
  options.fused = !random.chance(0.1);
  options.cost.sms = options.sms;
  options.cost.gemm_flops_per_ns = 200;
  options.cost.nvlink_bytes_per_ns = 20;
  options.cost.net_bytes_per_ns = 2;

  Injection& inject = options.inject;
  const std::int32_t world = options.topo.world();
  inject.shuffle = drawn("shuffle");
  if (drawn("delay")) options.cost.jitter = 3;
  if (drawn("reorder")) {
    inject.net_jitter_ns = 20'000;
    inject.net_pieces = static_cast<int>(random.below(4));
  }
  if (drawn("slow")) inject.slow_sm = 0.2;
  if (drawn("withhold")) {
    // One, half, or all but one; given back late or (but for the whole run) never.
    const int choices[] = {1, options.sms / 2, options.sms - 1};
    inject.withheld_sms = std::min(pick(random, choices), options.sms - 1);
    inject.withheld_until_ns = random.chance(0.5) ? 200 * kMillisecond : 500 * kSecond;
  }
  if (drawn("late")) {
    inject.late_rank = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(world)));
    inject.late_ns = (random.chance(0.5) ? 90 : 300) * kSecond;
  }
  const bool may_die = random.chance(0.2);
  if (drawn("die") && may_die) {
    inject.dead_rank = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(world)));
    inject.dead_ns = static_cast<Nanos>(random.below(200'000));
  }
  if (drawn("again")) inject.post_again = 0.3;
  if (drawn("wrap")) inject.start_epoch = (std::uint64_t{1} << 33) - 5 + random.below(4);
  if (drawn("shallow")) options.ring_depth = random.chance(0.5) ? 1 : 2;

  // One or two operators, called in a random order a few times, each call with its own data.
  std::vector<PlanSpec> specs{random_spec(random, first, options.topo, options.fused)};
  // "long": many calls of several operators on one world, in any order.
  const bool may_be_many = random.chance(0.1);
  const bool many = drawn("long") && may_be_many;
  const std::size_t operator_count = many ? 4 : random.chance(0.3) ? 2 : 1;
  while (specs.size() < operator_count) {
    specs.push_back(
        random_spec(random, op ? *op : static_cast<Op>(random.below(kOpCount)), options.topo, options.fused));
  }
  ExploreResult result;
  result.scenario = fmt::format("seed {}: {}", seed, describe_spec(specs[0]));
  for (std::size_t i = 1; i < specs.size(); ++i) result.scenario += " and " + describe_spec(specs[i]);
  std::vector<std::unique_ptr<PlanSource>> sources;
  std::vector<const PlanSource*> operators;
  for (const PlanSpec& spec : specs) {
    if (Status valid = validate(spec); !valid) {
      result.failure = valid.error();
      return result;
    }
    sources.push_back(std::make_unique<PlanSource>(Plan(spec)));
    operators.push_back(sources.back().get());
  }
  std::vector<std::function<std::optional<std::string>()>> checks;  // of the calls' results
  std::vector<SimCall> calls;
  const auto call_count = many ? 50 : 1 + random.below(5);
  for (std::uint64_t i = 0; i < call_count; ++i) {
    const auto which = static_cast<std::size_t>(random.below(specs.size()));
    const std::uint64_t data_seed = random.next();
    const bool apart = random.chance(0.5);  // rows with gaps between them
    const auto add = [&](auto problem) {
      calls.push_back({static_cast<int>(which), problem->arguments()});
      checks.push_back([problem] { return problem->mismatch(); });
    };
    if (specs[which].op == Op::kRingAttention) {
      add(std::make_shared<AttentionProblem>(operators[which]->plan(), data_seed,
                                             AttentionProblem::Inputs{.by_token = apart}));
    } else if (specs[which].op == Op::kRingAttentionBackward) {
      add(std::make_shared<BackwardProblem>(operators[which]->plan(), data_seed,
                                            BackwardProblem::Inputs{.by_token = apart}));
    } else {
      add(std::make_shared<Problem>(operators[which]->plan(), data_seed, apart ? 3 : 0));
    }
  }
  result.scenario += fmt::format(
      "; {} calls, {} SMs {},{},{}{}{}{}{}{}{}{}{}{}{}", calls.size(), options.sms, options.partition.compute,
      options.partition.intra, options.partition.recv, options.fused ? "" : ", unfused",
      inject.shuffle ? ", shuffle" : "", options.cost.jitter > 0 ? ", delay" : "",
      inject.net_jitter_ns > 0 ? fmt::format(", reorder ({} pieces)", inject.net_pieces) : "",
      inject.slow_sm > 0 ? ", slow" : "",
      inject.withheld_sms > 0 ? fmt::format(", {} SMs withheld", inject.withheld_sms) : "",
      inject.late_rank >= 0 ? fmt::format(", rank {} {} s late", inject.late_rank, inject.late_ns / kSecond) : "",
      inject.dead_rank >= 0 ? fmt::format(", rank {} dies", inject.dead_rank) : "",
      inject.post_again > 0 ? ", posts fail" : "", inject.start_epoch > 0 ? ", flags wrap" : "");

  const SimReport report = simulate(options, operators, calls);
  if (report.error) {
    const std::string name = fmt::format("rank {}", inject.dead_rank);
    const bool expected = inject.dead_rank >= 0 && report.error->kind == ErrorKind::kPeerLost &&
                          report.error->message.find(name) != std::string::npos;
    if (!expected) result.failure = report.error;
    return result;
  }
  for (std::size_t i = 0; i < checks.size(); ++i) {
    if (const auto wrong = checks[i]()) {
      result.failure = Error{ErrorKind::kCheckFailed, fmt::format("call {}: {}", i, *wrong)};
      return result;
    }
  }
  std::int64_t bound = 0;
  for (const SimCall& call : calls) {
    const Plan& plan = operators[static_cast<std::size_t>(call.op)]->plan();
    for (std::int32_t rank = 0; rank < world; ++rank) bound += plan.network_bytes(rank);
  }
  if (bound != report.network_bytes) {
    result.failure = Error{ErrorKind::kCheckFailed, fmt::format("{} bytes crossed the network, but {} are the bound",
                                                                report.network_bytes, bound)};
  }
  return result;
}

}  // namespace mkernel
