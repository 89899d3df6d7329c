#include "exec/host/sm.h"

#include <thread>

#include "exec/host/stall.h"
#include "plan/operands.h"

namespace mkernel {

void Sm::run() {
  while (!shared_.stop.load(std::memory_order_relaxed)) {
    // Read before looking for work, so that no ring after it is missed.
    const std::uint32_t seen = stream_.bell.sequence();
    if (shared_.failure.happened()) {
      call_ = {};
      stream_.leave(index_);
      stream_.bell.sleep(seen, kNever);
      continue;
    }
    if (!follow_stream()) {
      stream_.bell.sleep(seen, kNever);
      continue;
    }
    if (work() || end_call()) continue;
    const Nanos now = steady_now();
    const Nanos check_again = check_stall(shared_, rank_, call_, now);
    if (check_again > now) stream_.bell.sleep(seen, check_again);
  }
}

// Makes call_ the call that is under way; false when there is none.
bool Sm::follow_stream() {
  if (stream_.active() != call_.ticket) call_ = stream_.enter(index_);
  return call_.op != nullptr;
}

bool Sm::work() {
  bool worked = serve_sends();
  pass_gate();
  ++turn_;
  for (const Role role : call_.op->servers().order(index_)) {
    if (!role_open(role)) continue;
    const std::int32_t lanes = call_.op->plan().lanes(role);
    for (std::int32_t i = 0; i < lanes; ++i) {
      const auto lane =
          static_cast<std::int32_t>((turn_ + static_cast<std::uint32_t>(i)) % static_cast<std::uint32_t>(lanes));
      if (take_from(role, lane)) return true;
    }
  }
  return worked;
}

bool Sm::role_open(Role role) const {
  return call_.op->fused() || call_.op->in_first_phase(role) || call_.op->gate_open(call_.turn);
}

bool Sm::waits_met(const Task& task) const {
  return call_.op->met(rank_, task.waits[0], call_.epoch) && call_.op->met(rank_, task.waits[1], call_.epoch);
}

bool Sm::is_ready(Role role, std::int32_t lane_number) const {
  const HostOperator::Lane& lane = call_.op->lane(rank_, role, lane_number);
  const std::uint64_t head = lane.head.load(std::memory_order_acquire);
  const auto index = static_cast<std::int64_t>(head & 0xffffffff);
  if (head >> 32 != (call_.ticket & 0xffffffff) || index >= lane.count) return false;
  const Task task = source().task(rank_, role, lane_number, index);
  return task.action == Action::kNone || waits_met(task);
}

bool Sm::anything_ready() const {
  for (const Role role : call_.op->servers().order(index_)) {
    if (!role_open(role)) continue;
    for (std::int32_t lane = 0; lane < call_.op->plan().lanes(role); ++lane) {
      if (is_ready(role, lane)) return true;
    }
  }
  return false;
}

// Takes the head of a lane if it is ready, and acts. Slots without work are passed over.
bool Sm::take_from(Role role, std::int32_t lane_number) {
  HostOperator::Lane& lane = call_.op->lane(rank_, role, lane_number);
  bool passed = false;
  for (;;) {
    // order: the counts of the call that the ticket names; pairs with HostOperator::start().
    std::uint64_t head = lane.head.load(std::memory_order_acquire);
    const auto index = static_cast<std::int64_t>(head & 0xffffffff);
    if (head >> 32 != (call_.ticket & 0xffffffff) || index >= lane.count) return passed;
    const Task task = source().task(rank_, role, lane_number, index);
    if (task.action != Action::kNone && !waits_met(task)) return passed;
    // order: none beyond the flags that waits_met() has acquired. Every round that fails is one in which another SM
    // took the head.
    if (!lane.head.compare_exchange_weak(head, head + 1, std::memory_order_acq_rel, std::memory_order_relaxed))
      continue;
    if (task.action == Action::kNone) {
      finish(role, task, steady_now());
      passed = true;
      continue;
    }
    // Others sleep although there is work for them: one is woken, and wakes the next.
    if (stream_.bell.has_sleepers() && anything_ready()) stream_.bell.ring();
    act(role, lane_number, index, task);
    return true;
  }
}

void Sm::act(Role role, std::int32_t lane, std::int64_t index, const Task& task) {
  if (!shared_.begin_act(rank_)) return;
  const Nanos begin = steady_now();
  note(FlightState::kBegun, role, lane, index, task, begin);
  call_.op->memory().act(rank_, task, call_.epoch, call_.op->scratch(rank_, index_));
  const Nanos end = steady_now();
  note(FlightState::kDone, role, lane, index, task, end);
  if (call_.log && call_.log->trace) {
    call_.log->events[static_cast<std::size_t>(rank_) * shared_.sms + index_].push_back(
        {role, lane, index, begin, end});
  }
  signal(task, end);
  shared_.end_act(rank_);
  finish(role, task, end);
  // SMs that share a core take turns by task, so that all get on at the same pace, as real ones do. Left to the system,
  // which switches every few milliseconds, a rank does hundreds of tasks while its peers wait for the first.
  if (shared_.cores_shared) std::this_thread::yield();
}

void Sm::signal(const Task& task, Nanos now) {
  for (const Signal& s : task.signals) {
    for_each_rank(shared_.topo, rank_, s, task.peer, [&](std::int32_t rank) {
      const auto flag = call_.op->flag(rank, call_.op->layout().flag_index(s.flag, call_.epoch));
      // order: all that the task has written; pairs with HostOperator::met().
      if (s.stamp) {
        flag.store(use_of_epoch(call_.epoch), std::memory_order_release);
      } else {
        flag.fetch_add(1, std::memory_order_release);
      }
      shared_.flag_raised(rank, now);
    });
  }
}

bool Sm::serve_sends() {
  if (!role_open(Role::kSend)) return false;
  bool worked = false;
  for (std::int32_t lane = 0; lane < call_.op->plan().lanes(Role::kSend); ++lane) worked |= send_from(lane);
  return worked;
}

// Pushes the records of a send lane's ready heads, as far as the ring has room.
bool Sm::send_from(std::int32_t lane_number) {
  HostOperator::Lane& lane = call_.op->lane(rank_, Role::kSend, lane_number);
  if (!is_ready(Role::kSend, lane_number)) return false;
  // Whoever is at it goes on until the head is not ready; a flag that is raised after that rings the bell.
  // order: the head that the last sender left; pairs with the store below.
  if (lane.sending.exchange(true, std::memory_order_acquire)) return false;
  bool worked = false;
  while (is_ready(Role::kSend, lane_number)) {
    const std::uint64_t head = lane.head.load(std::memory_order_relaxed);
    const auto index = static_cast<std::int64_t>(head & 0xffffffff);
    const Task task = source().task(rank_, Role::kSend, lane_number, index);
    if (task.action != Action::kNone && !push(lane_number, index, task)) break;
    lane.head.store(head + 1, std::memory_order_release);
    finish(Role::kSend, task, steady_now());
    worked = true;
  }
  lane.sending.store(false, std::memory_order_release);
  return worked;
}

bool Sm::push(std::int32_t lane, std::int64_t index, const Task& task) {
  const Nanos now = steady_now();
  const std::int32_t node = shared_.topo.node_of(task.peer);
  if (call_.log && call_.log->trace) {
    // Noted before the push, since the stamp may be there before the push returns.
    const std::int64_t flag = call_.op->layout().flag_index(task.signals[0].flag, call_.epoch);
    call_.log->put_begins(task.peer, flag, {rank_, node, {lane, index}, now, 0});
  }
  Record record;
  record.op = call_.op->number();
  record.epoch = static_cast<std::uint32_t>(call_.epoch & 0xff);
  record.task = static_cast<std::uint32_t>(send_id(call_.op->plan(), {lane, index}));
  if (!shared_.network->push(rank_, node, record)) return false;
  note(FlightState::kPosted, Role::kSend, lane, index, task, now);
  return true;
}

void Sm::finish(Role role, const Task& task, Nanos now) {
  if (call_.log && task.action != Action::kNone) call_.log->tasks.fetch_add(1, std::memory_order_relaxed);
  stream_.progress_ns.store(now, std::memory_order_relaxed);
  HostOperator::Progress& progress = call_.op->progress(rank_);
  // order: all that the task has done comes before the end of its phase and of the call; pairs with pass_gate() and
  // end_call(), which acquire the last of these subtractions and with it all before.
  if (call_.op->in_first_phase(role)) progress.first_phase.fetch_sub(1, std::memory_order_acq_rel);
  progress.unfinished.fetch_sub(1, std::memory_order_acq_rel);
}

// Not fused: when the rank's first phase is over, says so to all ranks, once per call.
void Sm::pass_gate() {
  HostOperator& op = *call_.op;
  if (op.fused()) return;
  HostOperator::Progress& progress = op.progress(rank_);
  std::uint64_t seen = progress.gate_ticket.load(std::memory_order_relaxed);
  if (seen >= call_.ticket) return;
  if (progress.first_phase.load(std::memory_order_acquire) != 0) return;  // order: pairs with finish()
  const bool communication = op.in_first_phase(Role::kIntra);
  if (communication && !op.met(rank_, source().completion(rank_), call_.epoch)) return;
  // Only one SM gets past here: the ticket moves up, never down.
  if (!progress.gate_ticket.compare_exchange_strong(seen, call_.ticket, std::memory_order_acq_rel)) return;
  if (op.open_gate(call_.turn, 1)) shared_.wake_all();
}

// Ends the call when all of it is done.
bool Sm::end_call() {
  // order: pairs with finish().
  if (call_.op->progress(rank_).unfinished.load(std::memory_order_acquire) != 0) return false;
  if (!call_.op->met(rank_, source().completion(rank_), call_.epoch)) return false;
  if (!call_.op->has_windows()) {
    stream_.complete(call_.ticket);
    return true;
  }
  // The end of the call then writes the caller's C.
  if (!shared_.begin_act(rank_)) return false;
  stream_.complete(call_.ticket);
  shared_.end_act(rank_);
  return true;
}

void Sm::note(FlightState state, Role role, std::int32_t lane, std::int64_t index, const Task& task, Nanos now) {
  FlightEntry entry;
  entry.time_ns = now;
  entry.state = state;
  entry.op = call_.op->number();
  entry.role = role;
  entry.lane = static_cast<std::uint16_t>(lane);
  entry.epoch = call_.epoch;
  entry.index = index;
  entry.peer = task.peer;
  stream_.recorder.note(entry);
}

}  // namespace mkernel
