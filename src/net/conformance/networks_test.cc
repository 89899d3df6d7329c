#include "net/conformance/networks.h"

#include <array>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "net/libfabric/fabric_endpoint.h"
#include "net/verbs/settings.h"
#include "net/verbs/verbs_endpoint.h"
#include "plan/plan.h"
#ifdef MKERNEL_HAS_VERBS
#include "net/verbs/fake_verbs.h"
#endif

namespace mkernel {
namespace {

// 4.096 us * 2^12 per retry.
constexpr int kShortTimeout = 12;

}  // namespace

std::string network_name(const NetworkKind& kind) { return kind.name; }

std::vector<NetworkKind> network_kinds() {
  using Family = NetworkKind::Family;
  std::vector<NetworkKind> kinds = {
      {.name = "local", .family = Family::kLocal},
      {.name = "local_counted3", .family = Family::kLocal, .pieces = 3},
      {.name = "libfabric_tcp1", .family = Family::kLibfabric, .pieces = 1},
      {.name = "libfabric_tcp3", .family = Family::kLibfabric, .pieces = 3},
  };
  for (const bool fake : {true, false}) {
    const std::string name = fake ? "fake_verbs" : "verbs";
    kinds.push_back({.name = name, .family = Family::kVerbs, .fake = fake});
    kinds.push_back({.name = name + "_silent", .family = Family::kVerbs, .notify = false, .fake = fake});
    kinds.push_back({.name = name + "_counted1", .family = Family::kVerbs, .pieces = 1, .fake = fake});
    kinds.push_back(
        {.name = name + "_counted3_shuffled", .family = Family::kVerbs, .pieces = 3, .shuffle = true, .fake = fake});
  }
  return kinds;
}

std::string network_obstacle(const NetworkKind& kind) {
  switch (kind.family) {
    case NetworkKind::Family::kLocal: return "";
    case NetworkKind::Family::kLibfabric: {
      static const std::string obstacle = fabric_obstacle();
      return obstacle;
    }
    case NetworkKind::Family::kVerbs: {
#ifdef MKERNEL_HAS_VERBS
      if (kind.fake) return "";
#endif
      static const std::string obstacle = verbs_obstacle();
      return obstacle;
    }
  }
  return "";
}

std::unique_ptr<ProcessEndpoint> make_endpoint(const NetworkKind& kind, std::int32_t rank, std::int32_t world,
                                               int queue_depth, bool star, bool impatient) {
  if (kind.family == NetworkKind::Family::kLibfabric) {
    FabricOptions options;
    options.local_address = kind.local_address;
    options.queue_depth = queue_depth;
    options.pieces = kind.pieces;
    auto endpoint = create_fabric_endpoint(rank, world, options);
    if (!endpoint.ok()) std::fprintf(stderr, "%s\n", endpoint.error().message.c_str());
    return std::move(endpoint).value();
  }
  VerbsOptions options;
  options.queue_depth = queue_depth;
  options.mode = kind.pieces > 0 ? VerbsMode::kCounted : VerbsMode::kOrdered;
  if (kind.pieces > 0) options.pieces = kind.pieces;
  options.notify = kind.notify;
  options.shuffle_seed = kind.shuffle ? 1 + static_cast<std::uint64_t>(rank) : 0;
  if (impatient) options.timeout = kShortTimeout;
  options.send_depth = 64;
  options.receive_depth = 512;
  if (star && rank > 0) options.peers = {0};
#ifdef MKERNEL_HAS_VERBS
  if (kind.fake) {
    options.library = &fake_verbs();
    options.nic = fake_nic();
    options.gid_index = 0;
  }
#endif
  // Ranks take turns over all ports, so that writes really cross between two of them.
  if (!kind.fake) {
    options.nic = choose_nic({}, "/sys", std::vector<GpuPlace>(static_cast<std::size_t>(world)), rank).value();
  }
  auto endpoint = create_verbs_endpoint(rank, world, options);
  if (!endpoint.ok()) std::fprintf(stderr, "%s\n", endpoint.error().message.c_str());
  return std::move(endpoint).value();
}

TestNetwork::TestNetwork(const NetworkKind& kind, const NetworkOptions& options)
    : kind_(kind), options_(options), counts_(static_cast<std::size_t>(options.world)) {
  const std::int64_t bytes = stamp_bytes() + options.heap_bytes;
  for (int rank = 0; rank < options.world; ++rank) {
    if (options.memory) {
      memory_.push_back(options.memory(rank, bytes));
    } else {
      owned_.emplace_back(static_cast<std::size_t>(bytes));
      memory_.push_back(owned_.back().data());
    }
    std::memset(memory_.back(), 0, static_cast<std::size_t>(stamp_bytes()));
    pieces_.emplace_back(static_cast<std::size_t>(kind.pieces > 0 ? options.stamps : 0));
  }
  processes_.resize(static_cast<std::size_t>(options.world));
  if (kind.family == NetworkKind::Family::kLocal) {
    LinkModel link;
    link.unordered = kind.pieces > 0;
    link.pieces = std::max(1, kind.pieces);
    link.jitter_ns = 20'000;
    link.queue_depth = options.queue_depth;
    link.dead_detect_ns = 50'000'000;
    local_ = std::make_unique<LocalNetwork>(options.world, link, this);
    for (int rank = 0; rank < options.world; ++rank) endpoints_.push_back(local_->endpoint(rank));
    return;
  }
  for (int rank = 0; rank < options.world; ++rank) {
    processes_[static_cast<std::size_t>(rank)] =
        make_endpoint(kind, rank, options.world, options.queue_depth, options.star, options.impatient);
    endpoints_.push_back(processes_[static_cast<std::size_t>(rank)].get());
  }
  for (int rank = 0; rank < options.world; ++rank) {
    for (int peer = 0; peer < options.world; ++peer) {
      if (options.star && rank != 0 && peer != 0) continue;
      const Status status = process_endpoint(rank)->connect(peer, process_endpoint(peer)->address());
      if (!status.ok()) std::fprintf(stderr, "%s\n", status.error().message.c_str());
      MK_CHECK(status.ok());
    }
  }
  add_heaps(0);
}

TestNetwork::~TestNetwork() {
  for (auto& endpoint : processes_) endpoint.reset();
}

void TestNetwork::add_heaps(std::uint32_t op, std::uint64_t start_epoch) {
  if (local_) return;
  std::vector<RemoteHeap> heaps;
  for (int rank = 0; rank < options_.world; ++rank) {
    const auto heap =
        process_endpoint(rank)->add_heap(op, {this->heap(rank), stamp_bytes() + options_.heap_bytes}, start_epoch);
    if (!heap.ok()) std::fprintf(stderr, "%s\n", heap.error().message.c_str());
    heaps.push_back(heap.value());
  }
  for (int rank = 0; rank < options_.world; ++rank) {
    for (int peer = 0; peer < options_.world; ++peer) {
      process_endpoint(rank)->set_remote(op, peer, heaps[static_cast<std::size_t>(peer)]);
    }
  }
}

void TestNetwork::remove_heaps(std::uint32_t op) {
  for (auto& endpoint : processes_) {
    if (endpoint) endpoint->remove_heap(op);
  }
}

void TestNetwork::close(int rank) {
  if (local_) {
    local_->kill(rank);
    return;
  }
  processes_[static_cast<std::size_t>(rank)].reset();
  endpoints_[static_cast<std::size_t>(rank)] = nullptr;
}

Put TestNetwork::put(int src, int dst, std::int64_t src_at, std::int64_t dst_at, std::int64_t bytes, std::int64_t flag,
                     std::uint64_t epoch) const {
  Put put;
  put.id = static_cast<std::uint64_t>(flag);
  put.src_rank = src;
  put.dst_rank = dst;
  put.epoch = epoch;
  put.src_offset = offset(src_at);
  put.dst_offset = offset(dst_at);
  put.bytes = bytes;
  put.flag = flag;
  put.value = use_of_epoch(epoch);
  return put;
}

void TestNetwork::poll(int rank) {
  if (endpoint(rank) == nullptr) return;
  std::array<TransportEvent, 16> events;
  const int count = endpoint(rank)->poll(clock_now(), events);
  Counts& counted = counts_[static_cast<std::size_t>(rank)];
  for (int i = 0; i < count; ++i) {
    const TransportEvent& event = events[static_cast<std::size_t>(i)];
    switch (event.kind) {
      case EventKind::kSent: ++counted.sent; break;
      case EventKind::kFailed:
        ++counted.failed;
        counted.failed_peer = event.peer;
        break;
      case EventKind::kArrived:
        ++counted.arrivals;
        arrived(rank, event);
        break;
      case EventKind::kStamped: ++counted.arrivals; break;
    }
  }
}

// As the proxy does.
void TestNetwork::arrived(int rank, const TransportEvent& event) {
  Pieces& pieces = pieces_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(event.flag)];
  if (pieces.count > 0 && pieces.epoch != event.epoch) ++wrong_arrivals_;
  pieces.epoch = event.epoch;
  if (++pieces.count < kind_.pieces) return;
  pieces.count = 0;
  stamp(rank, event.op, event.flag, use_of_epoch(event.epoch));
}

