// Runs plans for real: one thread per SM of every rank that is in this process, which are all or one, and threads that
// step the network.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "exec/host/host_network.h"
#include "exec/host/host_operator.h"
#include "exec/host/host_shared.h"
#include "exec/host/launch_log.h"
#include "mkernel/result.h"

namespace mkernel {

// Operators that one world may have, over all its life: their numbers are not given twice, since a proxy may remember.
inline constexpr std::uint32_t kMaxOperatorsPerWorld = kMaxOperators - 1;

struct HostExecutorOptions {
  Topology topo;
  int sms = 1;  // per rank
  LinkModel link;
  int ring_depth = 256;
  double deadline_s = 600;
  double warn_s = 30;
  std::function<void(const std::string&)> on_warning;
  int network_threads = 0;  // 0: chosen from the cores
  // A world of several processes: the rank that runs here (-1: all), its end of the network (null with one node), and
  // the bells of the node's GPUs (null when it has only one). Both outlive the executor.
  std::int32_t own_rank = -1;
  ProcessEndpoint* endpoint = nullptr;
  NodeBell* node_bells = nullptr;
  std::function<void(const Error&)> on_failure;  // told once of the first failure, by any thread
};

// Thread-safe.
class HostExecutor {
 public:
  // Errors: kOutOfMemory when the system gives no more memory or threads.
  static Result<std::unique_ptr<HostExecutor>> create(const HostExecutorOptions& options);
  // All operators have been removed.
  ~HostExecutor();

  // The number that the next operator gets.
  std::uint32_t next_operator();
  // Errors: kBadArgument (too many operators), kOutOfMemory, kAborted.
  Result<HostOperator*> add_operator(const HostOperatorConfig& config);
  // Waits for the calls that all ranks have launched. Fails the world when that can never end, because some ranks have
  // launched more calls than others.
  void remove_operator(HostOperator* op);

  // One rank's part of a call. Errors: kBadArgument (out of order, too many launches), kAborted.
  Status launch(HostOperator* op, std::int32_t rank, const Arguments& arguments);
  // All ranks' parts, with no other launch in between. `log` may be null.
  Status launch_all(HostOperator* op, std::span<const Arguments> arguments, std::shared_ptr<RunLog> log);
  // Waits until all launches of `op` on `rank` are complete. After a failure: until no thread touches a caller's
  // memory.
  Status wait(HostOperator* op, std::int32_t rank);
  // A world of several processes, and an operator that is not fused: returns when this rank's last launch has ended its
  // first phase, or the world has failed. The second phase begins here after open_gate(), for which the caller has
  // heard that the first has ended on all ranks.
  void await_first_phase(HostOperator* op);
  void open_gate(HostOperator* op);
  // After a failure: returns when nothing writes to any workspace any more.
  void wait_still();

  // Makes every rank leave every call; the first error counts.
  void fail(Error error) { shared_.fail(std::move(error)); }
  Failure& failure() { return shared_.failure; }
  // The rank's link is gone for good, for tests. There is more than one node.
  void cut_link(std::int32_t rank) { network_->cut_link(rank); }
  std::string flight_record(std::int32_t rank);

 private:
  explicit HostExecutor(const HostExecutorOptions& options);
  void start_threads();
  std::uint64_t last_turn(HostOperator* op);
  bool runs(std::int32_t rank) const { return options_.own_rank < 0 || options_.own_rank == rank; }
  // In a world of several processes the log knows our launches only.
  std::int32_t log_rank(std::int32_t rank) const { return options_.own_rank < 0 ? rank : 0; }
  Status check_room(std::int32_t rank) const;
  Status launch_locked(HostOperator* op, std::int32_t rank, const Arguments& arguments, std::shared_ptr<RunLog> log);

  HostExecutorOptions options_;
  Nanos start_ns_ = 0;
  HostShared shared_;
  std::unique_ptr<HostNetwork> network_;  // null with one node
  std::unique_ptr<NodeBells> node_bells_;
  std::vector<std::thread> sms_;

  std::mutex launch_mutex_;  // guards the log, the order of launches, and the tables of operators
  LaunchLog log_;
  std::vector<std::unique_ptr<HostOperator>> operators_;  // by number; null when removed
  std::vector<std::string> names_;                        // by number, also of removed ones
};

}  // namespace mkernel
