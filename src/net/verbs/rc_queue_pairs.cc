#include <endian.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "net/verbs/address_bytes.h"
#include "net/verbs/queue_pairs.h"

namespace mkernel {
namespace {

constexpr std::uint32_t kAddressMagic = 0x3143526d;  // "mRC1"
constexpr std::uint32_t kInlineBytes = 64;           // a stamp has 4; more would make every request of mlx5 longer
constexpr std::uint8_t kNotReadyTimer = 1;           // 0.01 ms: a receiver makes room within microseconds
constexpr std::uint8_t kRetryNotReady = 7;  // for ever: a receiver that is late is not lost; deadlines are ours
constexpr std::uint8_t kHopLimit = 64;

struct RcHeader {
  std::uint32_t magic = kAddressMagic;
  std::uint32_t mode = 0;
  std::uint16_t lid = 0;
  std::uint16_t count = 0;  // of peers
  std::uint8_t lanes = 0;
  std::uint8_t mtu = 0;
  std::uint8_t ethernet = 0;
  std::uint8_t unused = 0;
  std::array<std::uint8_t, 16> gid = {};
};

// Both sides know a queue pair's number, so its first packet number need not be told.
std::uint32_t first_packet_of(std::uint32_t queue_pair) { return queue_pair * 0x9e3779b1u >> 8; }

class RcQueuePairs final : public QueuePairs {
 public:
  explicit RcQueuePairs(const QueuePairsConfig& config) : config_(config) {}
  Status create();

  std::string address() const override;
  Status connect(int slot, std::int32_t rank, std::string_view address) override;
  int post(int slot, int lane, std::span<const WriteRequest> requests, std::size_t& accepted) override;
  int post_receives(int count) override;
  std::int32_t peer_of(const ibv_wc& completion) const override;
  std::int64_t max_message() const override { return config_.device->port.max_msg_sz; }
  std::int64_t max_copied() const override { return kInlineBytes; }
  int send_depth() const override { return config_.send_depth; }
  int max_in_flight() const override { return config_.send_depth * static_cast<int>(pairs_.size()); }
  bool ordered() const override { return true; }

 private:
  static constexpr int kMaxBatch = 64;

  const VerbsLibrary& library() const { return *config_.device->library; }
  Status create_pair();
  Status to_ready(ibv_qp* pair, const RcHeader& peer, std::uint32_t peer_pair);

