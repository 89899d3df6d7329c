// Proxies, what the network does to heaps, and the race checks of both sides.
#include "exec/sim/simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "plan/print.h"

namespace mkernel {

void Simulation::wake_proxy(std::int32_t rank, Nanos when) {
  Rank& r = ranks_[rank];
  when = std::max(when, now_);
  if (when >= r.proxy_at) return;
  r.proxy_at = when;
  schedule(when, rank, proxy_actor());
}

void Simulation::step_proxy(std::int32_t rank) {
  Rank& r = ranks_[rank];
  r.proxy_at = kNever;
  if (r.dead) return;
  Proxy& proxy = proxies_[rank];
  Nanos next = now_;
  while (next <= now_) {
    proxy.step(now_);
    next = proxy.next_event();
  }
  if (proxy.failure()) return fail(ErrorKind::kPeerLost, proxy.failure()->message());
  if (!r.blocked.empty()) {
    const std::vector<std::int32_t> blocked = std::exchange(r.blocked, {});
    for (const std::int32_t lane : blocked) advance(rank, lane);
  }
  if (next != kNever) wake_proxy(rank, next);
}

void Simulation::land(const Put& put, std::int64_t begin, std::int64_t bytes) {
  Operator& op = operators_[put.op];
  if (bytes == 0) return;
  if (races_) {
    const std::uint64_t key = put_key(put.op, put.dst_rank, put.flag);
    const std::size_t process = put_process_.at(key);
    races_->restart(process, key);
    if (op.memory) {
      const auto at = [&](std::int32_t rank, std::int64_t offset) {
        return reinterpret_cast<std::uintptr_t>(op.memory->heap(rank) + offset + begin);
      };
      labels_.push_back(
          fmt::format("the network write from rank {} to rank {}, epoch {}", put.src_rank, put.dst_rank, put.epoch));
      const std::uint64_t label = labels_.size() - 1;
      const std::uintptr_t src = at(put.src_rank, put.src_offset);
      const std::uintptr_t dst = at(put.dst_rank, put.dst_offset);
      const auto size = static_cast<std::uintptr_t>(bytes);
      std::string race = races_->read(process, src, src + size, label);
      if (race.empty()) race = races_->write(process, dst, dst + size, label);
      if (!race.empty()) {
        fail(ErrorKind::kCheckFailed,
             fmt::format("race: {}: {} ({})", labels_[label], race, labels_[races_->other_label()]));
      }
    }
    races_->release(process, flag_key(put.op, put.dst_rank, put.flag));
  }
  if (op.memory) {
    std::memcpy(op.memory->heap(put.dst_rank) + put.dst_offset + begin,
                op.memory->heap(put.src_rank) + put.src_offset + begin, static_cast<std::size_t>(bytes));
  }
}

void Simulation::stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) {
  if (races_) {
    const std::uint64_t key = put_key(op, rank, flag);
    const std::size_t process = put_process_.at(key);
    races_->restart(process, key);
    races_->release(process, flag_key(op, rank, flag));
  }
  raise(operators_[op].flag(rank, flag), rank, value, cost_.own_flag_ns);
}

// ---- races

std::size_t Simulation::sm_process(std::int32_t rank, std::int32_t sm) const {
  return static_cast<std::size_t>(rank) * static_cast<std::size_t>(options_.sms + 1) + static_cast<std::size_t>(sm);
}
std::size_t Simulation::send_process(std::int32_t rank) const { return sm_process(rank, options_.sms); }
std::size_t Simulation::net_process(std::int32_t src, std::int32_t dst) const {
  return static_cast<std::size_t>(world_) * static_cast<std::size_t>(options_.sms + 1) +
         static_cast<std::size_t>(src * options_.topo.nodes + options_.topo.node_of(dst));
}
std::uint64_t Simulation::flag_key(std::uint32_t op, std::int32_t rank, std::int64_t flag) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{op} << 54) | (static_cast<std::uint64_t>(rank) << 34) |
         static_cast<std::uint64_t>(flag);
}
std::uint64_t Simulation::put_key(std::uint32_t op, std::int32_t rank, std::int64_t flag) {
  return flag_key(op, rank, flag) ^ (std::uint64_t{3} << 62);
}
std::uint64_t Simulation::rank_key(std::int32_t rank) {
  return (std::uint64_t{3} << 62) | static_cast<std::uint64_t>(rank);
}

void Simulation::acquire_waits(std::int32_t rank, const Operator& op, const Task& task, std::size_t process) {
  const Rank& r = ranks_[rank];
  for (const Wait& wait : task.waits) {
    for (std::uint32_t i = 0; i < wait.span; ++i) {
      races_->acquire(process, flag_key(static_cast<std::uint32_t>(calls_[r.call].op), rank,
                                        op.layout.flag_index(wait.flag + i, r.epoch)));
    }
  }
}

void Simulation::check_accesses(std::int32_t rank, std::int32_t sm) {
  Operator& op = op_of(ranks_[rank]);
  if (!op.memory) return;
  const Sm& s = sm_of(rank, sm);
  const Lane& l = lane_of(rank, s.lane);
  const std::uint64_t epoch = ranks_[rank].epoch;
  labels_.push_back(fmt::format("epoch {}, {}", epoch, name_of(rank, l.role, l.number, l.head, l.task)));
  const std::uint64_t label = labels_.size() - 1;
  const std::string who = labels_.back();
  const std::size_t process = sm_process(rank, sm);
  if (l.task.block.empty() && l.task.action != Action::kAttendBackward) return;
  for_each_read(op.plan, rank, l.task, [&](const Access& access) {
    check_access(process, op.memory->read(access, epoch), false, label, who);
  });
  for_each_write(op.plan, rank, l.task, [&](const Access& access) {
    const OutMatrix m = op.memory->write(access, epoch);
    check_access(process, {m.data, m.dtype, m.rows, m.cols, m.row_stride, m.col_stride}, true, label, who);
  });
}

void Simulation::check_access(std::size_t process, const ConstMatrix& matrix, bool write, std::uint64_t label,
                              const std::string& who) {
  if (matrix.rows == 0 || matrix.cols == 0) return;
  // Row by row, or column by column, whichever lies together.
  const bool by_row = matrix.col_stride == 1 || matrix.row_stride != 1;
  const std::int64_t lines = by_row ? matrix.rows : matrix.cols;
  const std::int64_t length = by_row ? matrix.cols : matrix.rows;
  const std::int64_t stride = by_row ? matrix.row_stride : matrix.col_stride;
  const std::int64_t size = dtype_bytes(matrix.dtype);
  const auto base = reinterpret_cast<std::uintptr_t>(matrix.data);
  const bool together = stride == length;
  const auto line_bytes = static_cast<std::uintptr_t>(length * size);
  for (std::int64_t line = 0; line < (together ? 1 : lines); ++line) {
    const std::uintptr_t begin = base + static_cast<std::uintptr_t>(line * stride * size);
    const std::uintptr_t end = begin + line_bytes * static_cast<std::uintptr_t>(together ? lines : 1);
    const std::string race =
        write ? races_->write(process, begin, end, label) : races_->read(process, begin, end, label);
    if (!race.empty()) {
      return fail(ErrorKind::kCheckFailed, fmt::format("race: {}: {} ({})", who, race, labels_[races_->other_label()]));
    }
  }
}

}  // namespace mkernel
