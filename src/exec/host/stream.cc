#include "exec/host/stream.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace mkernel {

bool Stream::full() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return launched_ - completed_ == kCapacity;
}

bool Stream::launch(Call call) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (launched_ - completed_ == kCapacity) return false;
    HostOperator::Progress& progress = call.op->progress(rank_);
    call.ticket = ++launched_;
    call.turn = progress.launches++;
    call.epoch = call.op->start_epoch() + call.turn + 1;
    progress.last_ticket = call.ticket;
    note(call, FlightState::kLaunched, steady_now());
    queue_[(call.ticket - 1) % kCapacity] = std::move(call);
    if (active_.load(std::memory_order_relaxed) == 0) begin_next();
  }
  bell.ring_all();
  return true;
}

void Stream::note(const Call& call, FlightState state, Nanos now) {
  FlightEntry entry;
  entry.time_ns = now;
  entry.state = state;
  entry.op = call.op->number();
  entry.epoch = call.epoch;
  recorder.note(entry);
}

void Stream::begin_next() {
  if (closed_ || completed_ == launched_) {
    active_.store(0, std::memory_order_release);
    return;
  }
  const Call& call = queue_[completed_ % kCapacity];
  const Nanos now = steady_now();
  call.op->bind(rank_, call.epoch, call.arguments);
  call.op->start(rank_, call.ticket);
  progress_ns.store(now, std::memory_order_relaxed);
  note(call, FlightState::kStarted, now);
  // order: the arguments and the lanes of the call; pairs with active().
  active_.store(call.ticket, std::memory_order_release);
}

Call Stream::enter(int sm) {
  Call call;
  bool released = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t ticket = active_.load(std::memory_order_relaxed);
    if (ticket != 0) call = queue_[(ticket - 1) % kCapacity];
    released = held_[sm] != nullptr && held_[sm] != call.op;
    held_[sm] = call.op;
  }
  if (released) changed_.notify_all();
  return call;
}

void Stream::leave(int sm) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    held_[sm] = nullptr;
  }
  changed_.notify_all();
}

void Stream::complete(std::uint64_t ticket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (active_.load(std::memory_order_relaxed) != ticket) return;
    Call& call = queue_[(ticket - 1) % kCapacity];
    MK_CHECK_OP(call.ticket, ==, ticket);
    if (call.op->has_windows()) call.op->deliver(rank_, call.arguments);
    const Nanos now = steady_now();
    if (call.log) call.log->end_ns[rank_] = now;
    call.log.reset();
    note(call, FlightState::kComplete, now);
    completed_ = ticket;
    begin_next();
  }
  changed_.notify_all();
  bell.ring_all();
}

void Stream::wait_released(const HostOperator& op) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (completed_ < const_cast<HostOperator&>(op).progress(rank_).last_ticket) {
    // An SM may have found the world well and not yet asked for the call: from now on it gets none. Nor may the end of
    // another operator's call begin one of this.
    closed_ = true;
    active_.store(0, std::memory_order_release);
  }
  changed_.wait(lock, [&] { return std::find(held_.begin(), held_.end(), &op) == held_.end(); });
}

void Stream::wake_waiters() {
  { std::lock_guard<std::mutex> lock(mutex_); }
  changed_.notify_all();
}

}  // namespace mkernel
