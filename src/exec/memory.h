// All memory of one operator: every rank's workspace and, per epoch, every rank's matrices. Turns the Access of a plan
// into a matrix that tile maths can work on, and performs the data part of a task.
#pragma once
#include <array>
#include <cstddef>
#include <vector>

#include "exec/arguments.h"
#include "exec/attend_backward_math.h"
#include "exec/attend_math.h"
#include "exec/tile_math.h"
#include "plan/heap_layout.h"
#include "plan/operands.h"

namespace mkernel {

// Working memory of one thread, for every tile of a plan on every rank.
struct Scratch {
  TileScratch tile;
  AttendScratch attend;
  BackwardScratch backward;
};

class Memory {
 public:
  // `heaps[rank]` has HeapLayout::bytes() bytes, zeroed, aligned to 256 bytes.
  Memory(const Plan& plan, std::vector<std::byte*> heaps);

  const HeapLayout& layout() const { return layout_; }
  std::byte* heap(std::int32_t rank) const { return heaps_[rank]; }
  // Names the matrices of `rank` for `epoch`. Must happen before any task of that rank and epoch; they are remembered
  // until epoch + 2.
  void bind(std::int32_t rank, std::uint64_t epoch, const Arguments& arguments);

  ConstMatrix read(const Access& access, std::uint64_t epoch) const;
  OutMatrix write(const Access& access, std::uint64_t epoch) const;

  // Does what `task` says to memory; nothing for kNone and for kPut, which the network does.
  void act(std::int32_t rank, const Task& task, std::uint64_t epoch, Scratch& scratch) const;

 private:
  OutMatrix resolve(const Access& access, std::uint64_t epoch) const;
  OutMatrix resolve_tensor(const Access& access, const AttentionTensor& tensor) const;
  OutMatrix resolve_attention(const Access& access, const AttentionArguments& arguments) const;
  OutMatrix resolve_backward(const Access& access, const AttentionBackwardArguments& arguments) const;
  void attend_backward(std::int32_t rank, const Task& task, std::uint64_t epoch, BackwardScratch& scratch) const;
  void attend(std::int32_t rank, const Task& task, std::uint64_t epoch, AttendScratch& scratch) const;

  Plan plan_;
  HeapLayout layout_;
  std::vector<std::byte*> heaps_;
  std::vector<std::array<Arguments, 2>> arguments_;  // by rank and epoch parity
};

Scratch make_scratch(const Plan& plan);

}  // namespace mkernel
