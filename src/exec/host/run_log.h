// What run() wants to know of a call afterwards: when it ended, how much it did and, when asked, every task's times.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "net/transport.h"
#include "plan/plan.h"

namespace mkernel {

struct RunLog {
  // One task on one SM.
  struct Event {
    Role role = Role::kCompute;
    std::int32_t lane = 0;
    std::int64_t index = 0;
    Nanos begin_ns = 0;
    Nanos end_ns = 0;
  };
  // One network write, from the push of its record to the stamp at its destination.
  struct PutEvent {
    std::int32_t rank = 0;
    std::int32_t node = 0;  // of the destination
    SendId id;
    Nanos begin_ns = 0;
    Nanos end_ns = 0;
  };

  RunLog(std::int32_t world, int sms, bool with_trace)
      : trace(with_trace), end_ns(world), events(with_trace ? static_cast<std::size_t>(world) * sms : 0) {}

  const bool trace;
  std::vector<Nanos> end_ns;  // by rank; 0: not yet
  std::atomic<std::int64_t> tasks{0};
  // By rank * sms + sm; each is written by its SM only and read after the call.
  std::vector<std::vector<Event>> events;

  void put_begins(std::int32_t dst_rank, std::int64_t flag, const PutEvent& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    in_flight_[{dst_rank, flag}] = event;
  }
  // A stamp that belongs to another call is none of ours.
  void put_ends(std::int32_t dst_rank, std::int64_t flag, Nanos now) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = in_flight_.find({dst_rank, flag});
    if (it == in_flight_.end()) return;
    it->second.end_ns = now;
    puts_.push_back(it->second);
    in_flight_.erase(it);
  }
  std::vector<PutEvent> puts() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return puts_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::int32_t, std::int64_t>, PutEvent> in_flight_;
  std::vector<PutEvent> puts_;
};

}  // namespace mkernel
