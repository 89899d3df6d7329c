// How a thread with nothing to do sleeps, and how whoever gives it something to do wakes it.
//
// A sleeper reads sequence(), looks for work, and when it finds none sleeps with the number it read: a ring that came
// in between has changed the number, so no ring is lost. Ringing costs one atomic addition while nobody sleeps.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "net/transport.h"

namespace mkernel {

// Nanoseconds of the steady clock.
inline Nanos steady_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Doorbell {
 public:
  // order: what a ringer wrote before it rang is visible to whoever reads the number after; pairs with ring().
  std::uint32_t sequence() const { return sequence_.load(std::memory_order_seq_cst); }
  bool has_sleepers() const { return sleepers_.load(std::memory_order_seq_cst) > 0; }

  // Wakes one sleeper: enough where all sleepers can do the same work.
  void ring() {
    if (count_ring()) wakeup_.notify_one();
  }
  void ring_all() {
    if (count_ring()) wakeup_.notify_all();
  }

  // Returns when the bell has rung since `seen` was read, at `until` (steady clock; kNever: not before), or by
  // accident.
  void sleep(std::uint32_t seen, Nanos until) {
    std::unique_lock<std::mutex> lock(mutex_);
    // order: either the ringer sees this sleeper, or the sleeper sees its ring: both sides write one word and then read
    // the other's, all in the one order of seq_cst; pairs with count_ring().
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (sequence() == seen) {
      if (until == kNever) {
        wakeup_.wait(lock);
      } else {
        wakeup_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until)));
      }
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  // True when somebody may sleep.
  bool count_ring() {
    sequence_.fetch_add(1, std::memory_order_seq_cst);
    if (!has_sleepers()) return false;
    // A sleeper that has compared the number but not yet gone to sleep holds the mutex.
    std::lock_guard<std::mutex> lock(mutex_);
    return true;
  }

  std::atomic<std::uint32_t> sequence_{0};
  std::atomic<std::int32_t> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wakeup_;
};

}  // namespace mkernel
