// AWS EFA: one SRD queue pair reaches all peers, by address handle and number. Delivery is reliable and has no order,
// which the counted mode of VerbsEndpoint does not ask for. This file has been compiled only: no EFA was at hand.
#include <dlfcn.h>
#include <endian.h>
#include <fmt/format.h>
#include <infiniband/efadv.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "net/verbs/address_bytes.h"
#include "net/verbs/queue_pairs.h"

namespace mkernel {
namespace {

constexpr const char* kFile = "libefa.so.1";
constexpr std::uint32_t kAddressMagic = 0x3153526d;  // "mRS1"
constexpr std::uint32_t kQueueKey = 0x6d4b5253;      // any number that all ranks share
// EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE of rdma-core 48 and later; Debian 12's header is older.
constexpr std::uint32_t kCanWrite = 1u << 3;

struct EfaLibrary {
  decltype(&efadv_create_qp_ex) create_qp_ex = nullptr;
  decltype(&efadv_query_device) query_device = nullptr;
};

const EfaLibrary& efa_library() {
  static const EfaLibrary library = [] {
    EfaLibrary loaded;
    void* handle = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return loaded;
    loaded.create_qp_ex = reinterpret_cast<decltype(loaded.create_qp_ex)>(dlsym(handle, "efadv_create_qp_ex"));
    loaded.query_device = reinterpret_cast<decltype(loaded.query_device)>(dlsym(handle, "efadv_query_device"));
    return loaded;
  }();
  return library;
}

struct EfaAddress {
  std::uint32_t magic = kAddressMagic;
  std::uint32_t mode = 0;
  std::uint32_t number = 0;
  std::array<std::uint8_t, 16> gid = {};
};

class EfaQueuePairs final : public QueuePairs {
 public:
  explicit EfaQueuePairs(const QueuePairsConfig& config) : config_(config), peers_(config.peers.size()) {}
  Status create();

  std::string address() const override;
  Status connect(int slot, std::int32_t rank, std::string_view address) override;
  int post(int slot, int lane, std::span<const WriteRequest> requests, std::size_t& accepted) override;
  int post_receives(int count) override;
  std::int32_t peer_of(const ibv_wc&) const override { return -1; }
  std::int64_t max_copied() const override { return 0; }
  std::int64_t max_message() const override { return max_message_; }
  int send_depth() const override { return config_.send_depth; }
  int max_in_flight() const override { return config_.send_depth; }
  bool ordered() const override { return false; }

 private:
  struct Peer {
    VerbsObject<ibv_ah> handle{nullptr};
    std::uint32_t number = 0;
  };

  const VerbsLibrary& library() const { return *config_.device->library; }

