// Lanes and SMs: which task starts when, on which SM, and how long it takes.
#include "exec/sim/simulation.h"

#include <algorithm>
#include <utility>

namespace mkernel {
namespace {

constexpr std::int64_t kKeyTile = 128;  // keys that a GPU multiplies at once, masked or not
constexpr double kSlowdown = 8;         // of the SMs that Injection::slow_sm draws

std::int64_t round_up(std::int64_t x, std::int64_t step) { return ceil_div(x, step) * step; }

// Queries times keys that a task of attention multiplies: whole tiles of keys of which some query sees one. Packed
// sequences count as if all saw all of a chunk that is not behind them.
double attended_pairs(const Plan& plan, std::int32_t rank, const Task& task) {
  if (task.length == 0) return 0;
  const AttentionSpec& a = plan.spec().attention;
  const SequenceSplit split = a.q_split(plan.topo());
  const std::int64_t keys = task.length / a.dim;
  const std::int64_t query = split.position(rank, task.block.row % split.tokens(rank));
  const KeyRange seen = a.mask.sees(query, task.block.rows, a.seq_q, a.seq_k);
  const std::int64_t begin = max_of(0, seen.begin - task.kv_position) / kKeyTile * kKeyTile;
  const std::int64_t end = min_of(keys, seen.end - task.kv_position);
  return static_cast<double>(round_up(task.block.rows, 64)) *
         static_cast<double>(round_up(max_of(0, end - begin), kKeyTile));
}

}  // namespace

// Whether all flags that the head (or the completion) waits for have been raised; `ready_at` becomes the time when the
// last of them is visible. Else the lane is registered with the first that is missing; the next look begins there.
bool Simulation::waits_met(std::int32_t rank, std::int32_t lane) {
  const Rank& r = ranks_[rank];
  Operator& op = operators_[calls_[r.call].op];
  Lane& l = lane_of(rank, lane);
  const std::uint32_t use = use_of_epoch(r.epoch);
  for (; l.wait < 2; ++l.wait, l.scanned = 0) {
    const Wait& wait = l.task.waits[l.wait];
    const std::uint32_t target = use * wait.count;
    const std::int64_t first = op.layout.flag_index(wait.flag, r.epoch);
    for (; l.scanned < wait.span; ++l.scanned) {
      Flag& flag = op.flag(rank, first + l.scanned);
      if (!flag_reached(flag.value, target)) {
        l.target = target;
        l.next_waiter = flag.waiter;
        flag.waiter = lane;
        return false;
      }
      l.ready_at = std::max(l.ready_at, flag.visible_at);
    }
  }
  return true;
}

// Shows the task at the lane's head.
void Simulation::load_head(std::int32_t rank, Lane& l) {
  l.wait = 0;
  l.scanned = 0;
  l.ready_at = 0;
  if (l.head < l.count) l.task = op_of(ranks_[rank]).source->task(rank, l.role, l.number, l.head);
}

void Simulation::advance(std::int32_t rank, std::int32_t lane) {
  Rank& r = ranks_[rank];
  if (r.dead || !r.running) return;
  Lane& l = lane_of(rank, lane);
  if (lane == completion_lane_) {
    if (!waits_met(rank, lane)) return;
    if (l.ready_at > now_) return schedule(l.ready_at, rank, lane_actor(lane));
    return complete(rank);
  }
  if (l.head < 0) {
    l.head = 0;
    load_head(rank, l);
  }
  while (l.head < l.count) {
    if (l.task.action == Action::kNone) {
      move_taken(rank, l.role);
      finish_task(rank, l);
    } else {
      if (!waits_met(rank, lane)) return;
      if (l.ready_at > now_) return schedule(l.ready_at, rank, lane_actor(lane));
      if (l.role == Role::kSend) {
        if (!send(rank, l)) {
          r.blocked.push_back(lane);
          return;
        }
      } else {
        const std::int32_t sm = take_idle_sm(rank, l.role);
        if (sm == kNobody) {
          r.ready[slot(l.role)].push_back(lane);
          return;
        }
        start(rank, sm, lane);
      }
    }
    ++l.head;
    load_head(rank, l);
  }
}

// A task of this call is finished; the last one asks whether the call is.
void Simulation::finish_task(std::int32_t rank, const Lane& l) {
  Rank& r = ranks_[rank];
  ++report_.tasks;
  r.progress_at = now_;
  if (!options_.fused && l.phase < kGates && --r.gated[l.phase] == 0) pass_gate(r.call, l.phase);
  if (--r.remaining == 0) schedule(now_, rank, lane_actor(completion_lane_));
}

// As on a GPU, movers leave tiles alone while moves may still come, for a tile takes long; unless nobody else computes.
bool Simulation::movers_compute(std::int32_t rank) {
  const Rank& r = ranks_[rank];
  return !options_.fused || r.moves_left == 0 || op_of(r).partition.compute == 0;
}

// The last move that is taken sets idle movers free for tiles.
void Simulation::move_taken(std::int32_t rank, Role role) {
  Rank& r = ranks_[rank];
  if (role != Role::kIntra && role != Role::kRecv) return;
  if (--r.moves_left > 0 || !options_.fused || op_of(r).partition.compute == 0) return;
  for (const Role movers : {Role::kIntra, Role::kRecv}) {
    const std::vector<std::int32_t> idle = std::exchange(r.idle[slot(movers)], {});
    for (const std::int32_t sm : idle) next_task(rank, sm);
  }
}

bool Simulation::send(std::int32_t rank, Lane& l) {
  Rank& r = ranks_[rank];
  const auto number = static_cast<std::uint32_t>(calls_[r.call].op);
  Operator& op = operators_[number];
  const std::int32_t node = options_.topo.node_of(l.task.peer);
  const auto id = static_cast<std::uint32_t>(send_id(op.plan, {l.number, l.head}));
  MK_CHECK_OP(node, !=, options_.topo.node_of(rank));
  const RingView view = ring_to(rank, node).view();
  const Record record{number, static_cast<std::uint32_t>(r.epoch & 0xff), id, 0, 0};
  if (!try_push(view, record)) return false;
  if (races_) {
    acquire_waits(rank, op, l.task, send_process(rank));
    const std::int64_t flag = op.layout.flag_index(l.task.signals[0].flag, r.epoch);
    const std::uint64_t key = put_key(number, l.task.peer, flag);
    races_->release(send_process(rank), key);
    put_process_[key] = net_process(rank, l.task.peer);
  }
  proxies_[rank].ring_filled(node);
  wake_proxy(rank, now_ + cost_.record_ns);
  finish_task(rank, l);
  return true;
}

// ---- SMs

std::int32_t Simulation::take_idle_sm(std::int32_t rank, Role role) {
  Rank& r = ranks_[rank];
  // Own role first, then whoever is idle: compute last, as its SMs are the most.
  const std::size_t own = slot(role);
  for (const std::size_t s :
       {own, own == 1 ? std::size_t{2} : std::size_t{1}, own == 0 ? std::size_t{2} : std::size_t{0}}) {
    auto& idle = r.idle[s];
    if (idle.empty() || (role == Role::kCompute && s != own && !movers_compute(rank))) continue;
    if (options_.inject.shuffle) std::swap(idle[random_.below(idle.size())], idle.back());
    const std::int32_t sm = idle.back();
    idle.pop_back();
    return sm;
  }
  return kNobody;
}

void Simulation::start(std::int32_t rank, std::int32_t sm, std::int32_t lane) {
  Rank& r = ranks_[rank];
  Operator& op = op_of(r);
  Lane& l = lane_of(rank, lane);
  Sm& s = sm_of(rank, sm);
  s.index = l.head;
  std::copy(std::begin(l.task.signals), std::end(l.task.signals), s.signals);
  s.peer = l.task.peer;
  s.lane = static_cast<std::int16_t>(lane);
  if (options_.trace) begin_of(rank, sm) = now_;
  if (races_) {
    acquire_waits(rank, op, l.task, sm_process(rank, sm));
    check_accesses(rank, sm);
  }
  move_taken(rank, l.role);
  s.act_at_end = options_.inject.shuffle && (random_.next() & 1) != 0;
  if (op.memory && !s.act_at_end) op.memory->act(rank, l.task, r.epoch, *op.scratch);
  schedule(now_ + duration(op, rank, l.task, s), rank, sm_actor(sm));
}

void Simulation::end(std::int32_t rank, std::int32_t sm) {
  Rank& r = ranks_[rank];
  if (r.dead) return;
  Operator& op = op_of(r);
  Sm& s = sm_of(rank, sm);
  const Lane& l = lane_of(rank, s.lane);
  const auto task = [&] { return op.source->task(rank, l.role, l.number, s.index); };
  if (op.memory && s.act_at_end) op.memory->act(rank, task(), r.epoch, *op.scratch);
  if (options_.trace) {
    report_.trace.push_back({name_of(rank, l.role, l.number, s.index, task()), rank, sm,
                             static_cast<double>(begin_of(rank, sm)) / 1e3, static_cast<double>(now_) / 1e3});
  }
  s.lane = kIdle;
  raise_signals(rank, s, sm_process(rank, sm));
  finish_task(rank, l);
  next_task(rank, sm);
}

void Simulation::next_task(std::int32_t rank, std::int32_t sm) {
  Rank& r = ranks_[rank];
  Operator& op = op_of(r);
  for (const Role role : op.orders[static_cast<std::size_t>(sm)]) {
    auto& ready = r.ready[slot(role)];
    if (ready.empty()) continue;
    const bool mover = op.first_roles[static_cast<std::size_t>(sm)] != Role::kCompute;
    if (mover && role == Role::kCompute && !movers_compute(rank)) continue;
    std::size_t pick = 0;
    if (options_.inject.shuffle) pick = random_.below(ready.size());
    const std::int32_t lane = ready[pick];
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(pick));
    start(rank, sm, lane);
    Lane& l = lane_of(rank, lane);
    ++l.head;
    load_head(rank, l);
    advance(rank, lane);
    return;
  }
  r.idle[slot(op.first_roles[static_cast<std::size_t>(sm)])].push_back(sm);
}

