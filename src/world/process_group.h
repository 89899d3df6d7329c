// The processes of a world as one of them sees it: who they are, how their heaps are reached, and what they agree on.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exec/host/node_bells.h"
#include "mkernel/mkernel.h"
#include "net/process_endpoint.h"
#include "plan/topology.h"
#include "world/bootstrap.h"
#include "world/file_exchange.h"
#include "world/shared_block.h"

namespace mkernel {

class ProcessGroup {
 public:
  // All processes call it with the same world. Errors: those of Bootstrap and of the network; kBadArgument when the
  // processes ask for different worlds.
  static Result<std::unique_ptr<ProcessGroup>> create(const WorldOptions& options);

  std::int32_t rank() const { return rank_; }
  // Among the processes of this host, by rank.
  int local_index() const;
  ProcessEndpoint* endpoint() const { return endpoint_.get(); }  // null with one node
  Bootstrap& bootstrap() { return *bootstrap_; }

  // Returns when all ranks have got as far as we, with `status`. When any rank's is an error all get it.
  Status confirm(const std::string& what, const Status& status);
  // Returns when all ranks have come to do `what`. Errors: kBadArgument, the same on all, when their texts differ, and
  // which rank's.
  Status agree(const std::string& what, const std::string& text);
  // Zeroed memory of ours and of the node's other ranks, by rank; those of other nodes have none.
  Result<std::vector<SharedBlock>> share_memory(const std::string& what, std::int64_t bytes);
  // Gives the file descriptor `file` (which stays the caller's), and how many bytes it stands for, to the node's other
  // ranks, and returns theirs, by GPU; our own place is empty. `made` is an error where there is no file to give: then
  // all get it.
  Result<std::vector<SharedFile>> share_file(const std::string& what, const Status& made, int file, std::int64_t bytes);
  // A bell for each GPU of the node; null with one GPU per node.
  NodeBell* node_bells() const { return reinterpret_cast<NodeBell*>(bells_.data()); }
  // Opens a heap to all peers, and all theirs to us; returns when all ranks have done so.
  Status share_heap(std::uint32_t op, void* data, std::int64_t bytes, std::uint64_t start_epoch);
  // All ranks' numbers, by rank; as many on each.
  Result<std::vector<std::vector<std::int64_t>>> gather(const std::string& what, const std::vector<std::int64_t>& mine);

 private:
  ProcessGroup(const WorldOptions& options, std::unique_ptr<Bootstrap> bootstrap)
      : rank_(options.processes.rank),
        topo_{options.nodes, options.gpus},
        deadline_s_(options.deadline_s),
        bootstrap_(std::move(bootstrap)) {}
  Status open_endpoint(const WorldOptions& options);
  Status learn_hosts();
  // PCI addresses of the GPUs of this host's processes, by local index.
  Result<std::vector<std::string>> learn_gpus();
  Status share_bells();
  // exchange() of longer texts, in parts.
  Result<std::vector<std::string>> exchange_long(const std::string& what, const std::string& text);

  std::int32_t rank_;
  Topology topo_;
  double deadline_s_;
  std::unique_ptr<Bootstrap> bootstrap_;
  std::vector<std::string> hosts_;  // by rank
  SharedBlock bells_;
  std::unique_ptr<ProcessEndpoint> endpoint_;
};

}  // namespace mkernel
