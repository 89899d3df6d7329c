// Flags as they would stand after `start_epoch` epochs, so that a test or a simulation can begin close to the wrap.
#pragma once
#include "plan/heap_layout.h"
#include "plan/plan.h"

namespace mkernel {

// Sets what `wait` waits for to its state after `start_epoch` epochs, in both parities.
inline void init_wait(const Wait& wait, const HeapLayout& layout, std::uint64_t start_epoch, std::uint32_t* flags) {
  for (const std::uint64_t epoch : {start_epoch, start_epoch - 1}) {
    for (std::uint32_t i = 0; i < wait.span; ++i) {
      flags[layout.flag_index(wait.flag + i, epoch)] = use_of_epoch(epoch) * wait.count;
    }
  }
}

// `flags` is the start of the rank's heap, all zero. Goes through all tasks of the rank; 0 epochs leave all flags 0.
inline void init_flags(const PlanSource& source, std::int32_t rank, std::uint64_t start_epoch, std::uint32_t* flags) {
  if (start_epoch == 0) return;
  const HeapLayout layout(source.plan());
  for (int r = 0; r < kRoleCount; ++r) {
    const auto role = static_cast<Role>(r);
    for (std::int32_t lane = 0; lane < source.plan().lanes(role); ++lane) {
      const std::int64_t count = source.count(rank, role, lane);
      for (std::int64_t index = 0; index < count; ++index) {
        const Task task = source.task(rank, role, lane, index);
        if (task.action == Action::kNone) continue;
        for (const Wait& wait : task.waits) init_wait(wait, layout, start_epoch, flags);
      }
    }
  }
  init_wait(source.completion(rank), layout, start_epoch, flags);
}

}  // namespace mkernel
