// Runs plans in virtual time: one thread, discrete events, reproducible from a seed. The ring, the proxy and the
// transport are the real ones; only clock, SMs and the speed of things are simulated.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "exec/arguments.h"
#include "exec/sim/cost_model.h"
#include "plan/plan.h"

namespace mkernel {

// What goes wrong on purpose.
struct Injection {
  bool shuffle = false;  // ready SMs and simultaneous events in random order, work done early or late in a task
  double slow_sm = 0;    // probability that an SM is 8 times slower
  int withheld_sms = 0;  // SMs of every rank that another kernel holds until `withheld_until_ns`
  Nanos withheld_until_ns = 0;
  int late_rank = -1;  // launches `late_ns` after the others
  Nanos late_ns = 0;
  int dead_rank = -1;  // stops for good at `dead_ns`
  Nanos dead_ns = 0;
  double post_again = 0;          // probability that a post fails for the moment
  Nanos net_jitter_ns = 0;        // extra, random, per network write or piece
  int net_pieces = 0;             // 0: as the cost model says; else counted-immediate arrivals in so many pieces
  std::uint64_t start_epoch = 0;  // epochs run before the first call; near 2^33 - 3 stamps wrap
};

struct SimOptions {
  Topology topo;
  int sms = 132;
  Partition partition;  // all zero: chosen from the plan
  CostModel cost;
  std::uint64_t seed = 1;
  bool data = true;    // move real data; false: only time
  bool races = false;  // check every access with vector clocks; for small worlds
  bool fused = true;
  bool trace = false;
  int ring_depth = 256;
  double deadline_s = 600;
  double warn_s = 30;
  Injection inject;
};

// One call of one operator on all ranks. Each rank makes its calls in order, with no barrier between ranks.
struct SimCall {
  int op = 0;                        // index into the operators
  std::vector<Arguments> arguments;  // by rank; empty when no data moves
};

struct SimReport {
  Nanos time_ns = 0;               // from the first launch to the last completion
  std::vector<Nanos> call_end_ns;  // when the last rank completed each call
  std::int64_t tasks = 0;
  std::int64_t events = 0;
  std::int64_t network_bytes = 0;
  std::vector<Partition> partitions;  // by operator
  std::optional<Error> error;         // the first failure: deadline, lost peer, or race (kCheckFailed)
  std::vector<std::string> warnings;
  std::vector<TraceEvent> trace;
};

// `operators[i]` is operator number i of the world. All have the topology of the options.
SimReport simulate(const SimOptions& options, std::span<const PlanSource* const> operators,
                   std::span<const SimCall> calls);

}  // namespace mkernel
