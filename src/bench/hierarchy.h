// Hierarchical against flat movement: the same operator, sizes and SMs in a world of N nodes of G GPUs, and in one of
// N * G nodes of one GPU, where every GPU sends to every other over its own link. The fused calls alone, in paired
// rounds of one process.
#pragma once
#include <memory>
#include <vector>

#include "bench/virtual_cluster.h"

namespace mkernel::bench {

struct HierarchyOptions {
  Topology first = {2, 4};  // that run() will probably be asked for first
  int rounds = 3;
  double timed_ms = 30;  // of back-to-back calls of one world in one round, about
  int sms = 0;           // per rank; 0: all there are
};

// One of the two worlds.
struct MovementResult {
  Topology topo;
  PlanSpec spec;
  Partition partition;
  double network_bytes = 0;     // per call and GPU, as the proxies counted them
  std::int64_t plan_bytes = 0;  // of the busiest rank, as the plan says
  double error = 0;             // ||C - reference|| / ||reference||, the largest over the ranks
  ClusterTime time;
};

struct HierarchyResult {
  int sms = 0;
  LinkRate link;
  MovementResult hierarchical;
  MovementResult flat;
  std::vector<double> ratios;  // per round, flat / hierarchical time
};

// The world of as many ranks in which nothing but the network connects GPUs.
inline Topology flat_topology(const Topology& topo) { return {topo.world(), 1}; }

class HierarchyBench {
 public:
  // Errors: kUnsupported, naming what is missing.
  static Result<std::unique_ptr<HierarchyBench>> create(const HierarchyOptions& options);
  virtual ~HierarchyBench() = default;
  // `problem` has nodes of several GPUs, and several nodes; its partition is not looked at. Errors: kCheckFailed,
  // kOutOfMemory, kBadArgument concern this problem only.
  virtual Result<HierarchyResult> run(const ClusterProblem& problem) = 0;
  virtual const Machine& machine() const = 0;
};

}  // namespace mkernel::bench