void Simulation::raise_signals(std::int32_t rank, const Sm& s, std::size_t process) {
  Rank& r = ranks_[rank];
  const std::int32_t number = calls_[r.call].op;
  Operator& op = operators_[number];
  const std::uint32_t use = use_of_epoch(r.epoch);
  for (const Signal& signal : s.signals) {
    if (signal.reach == Reach::kNobody) continue;
    const std::int64_t flag = op.layout.flag_index(signal.flag, r.epoch);
    for_each_rank(options_.topo, rank, signal, s.peer, [&](std::int32_t to) {
      if (races_) races_->release(process, flag_key(static_cast<std::uint32_t>(number), to, flag));
      Flag& f = op.flag(to, flag);
      raise(f, to, signal.stamp ? use : f.value + 1, to == rank ? cost_.own_flag_ns : cost_.flag_ns);
    });
  }
}

void Simulation::raise(Flag& flag, std::int32_t rank, std::uint32_t value, Nanos latency) {
  flag.value = value;
  flag.visible_at = std::max(flag.visible_at, now_ + latency);
  std::int32_t* link = &flag.waiter;
  while (*link != kNobody) {
    Lane& l = lane_of(rank, *link);
    if (flag_reached(value, l.target)) {
      const std::int32_t lane = *link;
      *link = l.next_waiter;
      // Looks on at once: of a long range of stamps only the last one makes an event.
      if (waits_met(rank, lane)) schedule(std::max(l.ready_at, now_), rank, lane_actor(lane));
    } else {
      link = &l.next_waiter;
    }
  }
}

