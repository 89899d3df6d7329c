// The launches of one rank, in order. Its SMs work on the first one that is not complete.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "exec/host/doorbell.h"
#include "exec/host/flight_recorder.h"
#include "exec/host/host_operator.h"
#include "exec/host/run_log.h"

namespace mkernel {

// One rank's part of one run of an operator.
struct Call {
  std::uint64_t ticket = 0;  // numbers the launches of a rank from 1; 0: no call
  HostOperator* op = nullptr;
  std::uint64_t epoch = 0;
  std::uint64_t turn = 0;  // calls of this operator that this rank has made before
  Arguments arguments;
  std::shared_ptr<RunLog> log;  // may be null
};

class Stream {
 public:
  // Launches that one rank may have pending.
  static constexpr std::uint64_t kCapacity = 1024;

  Stream(std::int32_t rank, int sms) : rank_(rank), queue_(kCapacity), held_(static_cast<std::size_t>(sms)) {}

  Doorbell bell;  // rung when one of the rank's flags is raised, or the call changes
  FlightRecorder recorder;
  std::atomic<Nanos> progress_ns{0};          // when this rank last got on
  std::atomic<std::int32_t> acting{0};        // SMs that may be touching matrices
  std::atomic<std::uint64_t> warned_wait{0};  // the wait that was last warned of

  // Appends a call; false when kCapacity are pending. Sets its ticket, epoch and turn. One thread at a time.
  bool launch(Call call);
  bool full() const;

  // The ticket of the call that is under way, 0 for none.
  // order: with the ticket comes all that start() has set up; pairs with begin_next().
  std::uint64_t active() const { return active_.load(std::memory_order_acquire); }
  // Copies the call that is under way for `sm`, which from now on may use its operator, until it asks again.
  Call enter(int sm);
  // As enter(), but with nothing.
  void leave(int sm);

  // Ends the call `ticket` if it is still under way, and begins the next.
  void complete(std::uint64_t ticket);

  // Waits until all launches of `op` are complete, or `failed()`; true when they are.
  template <class Failed>
  bool wait(const HostOperator& op, Failed failed) {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::uint64_t last = const_cast<HostOperator&>(op).progress(rank_).last_ticket;
    changed_.wait(lock, [&] { return completed_ >= last || failed(); });
    return completed_ >= last;
  }
  // Waits until no SM holds `op`, nor ever will. Its calls are complete; or the world has failed, and then this stream
  // begins no call any more.
  void wait_released(const HostOperator& op);
  // Makes those who wait look again.
  void wake_waiters();

 private:
  void begin_next();
  void note(const Call& call, FlightState state, Nanos now);

  std::int32_t rank_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> queue_;  // ticket t is at (t - 1) % kCapacity
  std::uint64_t launched_ = 0;
  std::uint64_t completed_ = 0;
  bool closed_ = false;
  std::atomic<std::uint64_t> active_{0};
  std::vector<const HostOperator*> held_;  // by SM
};

}  // namespace mkernel