  QueuePairsConfig config_;
  std::int64_t max_message_ = 0;
  std::array<std::byte, 64> landing_ = {};  // receives must name memory; writes with an immediate leave it alone
  VerbsObject<ibv_mr> landing_region_{nullptr};
  std::vector<Peer> peers_;  // by slot
  VerbsObject<ibv_qp> pair_{nullptr};
};

Status EfaQueuePairs::create() {
  const VerbsDevice& device = *config_.device;
  if (std::string obstacle = efa_device_obstacle(device); !obstacle.empty()) {
    return Error{ErrorKind::kUnsupported, std::move(obstacle)};
  }
  efadv_device_attr limits = {};
  const EfaLibrary& efa = efa_library();
  efa.query_device(device.context.get(), &limits, sizeof limits);
  max_message_ = limits.max_rdma_size;
  config_.send_depth = std::min(config_.send_depth, static_cast<int>(limits.max_sq_wr));
  config_.receive_depth = std::min(config_.receive_depth, static_cast<int>(limits.max_rq_wr));

  ibv_mr* region = library().reg_mr(device.domain.get(), landing_.data(), landing_.size(), IBV_ACCESS_LOCAL_WRITE);
  if (region == nullptr) return device.error("ibv_reg_mr", errno);
  landing_region_ = {region, {library().dereg_mr}};
  ibv_qp_init_attr_ex wanted = {};
  wanted.send_cq = config_.send_completions;
  wanted.recv_cq = config_.receive_completions;
  wanted.qp_type = IBV_QPT_DRIVER;
  wanted.cap.max_send_wr = static_cast<std::uint32_t>(config_.send_depth);
  wanted.cap.max_recv_wr = static_cast<std::uint32_t>(config_.receive_depth);
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  wanted.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  wanted.pd = device.domain.get();
  wanted.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  efadv_qp_init_attr kind = {};
  kind.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
  ibv_qp* pair = efa.create_qp_ex(device.context.get(), &wanted, &kind, sizeof kind);
  if (pair == nullptr) return device.error("efadv_create_qp_ex", errno);
  pair_ = {pair, {library().destroy_qp}};

  ibv_qp_attr change = {};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = static_cast<std::uint8_t>(device.nic.port);
  change.qkey = kQueueKey;
  int code = library().modify_qp(pair, &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  if (code != 0) return device.error("ibv_modify_qp to INIT", code);
  change.qp_state = IBV_QPS_RTR;
  if ((code = library().modify_qp(pair, &change, IBV_QP_STATE)) != 0) return device.error("ibv_modify_qp to RTR", code);
  change.qp_state = IBV_QPS_RTS;
  code = library().modify_qp(pair, &change, IBV_QP_STATE | IBV_QP_SQ_PSN);
  if (code != 0) return device.error("ibv_modify_qp to RTS", code);
  return Ok{};
}

std::string EfaQueuePairs::address() const {
  EfaAddress address;
  address.mode = config_.mode;
  address.number = pair_->qp_num;
  std::copy(std::begin(config_.device->gid.raw), std::end(config_.device->gid.raw), address.gid.begin());
  std::string bytes;
  append_bytes(bytes, address);
  return bytes;
}

Status EfaQueuePairs::connect(int slot, std::int32_t rank, std::string_view bytes) {
  const VerbsDevice& device = *config_.device;
  EfaAddress address;
  if (!take_bytes(bytes, address) || address.magic != kAddressMagic) {
    return Error{ErrorKind::kIo, fmt::format("rank {} sent no address of EFA: does it use another transport?", rank)};
  }
  if (address.mode != config_.mode) {
    return bad_argument(
        fmt::format("rank {} uses EFA in mode {}, and rank {} in mode {}: all ranks must have the same "
                    "settings",
                    rank, address.mode, config_.rank, config_.mode));
  }
  ibv_ah_attr where = {};
  where.port_num = static_cast<std::uint8_t>(device.nic.port);
  where.is_global = 1;
  std::copy(address.gid.begin(), address.gid.end(), where.grh.dgid.raw);
  ibv_ah* handle = library().create_ah(device.domain.get(), &where);
  if (handle == nullptr) return device.error("ibv_create_ah", errno);
  Peer& peer = peers_[static_cast<std::size_t>(slot)];
  peer.handle = {handle, {library().destroy_ah}};
  peer.number = address.number;
  return Ok{};
}

int EfaQueuePairs::post(int slot, int /*lane*/, std::span<const WriteRequest> requests, std::size_t& accepted) {
  accepted = 0;
  const Peer& peer = peers_[static_cast<std::size_t>(slot)];
  ibv_qp_ex* pair = library().qp_to_qp_ex(pair_.get());
  ibv_wr_start(pair);
  for (const WriteRequest& request : requests) {
    pair->wr_id = request.id;
    pair->wr_flags = IBV_SEND_SIGNALED;
    if (request.has_immediate) {
      ibv_wr_rdma_write_imm(pair, request.destination_key, request.destination, htobe32(request.immediate));
    } else {
      ibv_wr_rdma_write(pair, request.destination_key, request.destination);
    }
    ibv_wr_set_sge(pair, request.source_key, reinterpret_cast<std::uint64_t>(request.source), request.bytes);
    ibv_wr_set_ud_addr(pair, peer.handle.get(), peer.number, kQueueKey);
  }
  const int code = ibv_wr_complete(pair);  // all or nothing
  if (code == 0) accepted = requests.size();
  return code;
}

int EfaQueuePairs::post_receives(int count) {
  ibv_sge landing = {reinterpret_cast<std::uint64_t>(landing_.data()), static_cast<std::uint32_t>(landing_.size()),
                     landing_region_->lkey};
  for (int i = 0; i < count; ++i) {
    ibv_recv_wr receive = {};
    receive.sg_list = &landing;
    receive.num_sge = 1;
    ibv_recv_wr* refused = nullptr;
    if (ibv_post_recv(pair_.get(), &receive, &refused) != 0) return i;
  }
  return count;
}

}  // namespace

std::string efa_device_obstacle(const VerbsDevice& device) {
  const EfaLibrary& efa = efa_library();
  if (efa.create_qp_ex == nullptr || efa.query_device == nullptr || device.library->qp_to_qp_ex == nullptr) {
    return fmt::format("{} is not here or too old: install ibverbs-providers (Debian)", kFile);
  }
  efadv_device_attr limits = {};
  if (efa.query_device(device.context.get(), &limits, sizeof limits) != 0) return device.nic.name() + " is no EFA";
  if ((limits.device_caps & kCanWrite) == 0 || limits.max_rdma_size == 0) {
    return device.nic.name() + " cannot do remote writes: the first EFA that does is that of p5 instances";
  }
  return "";
}

Result<std::unique_ptr<QueuePairs>> create_efa_queue_pairs(const QueuePairsConfig& config) {
  auto pairs = std::make_unique<EfaQueuePairs>(config);
  if (Status status = pairs->create(); !status.ok()) return status.error();
  return std::unique_ptr<QueuePairs>(std::move(pairs));
}

}  // namespace mkernel
