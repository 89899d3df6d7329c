#include "net/proxy.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace mkernel {
namespace {

constexpr std::int32_t kFirstRetryNs = 1'000;     // about what a post costs; doubled with each failure
constexpr std::int32_t kLastRetryNs = 1'000'000;  // late enough to cost nothing, early against any deadline
constexpr int kEventsPerPoll = 32;
constexpr int kPollsPerStep = 16;

// A put's id is the record it came from, with the destination's node as count: it names the put without a table, and
// is unique among puts in flight, which are never 128 epochs apart.
std::uint64_t put_id(const Record& record, std::int32_t node) {
  return encode({record.op, record.epoch, record.task, static_cast<std::uint32_t>(node), 0});
}

}  // namespace

std::string ProxyFailure::message() const {
  if (own_bug) {
    return fmt::format("rank {}: a bug of mKernel: {} (peer {}, operator {}, epoch {}, send task {})", rank, text, peer,
                       op, epoch, task);
  }
  return fmt::format("rank {} lost rank {}: {} (operator {}, epoch {}, send task {})", rank, peer, text, op, epoch,
                     task);
}

Proxy::Proxy(const ProxyConfig& config)
    : config_(config),
      destinations_(config.memory),
      bytes_to_(config.memory),
      queue_(config.memory),
      busy_(config.memory),
      posting_(config.memory),
      filled_(config.memory) {
  const Topology& topo = config_.topo;
  MK_CHECK(config_.rank >= 0 && config_.rank < topo.world());
  MK_CHECK_OP(config_.rings.size(), ==, static_cast<std::size_t>(topo.nodes));
  MK_CHECK(config_.endpoint != nullptr);
  MK_CHECK(config_.queue_depth >= 1 && config_.queue_depth <= kMaxProxyQueue);
  MK_CHECK(config_.window >= 1 && config_.window <= kMaxProxyQueue && config_.batch >= 1);
  arrivals_per_put_ = static_cast<std::uint32_t>(config_.endpoint->arrivals_per_put());
  MK_CHECK(arrivals_per_put_ == 0 || config_.landing != nullptr);

  const auto nodes = static_cast<std::size_t>(topo.nodes);
  destinations_.resize(nodes);
  bytes_to_.resize(nodes);
  queue_.resize(nodes * static_cast<std::size_t>(config_.queue_depth));
  busy_.reserve(nodes);
  posting_.reserve(nodes);
  filled_.reserve(nodes);
  config_.rings[static_cast<std::size_t>(topo.node_of(config_.rank))] = nullptr;
}

void Proxy::add_operator(std::uint32_t op, const PlanSource* source, const HeapLayout& layout,
                         std::uint64_t start_epoch) {
  MK_CHECK_OP(op, <, kMaxOperators);
  MK_CHECK(source != nullptr);
  MK_CHECK(owned_operators_[op] == nullptr);
  owned_operators_[op] = std::make_unique<Operator>();
  Operator& entry = *owned_operators_[op];
  entry.source = source;
  entry.layout = layout;
  entry.flag_count = source->plan().flag_count();
  entry.last_epoch = start_epoch;
  if (arrivals_per_put_ > 0) entry.arrivals.resize(2 * std::size_t{entry.flag_count});
  // order: the entry is complete when step() sees it; pairs with find_operator().
  operators_[op].store(&entry, std::memory_order_release);
}

bool Proxy::step(Nanos now) {
  last_step_ = now;
  completed_ = false;
  ++turn_;
  bool worked = poll_endpoint(now);
  if (dropped_) return discard_all() || worked;
  worked |= take_all();
  worked |= post_all(now);
  more_records_ = std::any_of(filled_.begin(), filled_.end(), [&](std::int32_t node) { return can_take(node); });
  return worked;
}

Nanos Proxy::next_event() const {
  if (more_events_ || more_records_) return last_step_;
  Nanos next = std::min(config_.endpoint->next_event(), next_retry_);
  if (full_since_ != kNever && config_.max_post_failures_ns > 0) {
    next = std::min(next, full_since_ + config_.max_post_failures_ns);
  }
  return next;
}

void Proxy::ring_filled(std::int32_t node) {
  Destination& to = destination(node);
  if (to.filled || ring(node) == nullptr) return;
  to.filled = true;
  filled_.push_back(node);
}

