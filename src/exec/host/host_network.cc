#include "exec/host/host_network.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace mkernel {
namespace {

// A thread that sleeps comes back some 50 us late (the default timer slack of Linux): shorter waits are spent awake.
constexpr Nanos kSpinNs = 20'000;
constexpr Nanos kLongestSleepNs = 100'000'000;
// A process that fails leaves, and its peers' puts to it fail then. For so long whoever watches the processes may say
// who was the first, before we blame the one whose connection broke.
constexpr Nanos kBlameAfterNs = 1'000'000'000;

}  // namespace

void HostLanding::set_operator(std::uint32_t number, HostOperator* op) {
  // order: the operator is complete when a put finds it; pairs with find(). seq_cst: see remove_operator().
  operators_[number].store(op, std::memory_order_seq_cst);
}

HostOperator& HostLanding::find(std::uint32_t number) const {
  HostOperator* op = operators_[number].load(std::memory_order_acquire);  // order: pairs with set_operator()
  MK_CHECK(op != nullptr);
  return *op;
}

void HostLanding::land(const Put& put, std::int64_t begin, std::int64_t bytes) {
  HostOperator& op = find(put.op);
  if (bytes == 0) return;
  std::memcpy(op.memory().heap(put.dst_rank) + put.dst_offset + begin,
              op.memory().heap(put.src_rank) + put.src_offset + begin, static_cast<std::size_t>(bytes));
  op.network_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void HostLanding::note(HostOperator& op, std::int32_t rank, std::int64_t flag, std::uint32_t value, Nanos now) {
  if (const std::shared_ptr<RunLog> log = op.trace()) log->put_ends(rank, flag, now);
  FlightEntry entry;
  entry.time_ns = now;
  entry.state = FlightState::kStamped;
  entry.op = op.number();
  entry.epoch = 2 * std::uint64_t{value} - (flag >= op.plan().flag_count() ? 1 : 0);  // modulo 2^33, as stamps are
  entry.index = flag;
  shared_.streams[rank]->recorder.note(entry);
}

void HostLanding::stamp(std::int32_t rank, std::uint32_t number, std::int64_t flag, std::uint32_t value) {
  HostOperator& op = find(number);
  const Nanos now = steady_now();
  note(op, rank, flag, value, now);
  // order: the bytes that land() has copied; pairs with HostOperator::met().
  op.flag(rank, flag).store(value, std::memory_order_release);
  shared_.flag_raised(rank, now);
}

void HostLanding::stamped(std::int32_t rank, std::uint32_t number, std::int64_t flag, std::uint32_t value) {
  // A call may have seen the stamp, ended, and its operator be gone before the network told us.
  HostOperator* op = operators_[number].load(std::memory_order_seq_cst);  // order: see remove_operator()
  if (op == nullptr) return;
  const Nanos now = steady_now();
  note(*op, rank, flag, value, now);
  shared_.flag_raised(rank, now);
}

HostNetwork::HostNetwork(HostShared& shared, const LinkModel& link, ProcessEndpoint* endpoint, int ring_depth,
                         int thread_count)
    : shared_(shared), landing_(shared), endpoint_(endpoint) {
  const Topology& topo = shared_.topo;
  if (endpoint_ == nullptr) {
    network_ = std::make_unique<LocalNetwork>(topo.world(), link, &landing_,
                                              [this](std::int32_t rank, Nanos) { worker_of(rank).bell.ring(); });
  }
  slots_ = std::make_unique<RingSlot[]>(static_cast<std::size_t>(topo.world()) * topo.nodes);
  for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
    if (endpoint_ != nullptr && rank != shared_.own_rank) {
      proxies_.push_back(nullptr);
      continue;
    }
    ProxyConfig config;
    config.rank = rank;
    config.topo = topo;
    config.endpoint = endpoint_ != nullptr ? endpoint_ : network_->endpoint(rank);
    config.landing = &landing_;
    config.max_post_failures_ns = shared_.deadline_ns;
    for (std::int32_t node = 0; node < topo.nodes; ++node) {
      if (node != topo.node_of(rank)) {
        slot(rank, node).ring = std::make_unique<CommandRing>(static_cast<std::uint32_t>(ring_depth));
      }
      config.rings.push_back(slot(rank, node).ring.get());
    }
    proxies_.push_back(std::make_unique<Proxy>(config));
  }
  for (int i = 0; i < thread_count; ++i) {
    workers_.push_back(std::make_unique<Worker>());
    for (std::int32_t rank = i; rank < topo.world(); rank += thread_count) {
      if (proxies_[rank]) workers_[i]->ranks.push_back(rank);
    }
  }
}

