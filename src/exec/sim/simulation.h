// The state of one simulation. simulator.h is the way in; this file is for simulation.cc and its tests.
#pragma once
#include <array>
#include <deque>
#include <memory>
#include <memory_resource>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/random.h"
#include "exec/abort.h"
#include "exec/memory.h"
#include "exec/sim/event_queue.h"
#include "exec/sim/huge_pages.h"
#include "exec/sim/races.h"
#include "exec/sim/simulator.h"
#include "net/proxy.h"
#include "net/ring.h"

namespace mkernel {

class Simulation final : public Landing {
 public:
  Simulation(const SimOptions& options, std::span<const PlanSource* const> operators, std::span<const SimCall> calls);
  ~Simulation() override;
  SimReport run();

  void land(const Put& put, std::int64_t begin, std::int64_t bytes) override;
  void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override;

 private:
  static constexpr std::size_t kLine = 64;  // bytes of a cache line
  static constexpr int kGates = 2;          // between the phases of an unfused call (Plan::phase)
  static constexpr std::int32_t kNobody = -1;
  static constexpr std::int16_t kIdle = -1;      // an SM without a task
  static constexpr std::int16_t kWithheld = -2;  // an SM that another kernel holds

  // A flag, who waits for it (a list of lanes), and when its last raise becomes visible.
  struct Flag {
    std::uint32_t value = 0;
    std::int32_t waiter = kNobody;
    Nanos visible_at = 0;
  };
  // A lane shows its head task: the next one to be taken. The last lane of a rank stands for the call's completion.
  struct alignas(kLine) Lane {
    std::int64_t head = 0;
    std::int64_t count = 0;
    Nanos ready_at = 0;                  // when the last flag that it has waited for is visible
    std::int32_t next_waiter = kNobody;  // in the list of the flag that it waits for
    std::uint32_t target = 0;            // what that flag must reach
    std::uint32_t wait = 0;              // of the task's waits, those before this one are met,
    std::uint32_t scanned = 0;           // and this many flags of this one
    std::int16_t number = 0;
    Role role = Role::kCompute;
    std::int8_t phase = 0;  // of an unfused call
    bool open = false;      // false: gated (unfused), or not of this operator
    Task task;
  };
  // Keeps of its task only what its end needs: half a cache line, as SMs are many.
  struct alignas(kLine / 2) Sm {
    std::int64_t index = 0;  // of the task in its lane
    Signal signals[2];
    std::int32_t peer = -1;  // of the task
    std::int16_t lane = kIdle;
    bool slow = false;
    bool act_at_end = false;
  };
  struct alignas(kLine) Rank {
    std::size_t call = 0;
    std::uint64_t epoch = 0;
    bool running = false;
    bool dead = false;
    bool warned = false;
    std::int64_t remaining = 0;       // tasks of this call that are not finished
    std::int64_t gated[kGates] = {};  // those of each phase but the last of an unfused call
    std::int64_t moves_left = 0;      // tasks of intra and recv that no SM has taken
    Nanos progress_at = 0;
    Nanos proxy_at = kNever;
    std::vector<std::int32_t> ready[3];  // lanes with a ready head, by role (compute, intra, recv)
    std::vector<std::int32_t> idle[3];   // SMs without work, by their first role
    std::vector<std::int32_t> blocked;   // send lanes that found their ring full
  };
  struct Operator {
    explicit Operator(std::pmr::memory_resource* resource) : flags(resource) {}

    const PlanSource* source = nullptr;
    Plan plan;
    HeapLayout layout;
    Partition partition;
    std::vector<Role> first_roles;            // by SM
    std::vector<std::array<Role, 3>> orders;  // by SM: where it looks for work
    std::vector<std::uint64_t> epochs;        // by rank
    std::pmr::vector<Flag> flags;             // by rank and index
    std::size_t flags_per_rank = 0;           // of both parities
    std::vector<std::vector<std::byte>> heaps;
    std::unique_ptr<Memory> memory;
    std::unique_ptr<Scratch> scratch;

    Flag& flag(std::int32_t rank, std::int64_t index) {
      return flags[static_cast<std::size_t>(rank) * flags_per_rank + static_cast<std::size_t>(index)];
    }
  };
  struct Call {
    std::int32_t ranks_left = 0;
    std::int32_t gates_left[kGates] = {};  // ranks that have not ended this phase of an unfused call
    int phase = 0;                         // that all ranks may be in
  };

  // Actors of a rank, in this order: SMs, lanes, the proxy, then one of each Control.
  enum class Control : std::uint8_t { kLaunch, kWatch, kDie, kDeath, kReturnSms };

  // Roles that SMs serve, as indices of Rank::ready and Rank::idle.
  static std::size_t slot(Role role) { return role == Role::kCompute ? 0 : role == Role::kIntra ? 1 : 2; }

  void schedule(Nanos time, std::int32_t rank, std::int32_t actor) { queue_.push({time, rank, actor}); }
  void dispatch_event(const Event& event);
  void control(Control what, std::int32_t rank);
  std::int32_t sm_actor(std::int32_t sm) const { return sm; }
  std::int32_t lane_actor(std::int32_t lane) const { return options_.sms + lane; }
  std::int32_t proxy_actor() const { return options_.sms + lanes_per_rank_; }
  std::int32_t control_actor(Control what) const { return proxy_actor() + 1 + static_cast<std::int32_t>(what); }

