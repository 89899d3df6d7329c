#include "world/process_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "exec/cuda/gpu_probe.h"
#include "net/address_bytes.h"
#include "world/network.h"
#include "world/packet.h"

namespace mkernel {
namespace {

constexpr std::size_t kMaxLongText = 1 << 22;  // an address names a few queue pairs per peer, 4 bytes each

// The first rank whose text is not the one that most ranks have (rank 0's, when in doubt), and a rank that has that.
std::pair<std::int32_t, std::int32_t> find_different(const std::vector<std::string>& texts) {
  std::size_t common = 0;
  std::ptrdiff_t most = 0;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const std::ptrdiff_t count = std::count(texts.begin(), texts.end(), texts[rank]);
    if (count > most) {
      most = count;
      common = rank;
    }
  }
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] != texts[common]) return {static_cast<std::int32_t>(rank), static_cast<std::int32_t>(common)};
  }
  return {-1, static_cast<std::int32_t>(common)};
}

}  // namespace

Result<std::unique_ptr<ProcessGroup>> ProcessGroup::create(const WorldOptions& options) {
  const Processes& processes = options.processes;
  BootstrapOptions meeting;
  meeting.rank = processes.rank;
  meeting.size = processes.size;
  meeting.job = processes.job;
  meeting.address = processes.address;
  meeting.start_s = processes.start_s;
  Result<std::unique_ptr<Bootstrap>> bootstrap = Bootstrap::create(meeting);
  if (!bootstrap.ok()) return bootstrap.error();
  std::unique_ptr<ProcessGroup> group(new ProcessGroup(options, std::move(bootstrap).value()));
  const std::string network =
      processes.network == "libfabric" ? fmt::format("libfabric's {}", processes.provider) : processes.network;
  const std::string asked = fmt::format("a world of {} nodes with {} GPUs each over {}, by mKernel {}", options.nodes,
                                        options.gpus, network, MKERNEL_VERSION);
  if (Status status = group->agree("create a world", asked); !status.ok()) return status.error();
  if (Status status = group->learn_hosts(); !status.ok()) return status.error();
  if (options.gpus > 1) {
    if (Status status = group->share_bells(); !status.ok()) return status.error();
  }
  if (options.nodes > 1) {
    if (Status status = group->open_endpoint(options); !status.ok()) return status.error();
  }
  return group;
}

Status ProcessGroup::open_endpoint(const WorldOptions& options) {
  NetworkPlace place;
  place.rank = rank_;
  place.size = options.processes.size;
  place.local_address = bootstrap_->local_address();
  place.local_count =
      static_cast<int>(std::count(hosts_.begin(), hosts_.end(), hosts_[static_cast<std::size_t>(rank_)]));
  place.local_index = local_index();
  if (options.device == Device::kCuda) {
    Result<std::vector<std::string>> gpus = learn_gpus();
    if (!gpus.ok()) return gpus.error();
    place.local_gpus = std::move(gpus).value();
  }
  // Puts go along the rail only.
  for (std::int32_t node = 0; node < topo_.nodes; ++node) {
    const std::int32_t peer = topo_.rank_of(node, topo_.gpu_of(rank_));
    if (peer != rank_) place.peers.push_back(peer);
  }
  Result<std::unique_ptr<ProcessEndpoint>> endpoint =
      open_network(options.processes, place, [](const char* name) { return std::getenv(name); });
  const Status opened = endpoint.ok() ? Status(Ok{}) : Status(endpoint.error());
  if (Status status = confirm("open its endpoint", opened); !status.ok()) return status;
  endpoint_ = std::move(endpoint).value();
  Result<std::vector<std::string>> addresses = exchange_long("tell its address", endpoint_->address());
  if (!addresses.ok()) return addresses.error();
  Status connected = Ok{};
  for (const std::int32_t peer : place.peers) {
    if (connected.ok()) connected = endpoint_->connect(peer, (*addresses)[static_cast<std::size_t>(peer)]);
  }
  return confirm("take the addresses", connected);
}

Result<std::vector<std::string>> ProcessGroup::exchange_long(const std::string& what, const std::string& text) {
  constexpr std::size_t kPart = Bootstrap::kMaxTextBytes;
  const auto lengths = gather(what, {static_cast<std::int64_t>(text.size())});
  if (!lengths.ok()) return lengths.error();
  std::size_t longest = 1;
  for (const auto& length : *lengths) longest = std::max(longest, static_cast<std::size_t>(length[0]));
  if (longest > kMaxLongText) {
    return Error{ErrorKind::kAborted, fmt::format("a rank wants to send {} bytes to {}", longest, what)};
  }
  std::vector<std::string> whole(lengths->size());
  for (std::size_t at = 0; at < longest; at += kPart) {
    const std::string part = text.substr(std::min(at, text.size()), kPart);
    const Result<std::vector<std::string>> parts = bootstrap_->exchange(what, part, deadline_s_);
    if (!parts.ok()) return parts.error();
    for (std::size_t rank = 0; rank < whole.size(); ++rank) whole[rank] += (*parts)[rank];
  }
  return whole;
}