Nanos Simulation::reserve(std::vector<Nanos>& link, std::int32_t rank, std::int64_t bytes) {
  Nanos& free = link[rank];
  free = std::max(free, now_) + static_cast<Nanos>(static_cast<double>(bytes) / cost_.nvlink_bytes_per_ns);
  return free;
}

// As if every chunk found its tile parked, which is the most that it can cost: a GPU goes on in registers where chunks
// follow each other without a pause. Where nothing is folded in, nothing is touched.
double Simulation::attend_ns(const Plan& plan, std::int32_t rank, const Task& task) const {
  const double pairs = attended_pairs(plan, rank, task);
  if (pairs == 0 && task.resume && task.park) return static_cast<double>(cost_.own_flag_ns);
  const double flops = 4.0 * pairs * static_cast<double>(plan.spec().attention.dim);
  const int transfers = (task.resume ? 1 : 0) + (task.park ? 1 : 0);
  return static_cast<double>(cost_.attend_ns + transfers * cost_.park_ns) +
         flops * cost_.sms / (cost_.gemm_flops_per_ns * cost_.attend_efficiency);
}

// A GPU keeps the sums of its keys in registers from the first tile of queries to the last, so only there its pipeline
// starts and drains; what it adds to the sums of queries in memory is part of its efficiency. Where nothing meets,
// nothing is touched but what begins or ends.
double Simulation::backward_ns(const Plan& plan, std::int32_t rank, const Task& task) const {
  const double pairs = attended_pairs(plan, rank, task);
  const bool ends = !task.resume_keys || !task.park_keys;
  if (pairs == 0 && !ends && task.resume && task.park) return static_cast<double>(cost_.own_flag_ns);
  const double flops = 10.0 * pairs * static_cast<double>(plan.spec().attention.dim);
  const Nanos fixed = (task.resume_keys ? 0 : cost_.attend_ns) + (task.park_keys ? 0 : cost_.park_ns);
  return static_cast<double>(fixed + cost_.own_flag_ns) +
         flops * cost_.sms / (cost_.gemm_flops_per_ns * cost_.backward_efficiency);
}

