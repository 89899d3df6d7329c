// One operator as the host executor sees it: its plan, its workspace on every rank, and how far every lane has come.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "exec/host/run_log.h"
#include "exec/memory.h"
#include "exec/schedule.h"
#include "mkernel/mkernel.h"
#include "plan/plan.h"

namespace mkernel {

struct HostOperatorConfig {
  std::shared_ptr<const PlanSource> source;
  Partition partition;  // not all zero
  int sms = 1;          // per rank
  bool fused = true;
  std::uint64_t start_epoch = 0;      // epochs that have run before, for tests of the wrap
  std::optional<int> workspace_fill;  // byte that the workspace is full of before creation, for tests
  // A world of several processes: the only rank that runs here, and heaps by rank, each of at least host_heap_bytes()
  // and zeroed; null where we cannot reach them. -1: all ranks run here, and the operator takes memory itself.
  std::int32_t own_rank = -1;
  std::vector<std::byte*> heaps;
};

// Bytes of one rank's heap where GPUs of a node are processes: the plan's workspace and, for GEMM + AllReduce, a window
// for C, since no process can write into a matrix of another's caller.
std::int64_t host_heap_bytes(const Plan& plan);

// Zeroed memory, aligned to 256 bytes as Memory wants it. Throws std::bad_alloc.
class HeapBlock {
 public:
  explicit HeapBlock(std::int64_t bytes);
  std::byte* data() const { return data_; }

 private:
  struct Free {
    void operator()(std::byte* block) const;
  };
  std::unique_ptr<std::byte, Free> block_;
  std::byte* data_ = nullptr;
};

class HostOperator {
 public:
  // A lane of one rank. `head` is {ticket of the call 32, next task 32}: a thread that comes late from an earlier call
  // finds another ticket there and can neither take nor skip a task of this one.
  struct alignas(64) Lane {
    std::atomic<std::uint64_t> head{0};
    std::atomic<bool> sending{false};  // send lanes: one thread at a time pushes records
    std::int64_t count = 0;
  };
  // How far a rank's current call has come.
  struct alignas(64) Progress {
    std::atomic<std::int64_t> unfinished{0};    // tasks
    std::atomic<std::int64_t> first_phase{0};   // of these in the first phase, when not fused
    std::atomic<std::uint64_t> gate_ticket{0};  // the last call for which this rank has opened the gate
    std::atomic<bool> failure_told{false};      // wait() has returned the failure of the world once
    std::uint64_t launches = 0;                 // guarded by the executor's launch mutex
    std::uint64_t last_ticket = 0;              // of the last launch, guarded by the rank's stream
  };

  // Throws std::bad_alloc.
  HostOperator(std::uint32_t number, const HostOperatorConfig& config);

  std::uint32_t number() const { return number_; }
  const PlanSource& source() const { return *config_.source; }
  const Plan& plan() const { return config_.source->plan(); }
  const Servers& servers() const { return servers_; }
  const HeapLayout& layout() const { return memory_.layout(); }
  Memory& memory() { return memory_; }
  bool fused() const { return config_.fused; }
  std::uint64_t start_epoch() const { return config_.start_epoch; }

  Lane& lane(std::int32_t rank, Role role, std::int32_t lane) { return lanes_[lane_begin(rank, role) + lane]; }
  Progress& progress(std::int32_t rank) { return progress_[rank]; }
  Scratch& scratch(std::int32_t rank, int sm) {
    const std::int32_t index = config_.own_rank < 0 ? rank : 0;
    return scratch_[static_cast<std::size_t>(index) * config_.sms + sm];
  }

  // A flag of a rank's heap; `index` counts both parities.
  std::atomic_ref<std::uint32_t> flag(std::int32_t rank, std::int64_t index) const {
    return std::atomic_ref<std::uint32_t>(reinterpret_cast<std::uint32_t*>(memory_.heap(rank))[index]);
  }
  bool met(std::int32_t rank, const Wait& wait, std::uint64_t epoch) const;

  // Sets all lanes of a rank to the start of the call `ticket`.
  void start(std::int32_t rank, std::uint64_t ticket);

  // Not fused: two phases, and the second of a call begins on every rank when the first has ended on all. (Plans of
  // three phases run fused only.)
  bool in_first_phase(Role role) const { return plan().phase(role, 0) == 0; }
  // `turn` counts a rank's calls of this operator from 0.
  bool gate_open(std::uint64_t turn) const;
  // Called once per rank and call, with 1: this rank's first phase has ended. In a world of several processes somebody
  // then counts the other ranks. True when all have been counted.
  bool open_gate(std::uint64_t turn, std::int32_t ranks);
  // Whether at least one rank has been counted.
  bool gate_reached(std::uint64_t turn) const;

  // Names the caller's matrices for `epoch`, and the window in the place of C where there is one.
  void bind(std::int32_t rank, std::uint64_t epoch, const Arguments& arguments);
  // C is written into a window of the heap first.
  bool has_windows() const { return windows_; }
  // Copies the window to the caller's C, when the call is complete but for that.
  void deliver(std::int32_t rank, const Arguments& arguments) const;

  // Bytes that have landed over the network.
  std::atomic<std::int64_t> network_bytes{0};

  // The log of the traced run that is under way, if any.
  void set_trace(std::shared_ptr<RunLog> log);
  std::shared_ptr<RunLog> trace() const;

 private:
  Matrix window(std::int32_t rank) const;
  std::size_t lane_begin(std::int32_t rank, Role role) const {
    return static_cast<std::size_t>(rank) * lanes_per_rank_ + role_begin_[static_cast<int>(role)];
  }

  std::uint32_t number_;
  HostOperatorConfig config_;
  Servers servers_;
  std::vector<HeapBlock> heaps_;  // empty where the caller has given the heaps
  Memory memory_;
  bool windows_ = false;
  std::size_t lanes_per_rank_ = 0;
  std::size_t role_begin_[kRoleCount] = {};
  std::unique_ptr<Lane[]> lanes_;
  std::unique_ptr<Progress[]> progress_;
  std::vector<Scratch> scratch_;              // of the ranks that run here
  std::atomic<std::uint64_t> gates_[2] = {};  // by parity of the turn: how many ranks have come through, over all calls

  std::atomic<bool> tracing_{false};
  mutable std::mutex trace_mutex_;
  std::shared_ptr<RunLog> trace_;
};

}  // namespace mkernel
