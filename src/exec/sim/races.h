// Finds races with vector clocks. Every SM, every rank's sending warp and every network path between two ranks is a
// process; flags carry clocks. An access that is not ordered after the last conflicting access to the same bytes is a
// race, whatever the schedule at hand made of it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace mkernel {

using Clock = std::vector<std::uint32_t>;

class RaceDetector {
 public:
  explicit RaceDetector(std::size_t processes);

  // `process` learns what `key` knows (an acquire), or `key` what `process` knows (a release, which ends the
  // process's current step). Keys name flags and epochs.
  void acquire(std::size_t process, std::uint64_t key);
  void release(std::size_t process, std::uint64_t key);
  // `process` forgets its own past and goes on from what `key` knows: a network write carries no more than its record.
  void restart(std::size_t process, std::uint64_t key);

  // Checks one access to the bytes [begin, end); the answer is "" or says which earlier access it races with.
  // `label` describes the access in later answers.
  std::string read(std::size_t process, std::uintptr_t begin, std::uintptr_t end, std::uint64_t label);
  std::string write(std::size_t process, std::uintptr_t begin, std::uintptr_t end, std::uint64_t label);

  // The label of the earlier access of the last race that was found.
  std::uint64_t other_label() const { return other_label_; }

 private:
  struct Mark {
    std::uint32_t process = 0;
    std::uint32_t clock = 0;
    std::uint64_t label = 0;
  };
  struct Cell {
    std::uintptr_t end = 0;
    bool written = false;
    Mark write;
    std::vector<Mark> reads;
  };
  using Cells = std::map<std::uintptr_t, Cell>;

  bool ordered(std::size_t process, const Mark& mark) const { return mark.clock <= clocks_[process][mark.process]; }
  Cells::iterator split_at(std::uintptr_t at);
  // Cells that exactly cover [begin, end), made where there are none.
  Cells::iterator cover(std::uintptr_t begin, std::uintptr_t end);
  std::string race(const char* kind, const char* earlier, const Mark& mark);
  Mark mark(std::size_t process, std::uint64_t label) const;

  std::vector<Clock> clocks_;
  std::unordered_map<std::uint64_t, Clock> known_;
  Cells cells_;
  std::uint64_t other_label_ = 0;
};

}  // namespace mkernel