// Gathered rows are multiplied in the order of their arrival, a row of tiles after the other, not in bands: what tiles
// that run at the same time want of A and B is used by no later ones, so where that is more than one GPU's L2 holds for
// all ranks, the rest comes from its memory while they run.
double Simulation::refetch_ns(const Operator& op, std::int32_t rank) const {
  if (cost_.memory_bytes_per_ns <= 0) return 0;
  const PlanSpec& spec = op.plan.spec();
  const double columns = static_cast<double>(ceil_div(op.plan.c_extent(rank).cols, spec.tiling.bn));
  const double tiles = std::max(op.partition.compute, 1);
  const double at_once = std::min(columns, tiles);
  const double lines = std::max(1.0, tiles / columns) * static_cast<double>(spec.tiling.bm) +
                       at_once * static_cast<double>(spec.tiling.bn);
  const double bytes =
      lines * static_cast<double>(op.plan.gemm_k(rank)) * static_cast<double>(dtype_bytes(spec.dtype)) * world_;
  return std::max(0.0, bytes - cost_.cache_bytes) / cost_.memory_bytes_per_ns;
}

Nanos Simulation::duration(const Operator& op, std::int32_t rank, const Task& task, const Sm& sm) {
  double ns = 0;
  Nanos link_free = now_;
  if (task.action == Action::kGemm) {
    // A wgmma instruction takes 64 rows and a multiple of 8 columns, however few are wanted.
    const double flops = 2.0 * static_cast<double>(round_up(task.block.rows, 64)) *
                         static_cast<double>(round_up(task.block.cols, 8)) * static_cast<double>(op.plan.gemm_k(rank));
    ns = static_cast<double>(cost_.tile_ns) + flops * cost_.sms / (cost_.gemm_flops_per_ns * cost_.gemm_efficiency) +
         (task.src == Buffer::kGather ? refetch_ns(op, rank) : 0);
  } else if (task.action == Action::kAttend) {
    ns = attend_ns(op.plan, rank, task);
  } else if (task.action == Action::kAttendBackward) {
    ns = backward_ns(op.plan, rank, task);
  } else {
    std::int64_t bytes = 0;
    std::int64_t from_peers = 0;
    std::int64_t to_peers = 0;
    const auto size_of = [&](const Access& access) {
      const std::int64_t elements = access.workspace() ? access.end - access.begin : access.block.elements();
      return elements * dtype_bytes(op.plan.buffer_dtype(access.buffer));
    };
    for_each_read(op.plan, rank, task, [&](const Access& access) {
      const std::int64_t size = size_of(access);
      bytes += size;
      if (access.rank == rank) return;
      from_peers += size;
      link_free = std::max(link_free, reserve(nvlink_out_, access.rank, size));
    });
    for_each_write(op.plan, rank, task, [&](const Access& access) {
      const std::int64_t size = size_of(access);
      bytes += size;
      if (access.rank == rank) return;
      to_peers += size;
      link_free = std::max(link_free, reserve(nvlink_in_, access.rank, size));
    });
    if (from_peers > 0) link_free = std::max(link_free, reserve(nvlink_in_, rank, from_peers));
    if (to_peers > 0) link_free = std::max(link_free, reserve(nvlink_out_, rank, to_peers));
    ns = static_cast<double>(cost_.move_ns) + static_cast<double>(bytes) / cost_.sm_bytes_per_ns;
  }
  if (sm.slow) ns *= kSlowdown;
  if (cost_.jitter > 0) ns *= 1 + cost_.jitter * random_.uniform();
  return std::max(static_cast<Nanos>(ns), link_free - now_);
}

}  // namespace mkernel