  Lane& lane_of(std::int32_t rank, std::int32_t lane) { return lanes_[std::size_t(rank) * lanes_per_rank_ + lane]; }
  Sm& sm_of(std::int32_t rank, std::int32_t sm) { return sms_[std::size_t(rank) * options_.sms + sm]; }
  CommandRing& ring_to(std::int32_t rank, std::int32_t node) {
    return rings_[std::size_t(rank) * options_.topo.nodes + node];
  }
  Nanos& begin_of(std::int32_t rank, std::int32_t sm) { return begins_[std::size_t(rank) * options_.sms + sm]; }
  Operator& op_of(const Rank& rank) { return operators_[calls_[rank.call].op]; }

  void launch(std::int32_t rank);
  void pass_gate(std::size_t call, int phase);
  void open_gate(std::size_t call);
  void complete(std::int32_t rank);

  // Looks at the head of a lane: starts it, queues it, or registers it with the flag that it waits for.
  void advance(std::int32_t rank, std::int32_t lane);
  bool waits_met(std::int32_t rank, std::int32_t lane);
  void load_head(std::int32_t rank, Lane& lane);
  void finish_task(std::int32_t rank, const Lane& l);
  bool movers_compute(std::int32_t rank);
  void move_taken(std::int32_t rank, Role role);
  bool send(std::int32_t rank, Lane& lane);
  std::int32_t take_idle_sm(std::int32_t rank, Role role);
  void start(std::int32_t rank, std::int32_t sm, std::int32_t lane);
  void end(std::int32_t rank, std::int32_t sm);
  void next_task(std::int32_t rank, std::int32_t sm);
  void raise_signals(std::int32_t rank, const Sm& s, std::size_t process);
  void raise(Flag& flag, std::int32_t rank, std::uint32_t value, Nanos latency);
  Nanos duration(const Operator& op, std::int32_t rank, const Task& task, const Sm& sm);
  double refetch_ns(const Operator& op, std::int32_t rank) const;
  double backward_ns(const Plan& plan, std::int32_t rank, const Task& task) const;
  double attend_ns(const Plan& plan, std::int32_t rank, const Task& task) const;
  Nanos reserve(std::vector<Nanos>& link, std::int32_t rank, std::int64_t bytes);
  void step_proxy(std::int32_t rank);
  void wake_proxy(std::int32_t rank, Nanos when);
  void watch(std::int32_t rank);
  AbortRecord blocked_wait(std::int32_t rank);
  void fail(ErrorKind kind, std::string message);

  // Race checks; nothing when options.races is off.
  std::size_t sm_process(std::int32_t rank, std::int32_t sm) const;
  std::size_t send_process(std::int32_t rank) const;
  std::size_t net_process(std::int32_t src, std::int32_t dst) const;
  static std::uint64_t flag_key(std::uint32_t op, std::int32_t rank, std::int64_t flag);
  static std::uint64_t put_key(std::uint32_t op, std::int32_t rank, std::int64_t flag);
  static std::uint64_t rank_key(std::int32_t rank);
  void check_accesses(std::int32_t rank, std::int32_t sm);
  void check_access(std::size_t process, const ConstMatrix& matrix, bool write, std::uint64_t label,
                    const std::string& who);
  void acquire_waits(std::int32_t rank, const Operator& op, const Task& task, std::size_t process);
  std::string name_of(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index, const Task& task);

  SimOptions options_;
  CostModel cost_;
  // All that is as large as the world and never grows.
  HugePages huge_pages_;
  std::pmr::monotonic_buffer_resource memory_{&huge_pages_};

  std::vector<Operator> operators_;
  std::span<const SimCall> calls_;
  std::vector<Call> call_states_;
  std::int32_t world_ = 1;
  std::int32_t lanes_per_rank_ = 1;
  std::int32_t completion_lane_ = 0;
  Random random_;

  std::pmr::vector<Rank> ranks_{&memory_};
  std::pmr::vector<Lane> lanes_{&memory_};
  std::pmr::vector<Sm> sms_{&memory_};
  std::vector<Nanos> begins_;      // by SM, only for a trace: when its task began
  std::vector<Nanos> nvlink_out_;  // when each GPU's NVLink is free, per direction
  std::vector<Nanos> nvlink_in_;
  std::unique_ptr<LocalNetwork> network_;
  std::pmr::deque<CommandRing> rings_{&memory_};  // by rank and destination node; that to the own node is not used
  std::pmr::deque<Proxy> proxies_{&memory_};
  std::unique_ptr<RaceDetector> races_;
  std::unordered_map<std::uint64_t, std::size_t> put_process_;
  std::vector<std::string> labels_;  // what the race detector calls an access

  EventQueue queue_;
  Nanos now_ = 0;
  bool done_ = false;
  std::int32_t ranks_left_ = 0;
  SimReport report_;
};

}  // namespace mkernel
