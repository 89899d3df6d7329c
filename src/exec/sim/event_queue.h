// The simulator's agenda: a radix heap (Ahuja, Mehlhorn, Orlin, Tarjan: Faster algorithms for the shortest path
// problem, JACM 1990). Virtual time never goes back, so events can be kept in buckets by the highest bit in which their
// time differs from now; all work is on runs of consecutive memory, which a world of 1024 GPUs needs.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "net/transport.h"

namespace mkernel {

struct Event {
  Nanos time = 0;
  std::int32_t rank = 0;
  std::int32_t actor = 0;  // who acts on this rank; the simulator numbers its actors
};

class EventQueue {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }

  // `event.time` must not lie before the last event that was taken.
  void push(const Event& event) {
    MK_CHECK_OP(event.time, >=, now_);
    buckets_[bucket_of(event.time)].push_back(event);
    ++size_;
  }

  // Takes an event of the earliest time: the first that was pushed for choice 0, else another by choice.
  Event pop(std::uint64_t choice = 0) {
    MK_CHECK(size_ > 0);
    std::vector<Event>& due = buckets_[0];
    if (next_due_ == due.size()) refill();
    if (choice != 0) std::swap(due[next_due_], due[next_due_ + choice % (due.size() - next_due_)]);
    --size_;
    const Event event = due[next_due_++];
    if (next_due_ == due.size()) {
      due.clear();
      next_due_ = 0;
    }
    return event;
  }

 private:
  // 0 for events of the current time, else one more than the highest bit that differs.
  std::size_t bucket_of(Nanos time) const {
    return static_cast<std::size_t>(
        std::bit_width(static_cast<std::uint64_t>(time) ^ static_cast<std::uint64_t>(now_)));
  }

  // Moves on to the earliest time: its bucket is dealt out to lower ones.
  void refill() {
    std::size_t b = 1;
    while (buckets_[b].empty()) ++b;
    std::vector<Event> events;
    events.swap(buckets_[b]);
    now_ = events.front().time;
    for (const Event& event : events) now_ = event.time < now_ ? event.time : now_;
    for (const Event& event : events) buckets_[bucket_of(event.time)].push_back(event);
    events.clear();
    buckets_[b].swap(events);  // keeps the memory
  }

  std::array<std::vector<Event>, 65> buckets_;
  std::size_t next_due_ = 0;  // in buckets_[0]: those before it are taken
  std::size_t size_ = 0;
  Nanos now_ = 0;
};

}  // namespace mkernel