bool Proxy::idle() const {
  if (!busy_.empty() || more_events_) return false;
  for (std::int32_t node = 0; node < config_.topo.nodes; ++node) {
    if (destination(node).in_flight > 0) return false;
    if (ring(node) != nullptr && !ring(node)->empty()) return false;
  }
  return true;
}

void Proxy::drop() {
  dropped_ = true;
  more_records_ = false;
  for (const std::int32_t node : busy_) {
    destination(node).count = 0;
    destination(node).busy = false;
  }
  busy_.clear();
  next_retry_ = kNever;
  full_since_ = kNever;
  discard_all();
}

Put& Proxy::queued(std::int32_t node, std::int32_t i) {
  const std::int32_t at = (destination(node).first + i) % config_.queue_depth;
  return queue_[static_cast<std::size_t>(node) * static_cast<std::size_t>(config_.queue_depth) +
                static_cast<std::size_t>(at)];
}

// Completions and arrivals.

bool Proxy::poll_endpoint(Nanos now) {
  std::array<TransportEvent, kEventsPerPoll> events;
  bool worked = false;
  more_events_ = false;
  for (int i = 0; i < kPollsPerStep; ++i) {
    const int count = config_.endpoint->poll(now, events);
    for (const TransportEvent& event : std::span(events).first(static_cast<std::size_t>(count))) handle(event);
    worked |= count > 0;
    if (count < kEventsPerPoll) return worked;
  }
  more_events_ = true;
  return worked;
}

void Proxy::handle(const TransportEvent& event) {
  if (event.kind == EventKind::kArrived || event.kind == EventKind::kStamped) {
    handle_arrival(event);
    return;
  }
  const auto node = static_cast<std::int32_t>(decode(event.id).count);
  MK_CHECK_OP(node, <, config_.topo.nodes);
  Destination& to = destination(node);
  MK_CHECK_OP(to.in_flight, >, 0);
  --to.in_flight;
  completed_ = true;
  if (event.kind == EventKind::kSent) {
    ++stats_.sent;
    return;
  }
  ++stats_.failed;
  fail(node, event.id, false, "the network gave up on a put to it");
}

void Proxy::handle_arrival(const TransportEvent& event) {
  const auto bug = [&](const char* text) {
    if (!failure_) failure_ = {true, config_.rank, event.peer, event.op, event.epoch, -1, text};
  };
  if (event.op >= kMaxOperators) return bug("an arrival for an operator number out of range");
  Operator* op = find_operator(event.op);
  if (op == nullptr) return bug("an arrival for an operator that is not there");
  if (event.flag < 0 || event.flag >= 2 * std::int64_t{op->flag_count}) {
    return bug("an arrival for a flag out of range");
  }
  if (event.kind == EventKind::kStamped) {
    ++stats_.arrivals;
    if (config_.landing != nullptr) {
      config_.landing->stamped(config_.rank, event.op, event.flag, use_of_epoch(event.epoch));
    }
    return;
  }
  if (op->arrivals.empty()) return bug("a counted arrival from a network that writes stamps itself");
  Arrivals& arrivals = op->arrivals[static_cast<std::size_t>(event.flag)];
  if (arrivals.count > 0 && arrivals.epoch != event.epoch) return bug("arrivals of two epochs for one flag");
  arrivals.epoch = event.epoch;
  if (++arrivals.count < arrivals_per_put_) return;
  arrivals.count = 0;
  ++stats_.arrivals;
  // order: the pieces' bytes became visible to us with their arrivals (Endpoint::poll acquires), and the stamp is
  // written with release, so whoever acquires the stamp sees them all.
  config_.landing->stamp(config_.rank, event.op, event.flag, use_of_epoch(event.epoch));
}

// Records.

bool Proxy::can_take(std::int32_t node) const {
  const Destination& to = destination(node);
  return !to.halted && to.count < config_.queue_depth;
}

