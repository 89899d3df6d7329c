// What the tasks do to memory: who writes what, and where the bytes that a task reads come from.
#pragma once
#include <cstdint>
#include <vector>

#include "verify/enumeration.h"

namespace mkernel {

// One write into a workspace buffer.
struct Piece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  TaskId task = kNoTask;
  std::int32_t writer = 0;  // rank of the task
};

// All writes of one epoch into workspace, by rank and buffer, in the order of their places.
class WriteIndex {
 public:
  // Reports overlaps.
  WriteIndex(const Enumeration& all, Findings& findings);

  struct Range {
    const Piece* first = nullptr;
    const Piece* last = nullptr;  // one behind
  };
  // The writes of a buffer from the last one that begins at or before `element` on.
  Range from(std::int32_t rank, Buffer buffer, std::int64_t element) const;
  // The write that holds all of [begin, end); null when none does.
  const Piece* holding(std::int32_t rank, Buffer buffer, std::int64_t begin, std::int64_t end) const;

 private:
  static std::size_t key(std::int32_t rank, Buffer buffer) {
    return static_cast<std::size_t>(rank) * kBufferCount + static_cast<std::size_t>(buffer);
  }

  std::vector<Piece> pieces_;
  std::vector<std::size_t> first_;  // per rank and buffer, and one behind
};

// "Before" among tasks: a chain of signals and waits leads from one to the other. The order of a lane is no such chain,
// since several SMs serve it.
class HappensBefore {
 public:
  explicit HappensBefore(const Enumeration& all) : all_(all) {}

  // Whether `first` (of rank `first_rank`) has signalled before `second` (of rank `second_rank`) starts.
  bool operator()(TaskId first, std::int32_t first_rank, TaskId second, std::int32_t second_rank);
  // The same by one signal.
  bool direct(TaskId first, std::int32_t first_rank, TaskId second, std::int32_t second_rank) const;

 private:
  bool search(TaskId first, TaskId second);
  void index_signalers();

  const Enumeration& all_;
  // Made when first needed: plans so far order every access by one signal.
  std::vector<std::size_t> signalers_begin_;  // per flag id
  std::vector<TaskId> signalers_;
  std::vector<std::uint32_t> seen_;  // per task, the number of the search that has seen it
  std::uint32_t searches_ = 0;
};

}  // namespace mkernel
