#include "exec/sim/simulation.h"

#include <fmt/format.h>

#include <algorithm>

#include "net/local/local_transport.h"
#include "plan/flag_init.h"
#include "plan/print.h"

namespace mkernel {
namespace {

constexpr Nanos kSecond = 1'000'000'000;
constexpr Nanos kDeathNoticed =
    2 * kSecond;  // how soon the world learns that a process is gone (reliability.md: <= 5 s)

Nanos seconds(double s) { return static_cast<Nanos>(s * static_cast<double>(kSecond)); }

}  // namespace

Simulation::Simulation(const SimOptions& options, std::span<const PlanSource* const> operators,
                       std::span<const SimCall> calls)
    : options_(options), cost_(options.cost), calls_(calls), world_(options.topo.world()), random_(options.seed) {
  MK_CHECK_OP(options_.sms, >=, 1);
  const auto world = static_cast<std::size_t>(world_);
  const Injection& inject = options_.inject;

  for (const PlanSource* source : operators) {
    Operator op(&memory_);
    op.source = source;
    op.plan = source->plan();
    op.layout = HeapLayout(op.plan);
    op.partition = options_.partition == Partition{} ? choose_partition(op.plan, options_.sms, cost_.role_costs())
                                                     : options_.partition;
    const Servers servers(op.partition, op.plan);
    for (int sm = 0; sm < options_.sms; ++sm) {
      op.first_roles.push_back(servers.first_role(sm));
      op.orders.push_back(servers.order(sm));
    }
    op.epochs.assign(world, inject.start_epoch);
    op.flags_per_rank = 2 * std::size_t{op.plan.flag_count()};
    op.flags.resize(world * op.flags_per_rank);
    if (inject.start_epoch != 0) {
      std::vector<std::uint32_t> values(op.flags_per_rank);
      for (std::int32_t rank = 0; rank < world_; ++rank) {
        init_flags(*source, rank, inject.start_epoch, values.data());
        for (std::size_t i = 0; i < values.size(); ++i) op.flag(rank, static_cast<std::int64_t>(i)).value = values[i];
      }
    }
    if (options_.data) {
      // Poisoned: every byte of a NaN in all three types. Nothing of it may reach a result.
      op.heaps.assign(world, std::vector<std::byte>(static_cast<std::size_t>(op.layout.bytes()), std::byte{0xff}));
      std::vector<std::byte*> heaps;
      for (auto& heap : op.heaps) heaps.push_back(heap.data());
      op.memory = std::make_unique<Memory>(op.plan, std::move(heaps));
      op.scratch = std::make_unique<Scratch>(make_scratch(op.plan));
    }
    int lanes = 0;
    for (int role = 0; role < kRoleCount; ++role) lanes += op.plan.lanes(static_cast<Role>(role));
    lanes_per_rank_ = std::max(lanes_per_rank_, lanes + 1);
    report_.partitions.push_back(op.partition);
    operators_.push_back(std::move(op));
  }
  completion_lane_ = lanes_per_rank_ - 1;
  call_states_.assign(calls.size(), {world_, {world_, world_}, 0});
  report_.call_end_ns.assign(calls.size(), 0);

  ranks_.resize(world);
  lanes_.resize(world * static_cast<std::size_t>(lanes_per_rank_));
  sms_.resize(world * static_cast<std::size_t>(options_.sms));
  if (options_.trace) begins_.resize(sms_.size());
  nvlink_out_.assign(world, 0);
  nvlink_in_.assign(world, 0);
  ranks_left_ = calls.empty() ? 0 : world_;

  LinkModel link;
  link.bytes_per_ns = cost_.net_bytes_per_ns;
  link.copy_bytes_per_ns = cost_.wire_bytes_per_ns;
  link.copy_ns = cost_.wire_ns;
  link.latency_ns = cost_.net_ns;
  link.unordered = cost_.unordered || inject.net_pieces > 0;
  link.pieces = std::max(1, inject.net_pieces);
  link.jitter_ns = inject.net_jitter_ns;
  link.seed = random_.next();
  link.again_probability = inject.post_again;
  link.post_ns = cost_.post_ns;
  network_ = std::make_unique<LocalNetwork>(
      world_, link, this, [this](std::int32_t rank, Nanos when) { wake_proxy(rank, when); }, &memory_);
  const std::int32_t nodes = options_.topo.nodes;
  // What a record waits in costs memory by nodes squared; deep rings change nothing once the link is the limit.
  const auto depth = static_cast<std::uint32_t>(nodes > 16 ? std::min(options_.ring_depth, 16) : options_.ring_depth);
  for (std::int32_t rank = 0; rank < world_; ++rank) {
    ProxyConfig config;
    config.rank = rank;
    config.topo = options_.topo;
    config.endpoint = network_->endpoint(rank);
    config.landing = this;
    config.hinted = true;
    config.memory = &memory_;
    if (nodes > 16) config.queue_depth = 2;  // memory by nodes squared again
    for (std::int32_t node = 0; node < nodes; ++node) {
      const std::uint32_t start = inject.start_epoch == 0 ? 0 : 0xfffffffd;
      rings_.emplace_back(depth, start);
      config.rings.push_back(&rings_.back());
    }
    proxies_.emplace_back(config);
    for (std::size_t i = 0; i < operators_.size(); ++i) {
      const Operator& op = operators_[i];
      proxies_.back().add_operator(static_cast<std::uint32_t>(i), op.source, op.layout, inject.start_epoch);
    }
  }
  if (options_.races) {
    races_ = std::make_unique<RaceDetector>(world * static_cast<std::size_t>(options_.sms + 1) +
                                            world * static_cast<std::size_t>(nodes));
  }

  for (std::int32_t rank = 0; rank < world_ && ranks_left_ > 0; ++rank) {
    for (std::int32_t sm = 0; sm < options_.sms; ++sm) sm_of(rank, sm).slow = random_.chance(inject.slow_sm);
    schedule(rank == inject.late_rank ? inject.late_ns : 0, rank, control_actor(Control::kLaunch));
    if (inject.withheld_sms > 0) schedule(inject.withheld_until_ns, rank, control_actor(Control::kReturnSms));
    schedule(std::min(seconds(options_.warn_s), seconds(options_.deadline_s)), rank, control_actor(Control::kWatch));
  }
  if (inject.dead_rank >= 0 && inject.dead_rank < world_) {
    schedule(inject.dead_ns, inject.dead_rank, control_actor(Control::kDie));
  }
}

Simulation::~Simulation() = default;

// ---- events

SimReport Simulation::run() {
  while (!done_ && ranks_left_ > 0) {
    MK_CHECK(!queue_.empty());  // the watches never run out before the ranks do
    const Event event = queue_.pop(options_.inject.shuffle ? random_.next() : 0);
    now_ = event.time;
    ++report_.events;
    dispatch_event(event);
  }
  report_.network_bytes = 0;
  for (const Proxy& proxy : proxies_) report_.network_bytes += proxy.stats().bytes;
  return std::move(report_);
}

void Simulation::dispatch_event(const Event& event) {
  const std::int32_t rank = event.rank;
  const std::int32_t actor = event.actor;
  if (actor < options_.sms) return end(rank, actor);
  if (actor < proxy_actor()) return advance(rank, actor - options_.sms);
  if (actor > proxy_actor()) return control(static_cast<Control>(actor - proxy_actor() - 1), rank);
  if (ranks_[rank].proxy_at == event.time) step_proxy(rank);
}

void Simulation::control(Control what, std::int32_t rank) {
  Rank& r = ranks_[rank];
  switch (what) {
    case Control::kLaunch: return launch(rank);
    case Control::kWatch: return watch(rank);
    case Control::kDie:
      if (r.call >= calls_.size()) return;  // it had finished
      r.dead = true;
      network_->kill(rank);
      schedule(now_ + kDeathNoticed, rank, control_actor(Control::kDeath));
      return;
    case Control::kDeath: {
      for (std::int32_t other = 0; other < world_; ++other) {
        if (!ranks_[other].running || ranks_[other].dead) continue;
        const AbortRecord record = blocked_wait(other);
        return fail(ErrorKind::kPeerLost, fmt::format("rank {} died in call {}; {}", rank, r.call,
                                                      describe(op_of(ranks_[other]).plan, record)));
      }
      return fail(ErrorKind::kPeerLost, fmt::format("rank {} died in call {}", rank, r.call));
    }
    case Control::kReturnSms:
      if (r.dead) return;
      for (std::int32_t sm = options_.sms - std::min(options_.inject.withheld_sms, options_.sms); sm < options_.sms;
           ++sm) {
        if (r.running && sm_of(rank, sm).lane == kWithheld) next_task(rank, sm);
      }
      return;
  }
}

// ---- calls

void Simulation::launch(std::int32_t rank) {
  Rank& r = ranks_[rank];
  if (r.dead) return;
  Operator& op = op_of(r);
  const SimCall& call = calls_[r.call];
  r.epoch = ++op.epochs[rank];
  r.running = true;
  r.warned = false;
  r.remaining = 0;
  std::fill(std::begin(r.gated), std::end(r.gated), 0);
  r.moves_left = 0;
  r.progress_at = now_;
  if (op.memory && !call.arguments.empty()) op.memory->bind(rank, r.epoch, call.arguments[rank]);

  std::int32_t index = 0;
  for (Role role : {Role::kSend, Role::kIntra, Role::kRecv, Role::kCompute}) {
    for (std::int32_t lane = 0; lane < op.plan.lanes(role); ++lane, ++index) {
      Lane& l = lane_of(rank, index);
      l.head = -1;
      l.count = op.source->count(rank, role, lane);
      l.role = role;
      l.number = static_cast<std::int16_t>(lane);
      l.phase = static_cast<std::int8_t>(op.plan.phase(role, lane));
      l.open = options_.fused || l.phase <= call_states_[r.call].phase;
      r.remaining += l.count;
      if (l.phase < kGates) r.gated[l.phase] += l.count;
      if (role == Role::kIntra || role == Role::kRecv) r.moves_left += l.count;
    }
  }
  for (; index < completion_lane_; ++index) lane_of(rank, index).count = -1;
  Lane& completion = lane_of(rank, completion_lane_);
  load_head(rank, completion);
  completion.task.waits[0] = op.source->completion(rank);

  // All SMs are free. The withheld ones come when they are given back.
  const bool withheld = options_.inject.withheld_sms > 0 && now_ < options_.inject.withheld_until_ns;
  const std::int32_t usable = withheld ? std::max(0, options_.sms - options_.inject.withheld_sms) : options_.sms;
  for (auto& idle : r.idle) idle.clear();
  for (auto& ready : r.ready) ready.clear();
  for (std::int32_t sm = options_.sms - 1; sm >= 0; --sm) {
    sm_of(rank, sm).lane = sm < usable ? kIdle : kWithheld;
    if (sm >= usable) continue;
    r.idle[slot(op.first_roles[static_cast<std::size_t>(sm)])].push_back(sm);
  }
  if (races_) {
    for (std::int32_t sm = 0; sm <= options_.sms; ++sm) {
      races_->acquire(sm == options_.sms ? send_process(rank) : sm_process(rank, sm), rank_key(rank));
    }
  }
  bool gate_free[kGates];
  for (int phase = 0; phase < kGates; ++phase) gate_free[phase] = !options_.fused && r.gated[phase] == 0;
  const bool no_tasks = r.remaining == 0;  // else the last finished task asks for completion
  for (std::int32_t lane = 0; lane < completion_lane_; ++lane) {
    Lane& l = lane_of(rank, lane);
    if (l.count >= 0 && l.open && l.head < 0) advance(rank, lane);
  }
  for (int phase = 0; phase < kGates; ++phase) {
    if (gate_free[phase]) pass_gate(r.call, phase);
  }
  if (no_tasks) schedule(now_, rank, lane_actor(completion_lane_));
}

// A rank has ended a phase of an unfused call.
void Simulation::pass_gate(std::size_t call, int phase) {
  Call& state = call_states_[call];
  --state.gates_left[phase];
  while (state.phase < kGates && state.gates_left[state.phase] == 0) open_gate(call);
}

void Simulation::open_gate(std::size_t call) {
  const int phase = ++call_states_[call].phase;
  for (std::int32_t rank = 0; rank < world_; ++rank) {
    Rank& r = ranks_[rank];
    if (!r.running || r.call != call) continue;
    for (std::int32_t lane = 0; lane < completion_lane_; ++lane) {
      Lane& l = lane_of(rank, lane);
      if (l.count < 0 || l.open || l.phase > phase) continue;
      l.open = true;
      schedule(now_, rank, lane_actor(lane));
    }
  }
}

void Simulation::complete(std::int32_t rank) {
  Rank& r = ranks_[rank];
  if (races_) {
    const Wait wait = op_of(r).source->completion(rank);
    for (std::int32_t sm = 0; sm <= options_.sms; ++sm) {
      const std::size_t process = sm == options_.sms ? send_process(rank) : sm_process(rank, sm);
      for (std::uint32_t i = 0; i < wait.span; ++i) {
        races_->acquire(process, flag_key(calls_[r.call].op, rank, op_of(r).layout.flag_index(wait.flag + i, r.epoch)));
      }
      races_->release(process, rank_key(rank));
    }
  }
  r.running = false;
  report_.time_ns = now_;
  Call& state = call_states_[r.call];
  if (--state.ranks_left == 0) report_.call_end_ns[r.call] = now_;
  if (++r.call == calls_.size()) {
    --ranks_left_;
    return;
  }
  schedule(now_, rank, control_actor(Control::kLaunch));
}

// ---- when something goes wrong

void Simulation::watch(std::int32_t rank) {
  Rank& r = ranks_[rank];
  if (r.dead || r.call >= calls_.size()) return;
  const Nanos warn = seconds(options_.warn_s);
  const Nanos deadline = seconds(options_.deadline_s);
  const Nanos waited = r.running ? now_ - r.progress_at : 0;
  if (r.running && waited >= deadline) {
    return fail(ErrorKind::kTimeout, describe(op_of(r).plan, blocked_wait(rank)));
  }
  if (r.running && waited >= warn && !r.warned) {
    r.warned = true;
    report_.warnings.push_back(describe(op_of(r).plan, blocked_wait(rank)));
  }
  const Nanos since = r.running ? r.progress_at : now_;
  const Nanos next = waited < warn ? std::min(since + warn, since + deadline) : since + deadline;
  schedule(std::max(next, now_ + 1), rank, control_actor(Control::kWatch));
}

// The wait that holds this rank up: of a lane's head, else of the completion.
AbortRecord Simulation::blocked_wait(std::int32_t rank) {
  Rank& r = ranks_[rank];
  Operator& op = op_of(r);
  AbortRecord record;
  record.rank = rank;
  record.op = static_cast<std::uint32_t>(calls_[r.call].op);
  record.epoch = r.epoch;
  record.waited_s = static_cast<double>(now_ - r.progress_at) / 1e9;
  const std::uint32_t use = use_of_epoch(r.epoch);
  const auto value = [&](std::uint32_t flag) { return op.flag(rank, op.layout.flag_index(flag, r.epoch)).value; };
  for (std::int32_t lane = 0; lane < completion_lane_; ++lane) {
    const Lane& l = lane_of(rank, lane);
    if (l.count < 0 || !l.open || l.head >= l.count) continue;
    for (const Wait& wait : l.task.waits) {
      if (!first_missing(wait, use, value, record)) continue;
      record.role = l.role;
      record.lane = l.number;
      record.task = l.head;
      return record;
    }
  }
  first_missing(op.source->completion(rank), use, value, record);
  return record;
}

void Simulation::fail(ErrorKind kind, std::string message) {
  if (report_.error) return;
  report_.error = Error{kind, std::move(message)};
  report_.time_ns = now_;
  done_ = true;
}

std::string Simulation::name_of(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index, const Task& task) {
  return describe_task(op_of(ranks_[rank]).plan, rank, role, lane, index, task);
}

}  // namespace mkernel