bool Proxy::take_all() {
  if (!config_.hinted) {
    for (std::int32_t node = 0; node < config_.topo.nodes; ++node) ring_filled(node);
  }
  if (filled_.empty()) return false;
  bool worked = false;
  // Another ring is the first in every step.
  std::rotate(filled_.begin(), filled_.begin() + turn_ % static_cast<std::uint32_t>(filled_.size()), filled_.end());
  std::size_t kept = 0;
  for (std::size_t i = 0; i < filled_.size(); ++i) {
    const std::int32_t node = filled_[i];
    bool drained = false;
    worked |= take(node, drained);
    destination(node).filled = !drained;
    if (!drained) filled_[kept++] = node;
  }
  filled_.resize(kept);
  return worked;
}

// Takes records while there is room; says whether it took any and whether the ring was found empty.
bool Proxy::take(std::int32_t node, bool& drained) {
  bool worked = false;
  for (int i = 0; i < config_.batch; ++i) {
    Record record;
    if (!ring(node)->peek(record)) {
      drained = true;
      return worked;
    }
    if (!can_take(node)) return worked;
    take_record(node, record);
    // The record is in its queue, or refused for good, so the producers may have the slot.
    ring(node)->pop();
    worked = true;
  }
  return worked;
}

void Proxy::take_record(std::int32_t node, const Record& record) {
  ++stats_.records;
  Destination& to = destination(node);
  Put put;
  if (const char* wrong = make_put(node, record, put)) {
    fail(node, put_id(record, node), true, wrong);
    return;
  }
  queued(node, to.count) = put;
  ++to.count;
  if (to.busy) return;
  to.busy = true;
  busy_.push_back(node);
}

// Fills `put`, or says what is wrong with the record.
const char* Proxy::make_put(std::int32_t node, const Record& record, Put& put) {
  Operator* found = find_operator(record.op);
  if (found == nullptr) return "a record names an operator that is not there";
  Operator& op = *found;
  const PlanSource* source = op.source;
  const Plan& plan = source->plan();
  if (plan.lanes(Role::kSend) == 0) return "a record names a task of a plan that sends nothing";
  const SendId id = send_of(plan, record.task);
  if (id.index >= source->count(config_.rank, Role::kSend, id.lane)) return "a record names a task out of range";
  if (record.count != 0) return "a record carries a count that its plan has no use for";
  const Task task = source->task(config_.rank, Role::kSend, id.lane, id.index);
  if (task.action != Action::kPut) return "a record names a task that is no put";
  if (task.peer != rank_on(node)) return "a record lies in the ring of another destination";
  if (!is_workspace(task.src) || !is_workspace(task.dst)) return "a put between buffers outside the heap";
  const Signal& signal = task.signals[0];
  if (!signal.stamp || signal.reach != Reach::kRank) return "a put without a stamp for its destination";
  if (signal.flag >= op.flag_count || task.length < 0) return "a put with a flag or a length out of range";

  const std::uint64_t epoch = full_epoch(record.epoch, op.last_epoch);
  if (static_cast<std::int64_t>(epoch - op.last_epoch) > 0) op.last_epoch = epoch;
  put.id = put_id(record, node);
  put.src_rank = config_.rank;
  put.dst_rank = task.peer;
  put.op = record.op;
  put.epoch = epoch;
  put.src_offset = op.layout.offset(task.src, task.src_offset, epoch);
  put.dst_offset = op.layout.offset(task.dst, task.dst_offset, epoch);
  put.bytes = task.length * dtype_bytes(plan.buffer_dtype(task.dst));
  put.flag = op.layout.flag_index(signal.flag, epoch);
  put.value = use_of_epoch(epoch);
  return nullptr;
}

// Throws away what the rings hold, at most one ring's depth each.
bool Proxy::discard_all() {
  bool worked = false;
  for (std::int32_t node = 0; node < config_.topo.nodes; ++node) {
    if (ring(node) == nullptr) continue;
    Record record;
    for (std::uint32_t i = 0; i < ring(node)->depth() && ring(node)->peek(record); ++i) {
      ring(node)->pop();
      worked = true;
    }
    destination(node).filled = false;
  }
  filled_.clear();
  return worked;
}

// Posts.