  QueuePairsConfig config_;
  VerbsObject<ibv_srq> receives_{nullptr};
  std::vector<VerbsObject<ibv_qp>> pairs_;                     // slot * lanes + lane
  std::vector<std::pair<std::uint32_t, std::int32_t>> peers_;  // number of our queue pair, rank; sorted
  std::array<ibv_recv_wr, kMaxBatch> empty_receives_ = {};     // a chain of receives without memory
};

Status RcQueuePairs::create() {
  const VerbsDevice& device = *config_.device;
  config_.send_depth = std::min(config_.send_depth, device.attributes.max_qp_wr);
  config_.receive_depth = std::min(config_.receive_depth, device.attributes.max_srq_wr);
  if (device.attributes.max_srq < 1 || config_.receive_depth < 1) {
    return Error{ErrorKind::kUnsupported, device.nic.name() + " has no shared receive queues"};
  }
  ibv_srq_init_attr queue = {};
  queue.attr.max_wr = static_cast<std::uint32_t>(config_.receive_depth);
  queue.attr.max_sge = 1;
  ibv_srq* receives = library().create_srq(device.domain.get(), &queue);
  if (receives == nullptr) return device.error("ibv_create_srq", errno);
  receives_ = {receives, {library().destroy_srq}};
  for (std::size_t i = 0; i < config_.peers.size() * static_cast<std::size_t>(config_.lanes); ++i) {
    if (Status status = create_pair(); !status.ok()) return status;
    peers_.emplace_back(pairs_.back()->qp_num, config_.peers[i / static_cast<std::size_t>(config_.lanes)]);
  }
  std::sort(peers_.begin(), peers_.end());
  return Ok{};
}

Status RcQueuePairs::create_pair() {
  const VerbsDevice& device = *config_.device;
  ibv_qp_init_attr wanted = {};
  wanted.send_cq = config_.send_completions;
  wanted.recv_cq = config_.receive_completions;
  wanted.srq = receives_.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = static_cast<std::uint32_t>(config_.send_depth);
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_inline_data = kInlineBytes;
  ibv_qp* pair = library().create_qp(device.domain.get(), &wanted);
  if (pair == nullptr) return device.error("ibv_create_qp", errno);
  pairs_.push_back({pair, {library().destroy_qp}});
  ibv_qp_attr change = {};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = static_cast<std::uint8_t>(device.nic.port);
  change.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  const int code =
      library().modify_qp(pair, &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (code != 0) return device.error("ibv_modify_qp to INIT", code);
  return Ok{};
}

std::string RcQueuePairs::address() const {
  const VerbsDevice& device = *config_.device;
  RcHeader header;
  header.mode = config_.mode;
  header.lid = device.port.lid;
  header.count = static_cast<std::uint16_t>(config_.peers.size());
  header.lanes = static_cast<std::uint8_t>(config_.lanes);
  header.mtu = static_cast<std::uint8_t>(device.port.active_mtu);
  header.ethernet = device.port.link_layer == IBV_LINK_LAYER_ETHERNET;
  std::copy(std::begin(device.gid.raw), std::end(device.gid.raw), header.gid.begin());
  std::string bytes;
  append_bytes(bytes, header);
  for (std::size_t slot = 0; slot < config_.peers.size(); ++slot) {
    append_bytes(bytes, config_.peers[slot]);
    for (int lane = 0; lane < config_.lanes; ++lane) {
      append_bytes(bytes,
                   pairs_[slot * static_cast<std::size_t>(config_.lanes) + static_cast<std::size_t>(lane)]->qp_num);
    }
  }
  return bytes;
}

Status RcQueuePairs::connect(int slot, std::int32_t rank, std::string_view address) {
  RcHeader peer;
  if (!take_bytes(address, peer) || peer.magic != kAddressMagic) {
    return Error{ErrorKind::kIo, fmt::format("rank {} sent no address of verbs: does it use another transport?", rank)};
  }
  if (peer.lanes != config_.lanes || peer.mode != config_.mode) {
    return bad_argument(
        fmt::format("rank {} uses {} queue pairs per peer in mode {}, and rank {} uses {} in mode {}: "
                    "all ranks must have the same settings of verbs",
                    rank, peer.lanes, peer.mode, config_.rank, config_.lanes, config_.mode));
  }
  const bool ethernet = config_.device->port.link_layer == IBV_LINK_LAYER_ETHERNET;
  if ((peer.ethernet != 0) != ethernet) {
    return bad_argument(fmt::format("rank {} has an {} port and rank {} an {} one ({}): MKERNEL_IB_HCA chooses", rank,
                                    peer.ethernet != 0 ? "Ethernet" : "InfiniBand", config_.rank,
                                    ethernet ? "Ethernet" : "InfiniBand", config_.device->nic.name()));
  }
  for (int i = 0; i < peer.count; ++i) {
    std::int32_t for_rank = -1;
    std::array<std::uint32_t, 256> numbers = {};
    bool whole = take_bytes(address, for_rank);
    for (int lane = 0; whole && lane < config_.lanes; ++lane) {
      whole = take_bytes(address, numbers[static_cast<std::size_t>(lane)]);
    }
    if (!whole) break;
    if (for_rank != config_.rank) continue;
    for (int lane = 0; lane < config_.lanes; ++lane) {
      ibv_qp* pair = pairs_[static_cast<std::size_t>(slot) * static_cast<std::size_t>(config_.lanes) +
                            static_cast<std::size_t>(lane)]
                         .get();
      if (Status status = to_ready(pair, peer, numbers[static_cast<std::size_t>(lane)]); !status.ok()) {
        return Error{status.error().kind, fmt::format("connecting to rank {}: {}", rank, status.error().message)};
      }
    }
    return Ok{};
  }
  return Error{ErrorKind::kIo, fmt::format("rank {} has no queue pair for rank {}", rank, config_.rank)};
}

// Ready to receive, then ready to send.
Status RcQueuePairs::to_ready(ibv_qp* pair, const RcHeader& peer, std::uint32_t peer_pair) {
  const VerbsDevice& device = *config_.device;
  ibv_qp_attr change = {};
  change.qp_state = IBV_QPS_RTR;
  change.path_mtu = static_cast<ibv_mtu>(std::min<int>(device.port.active_mtu, peer.mtu));
  change.dest_qp_num = peer_pair;
  change.rq_psn = first_packet_of(peer_pair);
  change.max_dest_rd_atomic = 1;
  change.min_rnr_timer = kNotReadyTimer;
  change.ah_attr.port_num = static_cast<std::uint8_t>(device.nic.port);
  change.ah_attr.sl = static_cast<std::uint8_t>(config_.service_level);
  change.ah_attr.dlid = peer.lid;
  // InfiniBand within a subnet goes by local identifiers; all else by GIDs.
  if (peer.ethernet != 0 || peer.lid == 0) {
    change.ah_attr.is_global = 1;
    std::copy(peer.gid.begin(), peer.gid.end(), change.ah_attr.grh.dgid.raw);
    change.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device.gid_index);
    change.ah_attr.grh.hop_limit = kHopLimit;
    change.ah_attr.grh.traffic_class = static_cast<std::uint8_t>(config_.traffic_class);
  }
  int code = library().modify_qp(pair, &change,
                                 IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (code != 0) return device.error("ibv_modify_qp to RTR", code);
  change = {};
  change.qp_state = IBV_QPS_RTS;
  change.sq_psn = first_packet_of(pair->qp_num);
  change.timeout = static_cast<std::uint8_t>(config_.timeout);
  change.retry_cnt = static_cast<std::uint8_t>(config_.retry_count);
  change.rnr_retry = kRetryNotReady;
  change.max_rd_atomic = 1;
  code = library().modify_qp(
      pair, &change,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (code != 0) return device.error("ibv_modify_qp to RTS", code);
  return Ok{};
}

int RcQueuePairs::post(int slot, int lane, std::span<const WriteRequest> requests, std::size_t& accepted) {
  accepted = 0;
  MK_CHECK_OP(requests.size(), <=, static_cast<std::size_t>(kMaxBatch));
  if (requests.empty()) return 0;
  std::array<ibv_send_wr, kMaxBatch> chain;
  std::array<ibv_sge, kMaxBatch> sources;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const WriteRequest& request = requests[i];
    sources[i] = {reinterpret_cast<std::uint64_t>(request.source), request.bytes, request.source_key};
    ibv_send_wr& write = chain[i];
    write = {};
    write.wr_id = request.id;
    write.next = i + 1 < requests.size() ? &chain[i + 1] : nullptr;
    write.sg_list = &sources[i];
    write.num_sge = request.bytes > 0 ? 1 : 0;
    write.opcode = request.has_immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    if (request.signaled) write.send_flags |= IBV_SEND_SIGNALED;
    if (request.copied) write.send_flags |= IBV_SEND_INLINE;
    write.imm_data = htobe32(request.immediate);
    write.wr.rdma.remote_addr = request.destination;
    write.wr.rdma.rkey = request.destination_key;
  }
  ibv_qp* pair =
      pairs_[static_cast<std::size_t>(slot) * static_cast<std::size_t>(config_.lanes) + static_cast<std::size_t>(lane)]
          .get();
  ibv_send_wr* refused = nullptr;
  const int code = ibv_post_send(pair, chain.data(), &refused);
  accepted = code == 0 ? requests.size() : static_cast<std::size_t>(refused - chain.data());
  return code;
}

int RcQueuePairs::post_receives(int count) {
  int done = 0;
  while (done < count) {
    const int batch = std::min(count - done, kMaxBatch);
    for (int i = 0; i < batch; ++i) {
      empty_receives_[static_cast<std::size_t>(i)].next =
          i + 1 < batch ? &empty_receives_[static_cast<std::size_t>(i) + 1] : nullptr;
    }
    ibv_recv_wr* refused = nullptr;
    if (ibv_post_srq_recv(receives_.get(), empty_receives_.data(), &refused) != 0) {
      return done + static_cast<int>(refused - empty_receives_.data());
    }
    done += batch;
  }
  return done;
}

std::int32_t RcQueuePairs::peer_of(const ibv_wc& completion) const {
  const auto at = std::lower_bound(peers_.begin(), peers_.end(), std::pair(completion.qp_num, std::int32_t{-1}));
  return at != peers_.end() && at->first == completion.qp_num ? at->second : -1;
}

}  // namespace

Result<std::unique_ptr<QueuePairs>> create_rc_queue_pairs(const QueuePairsConfig& config) {
  MK_CHECK(config.lanes >= 1 && config.lanes <= 255 && config.send_depth >= 1);
  auto pairs = std::make_unique<RcQueuePairs>(config);
  if (Status status = pairs->create(); !status.ok()) return status.error();
  return std::unique_ptr<QueuePairs>(std::move(pairs));
}

}  // namespace mkernel
