// Which memory a task reads and writes. Executors, simulator and verifier all ask here, so that what is proved is what
// runs.
#pragma once
#include "plan/plan.h"

namespace mkernel {

// A range of one rank's memory, of the acting epoch's parity. In the caller's buffers it is the rectangle `block`; in a
// workspace buffer the elements [begin, end), which hold `block` row by row (packed), or rows of the gather buffer.
struct Access {
  std::int32_t rank = 0;
  Buffer buffer = Buffer::kA;
  Block block;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  MK_HD constexpr bool workspace() const { return is_workspace(buffer); }
  MK_HD constexpr bool empty() const { return workspace() ? begin == end : block.empty(); }
};

// Calls f(rank) for every rank in reach, in gpu order.
template <class F>
MK_HD constexpr void for_each_rank(const Topology& topo, std::int32_t rank, Reach reach, std::int32_t peer, F&& f) {
  switch (reach) {
    case Reach::kNobody: return;
    case Reach::kSelf: f(rank); return;
    case Reach::kRank: f(peer); return;
    case Reach::kPeers:
    case Reach::kNode: break;
  }
  const std::int32_t first = topo.rank_of(topo.node_of(rank), 0);
  for (std::int32_t r = first; r < first + topo.gpus; ++r) {
    if (r != rank || reach == Reach::kNode) f(r);
  }
}

// The same for the ranks whose flag `signal` raises; `peer` is that of its task.
template <class F>
MK_HD constexpr void for_each_rank(const Topology& topo, std::int32_t rank, const Signal& signal, std::int32_t peer,
                                   F&& f) {
  if (signal.reach != Reach::kRank) return for_each_rank(topo, rank, signal.reach, peer, f);
  for (std::int32_t r = peer; r < peer + signal.ranks; ++r) f(r);
}

// The state of a tile of queries: (rows, dim) sums, then as many maxima and sums of weights.
MK_HD constexpr Access state_access(const Plan& plan, std::int32_t rank, const Task& task) {
  const std::int64_t dim = plan.spec().attention.dim;
  const Block block{0, 0, task.block.rows, dim + 2};
  return {rank, Buffer::kState, block, task.dst_offset, task.dst_offset + block.elements()};
}

// What kAttendBackward keeps of a tile of queries: (rows, dim) sums, then as many deltas.
MK_HD constexpr Access query_sums(const Plan& plan, std::int32_t rank, const Task& task) {
  const Block block{0, 0, task.block.rows, plan.spec().attention.dim + 1};
  return {rank, Buffer::kState, block, task.dst_offset, task.dst_offset + block.elements()};
}
// And of a tile of keys in `buffer` (kKeyState or kPartial): the gradient of its keys, or with `value` of its values.
MK_HD constexpr Access key_sums(const Plan& plan, std::int32_t rank, const Task& task, Buffer buffer, bool value) {
  const Block block{task.kv_position, 0, task.key_rows, plan.spec().attention.dim};
  const std::int64_t begin = task.key_place + (value ? task.value_distance : 0);
  return {rank, buffer, block, begin, begin + block.elements()};
}
// Whether kAttendBackward leaves the sums of its queries, or of its keys, as they are.
MK_HD constexpr bool leaves_queries(const Task& task) { return task.length == 0 && task.resume && task.park; }
MK_HD constexpr bool leaves_keys(const Task& task) { return task.length == 0 && task.resume_keys && task.park_keys; }

// What kAttendBackward reads: queries, the gradient of their outputs, their log-sum-exps, keys and values, if any; what
// delta is made of, in the first task of a tile of queries; the sums that it goes on from.
template <class F>
MK_HD constexpr void for_each_backward_read(const Plan& plan, std::int32_t rank, const Task& task, F&& f) {
  const bool own = task.src == Buffer::kK;
  if (task.length > 0) {
    const Block keys{own ? task.src_offset : task.kv_position, 0, task.key_rows, plan.spec().attention.dim};
    const std::int64_t values = task.src_offset + task.value_distance;
    f(Access{rank, Buffer::kQ, task.block, 0, 0});
    f(Access{rank, Buffer::kLse, {task.block.row, 0, task.block.rows, 1}, 0, 0});
    f(Access{rank, task.src, keys, task.src_offset, task.src_offset + task.length});
    f(Access{rank, own ? Buffer::kV : task.src, keys, values, values + task.length});
  }
  if (!task.block.empty()) {
    if (task.length > 0 || !task.resume) f(Access{rank, Buffer::kDo, task.block, 0, 0});
    if (!task.resume) f(Access{rank, Buffer::kO, task.block, 0, 0});
    if (task.resume && !leaves_queries(task)) f(query_sums(plan, rank, task));
  }
  if (task.key_rows > 0 && task.resume_keys && !leaves_keys(task)) {
    for (const bool value : {false, true}) f(key_sums(plan, rank, task, Buffer::kKeyState, value));
  }
}

// What it writes: the sums of its queries or their gradient, the sums of its keys or own part of their gradients.
template <class F>
MK_HD constexpr void for_each_backward_write(const Plan& plan, std::int32_t rank, const Task& task, F&& f) {
  if (!task.block.empty() && !leaves_queries(task)) {
    f(task.park ? query_sums(plan, rank, task) : Access{rank, task.dst, task.block, 0, 0});
  }
  if (task.key_rows == 0 || leaves_keys(task)) return;
  if (!task.park_keys && plan.topo().world() == 1) {
    const Block keys{task.src_offset, 0, task.key_rows, plan.spec().attention.dim};
    f(Access{rank, Buffer::kDk, keys, 0, 0});
    f(Access{rank, Buffer::kDv, keys, 0, 0});
    return;
  }
  const Buffer to = task.park_keys ? Buffer::kKeyState : Buffer::kPartial;
  for (const bool value : {false, true}) f(key_sums(plan, rank, task, to, value));
}

// What kAttend reads: queries, keys and values (if any), then the state that it goes on from.
template <class F>
MK_HD constexpr void for_each_attend_read(const Plan& plan, std::int32_t rank, const Task& task, F&& f) {
  if (task.block.empty()) return;
  if (task.length > 0) {
    const std::int64_t dim = plan.spec().attention.dim;
    const bool own = task.src == Buffer::kK;
    const Block keys{own ? task.src_offset : task.kv_position, 0, task.length / dim, dim};
    const std::int64_t values = task.src_offset + task.length;
    f(Access{rank, Buffer::kQ, task.block, 0, 0});
    f(Access{rank, task.src, keys, task.src_offset, values});
    f(Access{rank, own ? Buffer::kV : task.src, keys, values, values + task.length});
  }
  if (task.resume) f(state_access(plan, rank, task));
}

// Calls f(Access) for each source of `task`, in the order in which a reduction adds them. For kGemm: A, then B.
template <class F>
MK_HD constexpr void for_each_read(const Plan& plan, std::int32_t rank, const Task& task, F&& f) {
  const Topology& topo = plan.topo();
  const std::int64_t elements = task.block.elements();
  switch (task.source) {
    case Source::kNone: break;
    case Source::kOwn:
      if (task.action == Action::kGemm) {
        const std::int64_t k = plan.gemm_k(rank);
        Access a{rank, task.src, {task.src_offset, 0, task.block.rows, k}, 0, 0};
        if (a.workspace()) {
          const std::int64_t pitch = plan.gather_pitch();
          a.block.row = pitch > 0 ? task.src_offset / pitch : 0;
          a.begin = task.src_offset;
          a.end = task.src_offset + task.block.rows * pitch;
        }
        f(a);
        f(Access{rank, Buffer::kB, {0, task.block.col, k, task.block.cols}, 0, 0});
      } else if (task.action == Action::kAttend) {
        for_each_attend_read(plan, rank, task, f);
      } else if (task.action == Action::kAttendBackward) {
        for_each_backward_read(plan, rank, task, f);
      } else if (!is_workspace(task.src)) {
        f(Access{rank, task.src, {task.src_offset, 0, task.block.rows, task.block.cols}, 0, 0});
      } else {
        f(Access{rank, task.src, task.block, task.src_offset, task.src_offset + task.length});
      }
      break;
    case Source::kNode:
      if (!plan.adds(rank, task, topo.node_of(rank))) break;
      for_each_rank(topo, rank, Reach::kNode, -1, [&](std::int32_t r) {
        f(Access{r, task.src, task.block, task.src_offset, task.src_offset + elements});
      });
      break;
    case Source::kRail: {
      const std::int32_t self = topo.node_of(rank);
      for (std::int32_t node = 0; node < topo.nodes; ++node) {
        if (!plan.adds(rank, task, node)) continue;
        if (node == self) {
          f(Access{rank, task.src, task.block, task.src_offset, task.src_offset + elements});
          continue;
        }
        const std::int32_t slot = node < self ? node : node - 1;
        const std::int64_t begin = task.arrival_offset + slot * task.arrival_stride;
        f(Access{rank, Buffer::kArrival, task.block, begin, begin + elements});
      }
      break;
    }
  }
}

// Calls f(Access) for each place that `task` writes; all get the same values, but for kAttend, which writes its state,
// or kO and kLse, and kAttendBackward.
template <class F>
MK_HD constexpr void for_each_write(const Plan& plan, std::int32_t rank, const Task& task, F&& f) {
  if (task.action == Action::kAttend) {
    if (task.block.empty() || task.dst_reach == Reach::kNobody) return;
    if (task.park) {
      f(state_access(plan, rank, task));
    } else {
      f(Access{rank, task.dst, task.block, 0, 0});
      f(Access{rank, Buffer::kLse, {task.block.row, 0, task.block.rows, 1}, 0, 0});
    }
    return;
  }
  if (task.action == Action::kAttendBackward) {
    if (task.dst_reach != Reach::kNobody) for_each_backward_write(plan, rank, task, f);
    return;
  }
  const std::int64_t length = task.length > 0 ? task.length : task.block.elements();
  for_each_rank(plan.topo(), rank, task.dst_reach, task.peer, [&](std::int32_t r) {
    Access access{r, task.dst, task.block, 0, 0};
    if (access.workspace()) {
      access.begin = task.dst_offset;
      access.end = task.dst_offset + (task.action == Action::kPut ? task.length : length);
    }
    f(access);
  });
  if (task.keep_result) {
    f(Access{rank, Buffer::kResult, task.block, task.dst_offset, task.dst_offset + task.block.elements()});
  }
}

}  // namespace mkernel