void HostNetwork::start() {
  for (auto& worker : workers_) worker->thread = std::thread([this, w = worker.get()] { run(*w); });
}

void HostNetwork::join() {
  wake();
  for (auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
}

void HostNetwork::wake() {
  for (auto& worker : workers_) worker->bell.ring_all();
}

void HostNetwork::wait_still() {
  wake();
  for (auto& worker : workers_) {
    // order: the thread's last write to a heap comes before the heap is freed; pairs with run().
    while (!worker->still.load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void HostNetwork::add_operator(HostOperator& op, std::shared_ptr<const PlanSource> source) {
  landing_.set_operator(op.number(), &op);
  for (auto& proxy : proxies_) {
    if (proxy) proxy->add_operator(op.number(), source.get(), op.layout(), op.start_epoch());
  }
  sources_.push_back(std::move(source));
}

void HostNetwork::remove_operator(HostOperator& op) {
  landing_.set_operator(op.number(), nullptr);
  // A network that writes stamps itself tells us of them when the call may be long complete: see it out of its round.
  for (auto& worker : workers_) {
    // order: the worker finds null in a round that begins after this read; all of it in the one order of seq_cst, with
    // set_operator() before; pairs with run().
    const std::uint64_t seen = worker->rounds.load(std::memory_order_seq_cst);
    worker->bell.ring_all();
    while (worker->thread.joinable() && worker->rounds.load(std::memory_order_seq_cst) == seen &&
           !worker->still.load(std::memory_order_acquire)) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

bool HostNetwork::push(std::int32_t rank, std::int32_t node, const Record& record) {
  RingSlot& to = slot(rank, node);
  if (!try_push(to.ring->view(), record)) {
    // order: either the network thread's exchange comes first, and we see the room that it has made, or ours does, and
    // it sees that we starve: both exchange the same word; pairs with step_rank().
    to.starved.exchange(true, std::memory_order_acq_rel);
    if (!try_push(to.ring->view(), record)) return false;
  }
  worker_of(rank).bell.ring();
  return true;
}

bool HostNetwork::step_rank(std::int32_t rank) {
  Proxy& proxy = *proxies_[rank];
  const Nanos now = steady_now();
  const bool worked = proxy.step(now);
  if (const auto& failure = proxy.failure()) report(*failure, now);
  if (!worked) return false;
  for (std::int32_t node = 0; node < shared_.topo.nodes; ++node) {
    if (!slot(rank, node).ring) continue;
    // order: see push().
    if (slot(rank, node).starved.exchange(false, std::memory_order_acq_rel)) shared_.streams[rank]->bell.ring();
  }
  return true;
}

void HostNetwork::report(const ProxyFailure& failure, Nanos now) {
  if (failure.own_bug || endpoint_ == nullptr) {
    return shared_.fail({failure.own_bug ? ErrorKind::kAborted : ErrorKind::kPeerLost, failure.message()});
  }
  lost_since_ = std::min(lost_since_, now);
  if (now - lost_since_ < kBlameAfterNs) return;
  const std::string cause = endpoint_->last_error();
  shared_.fail({ErrorKind::kPeerLost, cause.empty()
                                          ? failure.message()
                                          : fmt::format("{}: {}: {}", failure.message(), endpoint_->name(), cause)});
}

void HostNetwork::run(Worker& worker) {
  while (!shared_.stop.load(std::memory_order_relaxed) && !shared_.failure.happened()) {
    const std::uint32_t seen = worker.bell.sequence();
    worker.rounds.fetch_add(1, std::memory_order_seq_cst);  // order: see remove_operator()
    bool worked = false;
    for (const std::int32_t rank : worker.ranks) worked |= step_rank(rank);
    if (!worked) wait_for_work(worker, seen);
  }
  // order: see wait_still().
  worker.still.store(true, std::memory_order_release);
}

void HostNetwork::wait_for_work(Worker& worker, std::uint32_t seen) {
  Nanos next = kNever;
  for (const std::int32_t rank : worker.ranks) next = std::min(next, proxies_[rank]->next_event());
  const Nanos now = steady_now();
  if (next != kNever && next - now <= kSpinNs) return;
  worker.bell.sleep(seen, std::min(next, now + kLongestSleepNs));
}

}  // namespace mkernel