int ProcessGroup::local_index() const {
  return static_cast<int>(std::count(hosts_.begin(), hosts_.begin() + rank_, hosts_[static_cast<std::size_t>(rank_)]));
}

Status ProcessGroup::learn_hosts() {
  Result<std::vector<std::string>> hosts = bootstrap_->exchange("name its host", host_identity(), deadline_s_);
  if (!hosts.ok()) return hosts.error();
  hosts_ = std::move(hosts).value();
  return Ok{};
}

Result<std::vector<std::string>> ProcessGroup::learn_gpus() {
  // As the executor chooses: processes of a host take its GPUs in turn.
  const std::vector<std::string> mine = gpu_bus_ids();
  const std::string own = mine.empty() ? "" : mine[static_cast<std::size_t>(local_index()) % mine.size()];
  const Result<std::vector<std::string>> all = bootstrap_->exchange("name its GPU", own, deadline_s_);
  if (!all.ok()) return all.error();
  std::vector<std::string> local;
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    if (hosts_[rank] == hosts_[static_cast<std::size_t>(rank_)]) local.push_back((*all)[rank]);
  }
  return local;
}

Status ProcessGroup::share_bells() {
  // Ranks that share memory must be where they can.
  for (std::int32_t rank = 0; rank < topo_.world(); ++rank) {
    const std::int32_t first = topo_.rank_of(topo_.node_of(rank), 0);
    if (hosts_[static_cast<std::size_t>(rank)] == hosts_[static_cast<std::size_t>(first)]) continue;
    return bad_argument(
        fmt::format("gpus is {}, so ranks {} and {} are one node and share memory, but rank {} runs on {} "
                    "and rank {} on {}: take gpus 1, or as many as the launcher starts on a host",
                    topo_.gpus, first, rank, first, hosts_[static_cast<std::size_t>(first)], rank,
                    hosts_[static_cast<std::size_t>(rank)]));
  }
  Result<std::vector<SharedBlock>> blocks =
      share_memory("share the bells", static_cast<std::int64_t>(sizeof(NodeBell)) * topo_.gpus);
  if (!blocks.ok()) return blocks.error();
  bells_ = std::move((*blocks)[static_cast<std::size_t>(topo_.rank_of(topo_.node_of(rank_), 0))]);
  return Ok{};
}

Result<std::vector<SharedBlock>> ProcessGroup::share_memory(const std::string& what, std::int64_t bytes) {
  std::vector<SharedBlock> blocks(static_cast<std::size_t>(topo_.world()));
  Result<SharedBlock> own = SharedBlock::create(bytes);
  if (Status status = confirm(what + ": take memory", own.ok() ? Status(Ok{}) : Status(own.error())); !status.ok()) {
    return status.error();
  }
  SharedBlock& mine = blocks[static_cast<std::size_t>(rank_)];
  mine = std::move(own).value();
  const Result<std::vector<std::string>> tickets = bootstrap_->exchange(what, mine.ticket(), deadline_s_);
  if (!tickets.ok()) return tickets.error();
  Status opened = Ok{};
  for (std::int32_t gpu = 0; opened.ok() && gpu < topo_.gpus; ++gpu) {
    const auto rank = static_cast<std::size_t>(topo_.rank_of(topo_.node_of(rank_), gpu));
    if (static_cast<std::int32_t>(rank) == rank_) continue;
    Result<SharedBlock> block = SharedBlock::open((*tickets)[rank]);
    if (block.ok()) {
      blocks[rank] = std::move(block).value();
    } else {
      opened = block.error();
    }
  }
  if (Status status = confirm(what + ": map it", opened); !status.ok()) return status.error();
  for (SharedBlock& block : blocks) block.close_ticket();
  return blocks;
}