bool Proxy::post_all(Nanos now) {
  if (full_since_ != kNever) {
    // Nobody is asked again before there is room: with hundreds of nodes that would cost more than all else.
    if (!completed_) return full_for_too_long(now);
    full_since_ = kNever;
  }
  next_retry_ = kNever;
  if (busy_.empty()) return false;
  // Where the endpoint has little room, it does not always go to the same destination.
  std::rotate(busy_.begin(), busy_.begin() + 1, busy_.end());
  // A put to each destination in turn, again and again: plans expect what all nodes send at the same time to come so,
  // and so would queues that share a link.
  posting_.assign(busy_.begin(), busy_.end());
  std::int32_t posted = 0;
  while (!posting_.empty() && full_since_ == kNever) {
    std::size_t going_on = 0;
    for (const std::int32_t node : posting_) {
      if (full_since_ != kNever || !post(node, now)) continue;
      posting_[going_on++] = node;
      ++posted;
    }
    posting_.resize(going_on);
  }
  if (posted > 0) config_.endpoint->flush(now);
  stats_.posts += posted;
  stats_.batches += posted > 0 ? 1 : 0;
  std::size_t kept = 0;
  for (const std::int32_t node : busy_) {
    Destination& to = destination(node);
    to.busy = to.count > 0;
    if (!to.busy) continue;
    busy_[kept++] = node;
    // A queue that is not stalled waits for its window, which opens with an event of the endpoint.
    if (to.stalled_since != kNever) next_retry_ = std::min(next_retry_, to.retry_at);
  }
  busy_.resize(kept);
  return posted > 0;
}

// A full endpoint whose puts neither arrive nor fail. True if that is so and the first destination has been given up.
bool Proxy::full_for_too_long(Nanos now) {
  if (config_.max_post_failures_ns == 0 || now - full_since_ < config_.max_post_failures_ns || busy_.empty()) {
    return false;
  }
  const std::int32_t node = busy_.front();
  busy_.erase(busy_.begin());
  if (destination(node).count > 0) fail(node, queued(node, 0).id, false, "posting to it failed for too long");
  destination(node).busy = false;
  full_since_ = now;
  return true;
}

// Posts the head of a queue, if that can be.
bool Proxy::post(std::int32_t node, Nanos now) {
  Destination& to = destination(node);
  if (to.stalled_since != kNever && now < to.retry_at && !completed_) return false;
  if (to.count == 0 || to.in_flight >= config_.window) return false;
  const Put& put = queued(node, 0);
  switch (config_.endpoint->post(put, now)) {
    case PostStatus::kPosted: break;
    case PostStatus::kFull:
      ++stats_.retries;
      full_since_ = now;
      return false;
    case PostStatus::kAgain:
      if (stall(to, now)) fail(node, put.id, false, "posting to it failed for too long");
      return false;
    case PostStatus::kFatal: fail(node, put.id, false, "the network cannot reach it any more"); return false;
  }
  ++to.in_flight;
  bytes_to_[static_cast<std::size_t>(node)] += put.bytes;
  stats_.bytes += put.bytes;
  to.stalled_since = kNever;
  to.first = static_cast<std::int16_t>((to.first + 1) % config_.queue_depth);
  --to.count;
  return true;
}

// The head stays where it is and is posted again later; true when that has gone on for too long.
bool Proxy::stall(Destination& to, Nanos now) {
  ++stats_.retries;
  if (to.stalled_since == kNever) {
    to.stalled_since = now;
    to.retry_delay_ns = kFirstRetryNs;
  } else if (config_.max_post_failures_ns > 0 && now - to.stalled_since >= config_.max_post_failures_ns) {
    return true;
  } else if (now >= to.retry_at) {
    to.retry_delay_ns = std::min(2 * to.retry_delay_ns, kLastRetryNs);
  }
  to.retry_at = now + to.retry_delay_ns;
  return false;
}

// `to` gets nothing any more. What is in flight still completes.
void Proxy::halt(Destination& to) {
  to.halted = true;
  to.count = 0;
  to.stalled_since = kNever;
}

void Proxy::fail(std::int32_t node, std::uint64_t id, bool own_bug, const char* text) {
  Destination& to = destination(node);
  halt(to);
  if (failure_) return;
  const Record record = decode(id);
  const Operator* op = find_operator(record.op);
  const std::uint64_t epoch = full_epoch(record.epoch, op != nullptr ? op->last_epoch : 0);
  failure_ = {own_bug, config_.rank, rank_on(node), record.op, epoch, std::int64_t{record.task}, text};
}

}  // namespace mkernel