void TestNetwork::poll_all() {
  for (int rank = 0; rank < options_.world; ++rank) poll(rank);
}

bool TestNetwork::poll_until(const std::function<bool()>& done, Nanos limit) {
  for (const Nanos end = clock_now() + limit; !done();) {
    if (clock_now() > end) return false;
    poll_all();
  }
  return true;
}

bool TestNetwork::post(const Put& put) {
  PostStatus status = PostStatus::kFull;
  const bool decided = poll_until([&] {
    status = endpoint(put.src_rank)->post(put, clock_now());
    return status == PostStatus::kPosted || status == PostStatus::kFatal;
  });
  if (decided) endpoint(put.src_rank)->flush(clock_now());
  return status == PostStatus::kPosted;
}

void TestNetwork::land(const Put& put, std::int64_t begin, std::int64_t bytes) {
  std::memcpy(heap(put.dst_rank) + put.dst_offset + begin, heap(put.src_rank) + put.src_offset + begin,
              static_cast<std::size_t>(bytes));
}

void TestNetwork::stamp(std::int32_t rank, std::uint32_t, std::int64_t flag, std::uint32_t value) {
  // order: pairs with stamp_of().
  std::atomic_ref<std::uint32_t>(reinterpret_cast<std::uint32_t*>(heap(rank))[flag])
      .store(value, std::memory_order_release);
}

}  // namespace mkernel