Result<std::vector<SharedFile>> ProcessGroup::share_file(const std::string& what, const Status& made, int file,
                                                         std::int64_t bytes) {
  Result<FileExchange> exchange = FileExchange::open();
  Status ready = made;
  if (ready.ok() && !exchange.ok()) ready = exchange.error();
  if (Status status = confirm(what + ": have it", ready); !status.ok()) return status.error();
  const Result<std::vector<std::string>> all = bootstrap_->exchange(what, exchange->address(), deadline_s_);
  if (!all.ok()) return all.error();
  const auto first = all->begin() + topo_.rank_of(topo_.node_of(rank_), 0);
  const auto own = static_cast<std::size_t>(topo_.gpu_of(rank_));
  Result<std::vector<SharedFile>> files = exchange->swap({first, first + topo_.gpus}, own, file, bytes, deadline_s_);
  const Status swapped = files.ok() ? Status(Ok{}) : Status(files.error());
  if (Status status = confirm(what + ": swap it", swapped); !status.ok()) return status.error();
  return files;
}

Status ProcessGroup::confirm(const std::string& what, const Status& status) {
  PacketWriter mine;
  mine.number(status.ok() ? 0 : 1 + static_cast<std::uint32_t>(status.error().kind));
  mine.text(status.ok() ? "" : status.error().message.substr(0, Bootstrap::kMaxTextBytes / 2));
  const Result<std::vector<std::string>> texts = bootstrap_->exchange(what, mine.bytes(), deadline_s_);
  if (!status.ok()) return status;
  if (!texts.ok()) return texts.error();
  for (std::size_t rank = 0; rank < texts->size(); ++rank) {
    PacketReader reader((*texts)[rank]);
    const std::uint32_t kind = reader.number();
    const std::string message = reader.text();
    if (kind == 0 && reader.complete()) continue;
    if (kind > 1 + static_cast<std::uint32_t>(ErrorKind::kUnsupported) || !reader.complete()) {
      return Error{ErrorKind::kAborted, fmt::format("rank {} sent something else than it should to {}", rank, what)};
    }
    return Error{static_cast<ErrorKind>(kind - 1), fmt::format("rank {}: {}", rank, message)};
  }
  return Ok{};
}

Status ProcessGroup::agree(const std::string& what, const std::string& text) {
  const Result<std::vector<std::string>> texts = bootstrap_->exchange(what, text, deadline_s_);
  if (!texts.ok()) return texts.error();
  const auto [rank, other] = find_different(*texts);
  if (rank < 0) return Ok{};
  return bad_argument(fmt::format("rank {} asks for {}, but rank {} for {}: all ranks must ask for the same", rank,
                                  (*texts)[static_cast<std::size_t>(rank)], other,
                                  (*texts)[static_cast<std::size_t>(other)]));
}

Status ProcessGroup::share_heap(std::uint32_t op, void* data, std::int64_t bytes, std::uint64_t start_epoch) {
  if (endpoint_ == nullptr) return confirm(fmt::format("begin operator {}", op), Ok{});
  const Result<RemoteHeap> mine = endpoint_->add_heap(op, {data, bytes}, start_epoch);
  if (Status status = confirm(fmt::format("register the workspace of operator {}", op),
                              mine.ok() ? Status(Ok{}) : Status(mine.error()));
      !status.ok()) {
    return status;
  }
  const std::string what = fmt::format("share the workspace of operator {}", op);
  const Result<std::vector<std::string>> all = bootstrap_->exchange(what, heap_bytes(*mine), deadline_s_);
  if (!all.ok()) return all.error();
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    RemoteHeap heap;
    if (!read_heap((*all)[rank], heap)) {
      const Error error{ErrorKind::kAborted,
                        fmt::format("rank {} sent something else than it should to {}", rank, what)};
      bootstrap_->tell_failure(error);
      return error;
    }
    endpoint_->set_remote(op, static_cast<std::int32_t>(rank), heap);
  }
  return Ok{};
}

Result<std::vector<std::vector<std::int64_t>>> ProcessGroup::gather(const std::string& what,
                                                                    const std::vector<std::int64_t>& mine) {
  PacketWriter writer;
  for (const std::int64_t value : mine) {
    writer.number(static_cast<std::uint32_t>(value)).number(static_cast<std::uint32_t>(value >> 32));
  }
  const Result<std::vector<std::string>> texts = bootstrap_->exchange(what, writer.bytes(), deadline_s_);
  if (!texts.ok()) return texts.error();
  std::vector<std::vector<std::int64_t>> all;
  for (std::size_t rank = 0; rank < texts->size(); ++rank) {
    PacketReader reader((*texts)[rank]);
    std::vector<std::int64_t>& values = all.emplace_back();
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const std::uint64_t low = reader.number();
      values.push_back(static_cast<std::int64_t>(low | std::uint64_t{reader.number()} << 32));
    }
    if (!reader.complete()) {
      const Error error{ErrorKind::kAborted,
                        fmt::format("rank {} sent something else than it should to {}", rank, what)};
      bootstrap_->tell_failure(error);
      return error;
    }
  }
  return all;
}

}  // namespace mkernel
