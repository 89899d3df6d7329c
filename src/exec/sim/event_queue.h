// The simulator's agenda: a 4-ary heap of 16-byte entries, so that a world of 1024 GPUs stays in the cache.
#pragma once
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "net/transport.h"

namespace mkernel {

struct Event {
  Nanos time = 0;
  std::uint32_t order = 0;  // decides among equal times: first come first served, or the seed's choice
  std::uint32_t actor = 0;  // who acts; the simulator numbers its actors

  friend bool operator<(const Event& a, const Event& b) {
    return a.time != b.time ? a.time < b.time : static_cast<std::int32_t>(a.order - b.order) < 0;
  }
};

class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  const Event& top() const { return heap_.front(); }

  void push(const Event& event) {
    std::size_t at = heap_.size();
    heap_.push_back(event);
    while (at > 0) {
      const std::size_t parent = (at - 1) / 4;
      if (!(event < heap_[parent])) break;
      heap_[at] = heap_[parent];
      at = parent;
    }
    heap_[at] = event;
  }

  void pop() {
    MK_CHECK(!heap_.empty());
    const Event last = heap_.back();
    heap_.pop_back();
    if (!heap_.empty()) sift_down(last);
  }

  // Puts `event` in the place of the top: one pass instead of two.
  void replace_top(const Event& event) { sift_down(event); }

 private:
  void sift_down(const Event& event) {
    const std::size_t size = heap_.size();
    std::size_t at = 0;
    for (;;) {
      const std::size_t first = at * 4 + 1;
      if (first >= size) break;
      std::size_t best = first;
      const std::size_t end = first + 4 < size ? first + 4 : size;
      for (std::size_t child = first + 1; child < end; ++child) {
        if (heap_[child] < heap_[best]) best = child;
      }
      if (!(heap_[best] < event)) break;
      heap_[at] = heap_[best];
      at = best;
    }
    heap_[at] = event;
  }

  std::vector<Event> heap_;
};

}  // namespace mkernel
