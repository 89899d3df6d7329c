#include "exec/host/stall.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "exec/abort.h"

namespace mkernel {
namespace {

constexpr Nanos kLongestSleepNs = 100'000'000;

// The first wait of the rank's lane heads that is not met, else that of the call's completion. The roles whose waits
// others cause come first: what a send waits for is always own work.
bool find_missing(const Call& call, std::int32_t rank, AbortRecord& record) {
  HostOperator& op = *call.op;
  record.rank = rank;
  record.op = op.number();
  record.epoch = call.epoch;
  const std::uint32_t use = use_of_epoch(call.epoch);
  const auto value = [&](std::uint32_t flag) {
    return op.flag(rank, op.layout().flag_index(flag, call.epoch)).load(std::memory_order_relaxed);
  };
  for (const Role role : {Role::kCompute, Role::kIntra, Role::kRecv, Role::kSend}) {
    for (std::int32_t lane = 0; lane < op.plan().lanes(role); ++lane) {
      const std::uint64_t head = op.lane(rank, role, lane).head.load(std::memory_order_acquire);
      const auto index = static_cast<std::int64_t>(head & 0xffffffff);
      if (index >= op.lane(rank, role, lane).count) continue;
      const Task task = op.source().task(rank, role, lane, index);
      if (task.action == Action::kNone) continue;
      for (const Wait& wait : task.waits) {
        if (!first_missing(wait, use, value, record)) continue;
        record.role = role;
        record.lane = lane;
        record.task = index;
        record.peer = op.plan().flag_name(rank, record.flag).sender;
        return true;
      }
    }
  }
  record.task = -1;
  if (!first_missing(op.source().completion(rank), use, value, record)) return false;
  record.peer = op.plan().flag_name(rank, record.flag).sender;
  return true;
}

// What is left when no flag is missing: room in a command ring, or the other ranks' first phase.
std::string describe_other(const Call& call, std::int32_t rank, double waited_s) {
  const Plan& plan = call.op->plan();
  for (std::int32_t lane = 0; lane < plan.lanes(Role::kSend); ++lane) {
    const std::uint64_t head = call.op->lane(rank, Role::kSend, lane).head.load(std::memory_order_acquire);
    const auto index = static_cast<std::int64_t>(head & 0xffffffff);
    if (index >= call.op->lane(rank, Role::kSend, lane).count) continue;
    if (call.op->fused() || call.op->gate_open(call.turn)) {
      return fmt::format(
          "rank {} waited {:.1f} s in {} (operator {}), epoch {}, in role send lane {} task {}, for room "
          "in the command ring to node {}: its network takes no more records",
          rank, waited_s, op_name(plan.spec().op), call.op->number(), call.epoch, lane, index,
          plan.topo().node_of(call.op->source().task(rank, Role::kSend, lane, index).peer));
    }
  }
  return fmt::format(
      "rank {} waited {:.1f} s in {} (operator {}), epoch {}, for the other ranks to end the first phase "
      "of the call (not fused)",
      rank, waited_s, op_name(plan.spec().op), call.op->number(), call.epoch);
}

}  // namespace

Nanos check_stall(HostShared& shared, std::int32_t rank, const Call& call, Nanos now) {
  Stream& stream = *shared.streams[rank];
  const Nanos since = stream.progress_ns.load(std::memory_order_relaxed);
  const Nanos waited = now - since;
  const Nanos limit = std::min(shared.deadline_ns, shared.warn_ns);
  // While another SM of the rank acts, the rank does not wait, it works.
  if (waited < limit || stream.acting.load(std::memory_order_relaxed) > 0) {
    return now + std::clamp<Nanos>(limit - waited, kLongestSleepNs / 20, kLongestSleepNs);
  }
  AbortRecord record;
  record.waited_s = static_cast<double>(waited) * 1e-9;
  const bool missing = find_missing(call, rank, record);
  const std::string sentence =
      missing ? describe(call.op->plan(), record) : describe_other(call, rank, record.waited_s);
  // What we have read belongs to this call only if the call is still under way, and it is a wait only if it lasts.
  if (stream.active() != call.ticket || stream.progress_ns.load(std::memory_order_relaxed) != since) return now;
  if (waited >= shared.deadline_ns) {
    shared.fail({ErrorKind::kTimeout, sentence});
    return now;
  }
  const std::uint64_t wait_id = (call.ticket << 35) ^ (static_cast<std::uint64_t>(record.role) << 33) ^
                                (static_cast<std::uint64_t>(record.lane) << 32) ^
                                static_cast<std::uint64_t>(record.task + 1);
  if (stream.warned_wait.exchange(wait_id, std::memory_order_relaxed) != wait_id) shared.warn(sentence);
  return now + std::clamp<Nanos>(shared.deadline_ns - waited, kLongestSleepNs / 20, kLongestSleepNs);
}

}  // namespace mkernel
