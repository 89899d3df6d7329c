// Memory that is written many times in a call: slots for chunks, and what lies beside them. The tasks are gone through
// in one order in which they can run. Each access is checked against those before it that it must not overtake: a read
// against the last write, a write against the reads since the last write (or against that write where there were none).
// If a chain of signals orders every such pair, every other order in which the tasks can run has the same conflicts in
// the same order, so every read sees the same write in all of them: what holds in ours holds in all.
//
// Along the way each element is followed back to the element of a caller's tensor that it is a copy, or the gradient,
// of.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "verify/memory.h"
#include "verify/signals.h"

namespace mkernel {

// What a range holds, by its first element; the others follow.
struct Content {
  std::int32_t rank = 0;  // whose tensor
  Buffer buffer = Buffer::kK;
  std::int64_t element = 0;
  // Gradients: the sum of what these ranks add; `zero` where they add nothing, so that it fits in any place.
  std::int32_t first_rank = 0;
  std::int32_t last_rank = 0;
  bool zero = false;
};

// A range that one task has written, and the last ones that have read it since.
struct Cell {
  std::int64_t end = 0;
  TaskId writer = kNoTask;
  Content content;
  std::vector<TaskId> readers;
};

class ReusedMemory {
 public:
  ReusedMemory(const Enumeration& all, const Knowledge& knowledge, Findings& findings)
      : all_(all), knowledge_(knowledge), findings_(findings), before_(all), places_(key(all.world(), Buffer::kA)) {}

  // Cells by their first element, in order.
  using Cells = std::vector<std::pair<std::int64_t, Cell>>;

  // Appends what the range holds to `found`.
  void read(TaskId id, const Access& access, Cells& found);
  // Elements of `content` count from the first of the range.
  void write(TaskId id, const Access& access, const Cells& content);
  // A copy or a put: the destination gets what the source holds.
  void move(TaskId id, std::int32_t rank, const Task& task);
  // Whether a chain of signals leads from one task to the other.
  bool before(TaskId first, TaskId second) { return before_(first, all_.rank_of(first), second, all_.rank_of(second)); }
  // Whoever writes a rank's memory in a call has heard from all that read it in the call before: two calls of the same
  // parity then cannot meet. Asked of all that ever write and read there, whichever place it is.
  void check_reuse();

  template <class Message>
  void add(ViolationKind kind, TaskId id, Message&& message) {
    findings_.add(kind, all_.place(id), [&] { return all_.name(id) + " " + message(); });
  }

 private:
  struct Place {
    std::map<std::int64_t, Cell> cells;
    std::map<std::int32_t, TaskId> users;  // who may still read them, and a task of it
    std::map<std::int32_t, TaskId> writers;
  };
  static std::size_t key(std::int32_t rank, Buffer buffer) {
    return static_cast<std::size_t>(rank) * kBufferCount + static_cast<std::size_t>(buffer);
  }
  static std::map<std::int64_t, Cell>::iterator split_at(std::map<std::int64_t, Cell>& cells, std::int64_t at);
  bool direct(TaskId first, TaskId second) const;
  bool read_in_time(const Cell& cell, TaskId id);

  const Enumeration& all_;
  const Knowledge& knowledge_;
  Findings& findings_;
  HappensBefore before_;
  std::vector<Place> places_;  // by rank and buffer
};

}  // namespace mkernel
