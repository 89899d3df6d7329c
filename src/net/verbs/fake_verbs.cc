#include "net/verbs/fake_verbs.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "base/check.h"

namespace mkernel {
namespace {

constexpr std::uint32_t kMaxMessage = 1 << 20;  // small, so that tests see puts cut

struct FakeQueue : ibv_cq {
  std::deque<ibv_wc> entries;
};
struct FakeReceives : ibv_srq {
  std::uint32_t depth = 0;
  std::uint32_t posted = 0;
};
struct FakeRegion : ibv_mr {
  int access = 0;
};
struct Write {
  ibv_send_wr request;
  std::uint64_t source = 0;
  std::uint32_t bytes = 0;
  std::uint32_t source_key = 0;
  std::vector<std::byte> copied;  // inline
};
struct FakePair : ibv_qp {
  std::deque<Write> queue;
  std::uint32_t depth = 0;
  std::uint32_t taken = 0;            // places of the send queue, given back when a completion is polled
  std::deque<std::uint32_t> retires;  // by completion not yet polled: places that it gives back
  std::uint32_t unsignaled = 0;       // writes done since the last completion
  std::uint32_t remote = 0;           // number of the other side
  std::mutex poster;
};

// All devices are one: what they share, under one lock.
struct Fake {
  std::mutex mutex;
  std::map<std::uint32_t, FakePair*> pairs;
  std::map<std::uint32_t, FakeRegion*> regions;
  std::uint32_t next_number = 100;
  std::int64_t objects = 0;
  std::int64_t posts = 0;
  std::int64_t writes = 0;
  FakeVerbsFaults faults;
  FakeVerbsCounts counts;
  std::minstd_rand engine{1};
};
Fake& fake() {
  static Fake instance;
  return instance;
}

// Makes something, unless that is to fail.
template <class T>
T* make(const char* what) {
  std::lock_guard lock(fake().mutex);
  const int code = fake().faults.create ? fake().faults.create(what) : 0;
  if (code != 0) {
    errno = code;
    return nullptr;
  }
  ++fake().objects;
  return new T{};
}
template <class T>
int destroy(T* object) {
  std::lock_guard lock(fake().mutex);
  --fake().objects;
  delete object;
  return 0;
}

FakePair* pair_of(ibv_qp* pair) { return static_cast<FakePair*>(pair); }

void finish_write(FakePair& pair, const ibv_send_wr& request, ibv_wc_status status) {
  ++pair.unsignaled;
  if ((request.send_flags & IBV_SEND_SIGNALED) == 0 && status == IBV_WC_SUCCESS) return;
  ibv_wc completion = {};
  completion.wr_id = request.wr_id;
  completion.status = status;
  completion.opcode = IBV_WC_RDMA_WRITE;
  completion.qp_num = pair.qp_num;
  auto& queue = *static_cast<FakeQueue*>(pair.send_cq);
  queue.entries.push_back(completion);
  MK_CHECK_OP(queue.entries.size(), <=, static_cast<std::size_t>(queue.cqe));
  pair.retires.push_back(pair.unsignaled);
  pair.unsignaled = 0;
}

FakeRegion* find_region(std::uint32_t key, std::uint64_t address, std::uint32_t bytes, int access) {
  const auto at = fake().regions.find(key);
  if (at == fake().regions.end() || (at->second->access & access) != access) return nullptr;
  const auto begin = reinterpret_cast<std::uint64_t>(at->second->addr);
  return address >= begin && address + bytes <= begin + at->second->length ? at->second : nullptr;
}

// Carries out the first write of a pair; false when it has none, or the receiver is not ready.
bool carry(FakePair& pair) {
  if (pair.queue.empty()) return false;
  Write& write = pair.queue.front();
  const ibv_send_wr& request = write.request;
  ibv_wc_status status = pair.state == IBV_QPS_ERR ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
  const auto remote = fake().pairs.find(pair.remote);
  if (status == IBV_WC_SUCCESS) {
    const bool immediate = request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    if (remote != fake().pairs.end() && immediate && static_cast<FakeReceives*>(remote->second->srq)->posted == 0) {
      return false;
    }
    ++fake().counts.writes;
    status = fake().faults.write ? fake().faults.write(++fake().writes) : IBV_WC_SUCCESS;
    if (status == IBV_WC_SUCCESS && remote == fake().pairs.end()) status = IBV_WC_RETRY_EXC_ERR;
    const bool has_source =
        !write.copied.empty() || write.bytes == 0 || find_region(write.source_key, write.source, write.bytes, 0);
    MK_CHECK(has_source);
    if (status == IBV_WC_SUCCESS && write.bytes > 0 &&
        find_region(request.wr.rdma.rkey, request.wr.rdma.remote_addr, write.bytes, IBV_ACCESS_REMOTE_WRITE) ==
            nullptr) {
      status = IBV_WC_REM_ACCESS_ERR;
    }
    if (status == IBV_WC_SUCCESS) {
      const void* source = write.copied.empty() ? reinterpret_cast<const void*>(write.source) : write.copied.data();
      if (write.bytes > 0) std::memcpy(reinterpret_cast<void*>(request.wr.rdma.remote_addr), source, write.bytes);
      if (immediate) {
        FakePair& to = *remote->second;
        --static_cast<FakeReceives*>(to.srq)->posted;
        ibv_wc arrival = {};
        arrival.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        arrival.imm_data = request.imm_data;
        arrival.qp_num = to.qp_num;
        auto& queue = *static_cast<FakeQueue*>(to.recv_cq);
        queue.entries.push_back(arrival);
        MK_CHECK_OP(queue.entries.size(), <=, static_cast<std::size_t>(queue.cqe));
      }
    } else {
      pair.state = IBV_QPS_ERR;
    }
  }
  finish_write(pair, request, status);
  pair.queue.pop_front();
  return true;
}

int post_send(ibv_qp* base, ibv_send_wr* request, ibv_send_wr** refused) {
  FakePair& pair = *pair_of(base);
  std::unique_lock single(pair.poster, std::try_to_lock);
  MK_CHECK(single.owns_lock());  // a queue pair has one poster
  std::lock_guard lock(fake().mutex);
  MK_CHECK(pair.state == IBV_QPS_RTS || pair.state == IBV_QPS_ERR);
  ++fake().counts.doorbells;
  int accepted = 0;
  const int code = fake().faults.post ? fake().faults.post(++fake().posts, accepted) : 0;
  for (; request != nullptr; request = request->next) {
    *refused = request;
    if (code != 0 && accepted-- <= 0) return code;
    if (pair.taken == pair.depth) return ENOMEM;
    Write write;
    write.request = *request;
    if (request->num_sge == 1) {
      write.source = request->sg_list->addr;
      write.bytes = request->sg_list->length;
      write.source_key = request->sg_list->lkey;
    }
    MK_CHECK_OP(write.bytes, <=, kMaxMessage);
    if ((request->send_flags & IBV_SEND_INLINE) != 0) {
      const auto* begin = reinterpret_cast<const std::byte*>(write.source);
      write.copied.assign(begin, begin + write.bytes);
    } else if (write.bytes > 0) {
      MK_CHECK(find_region(request->sg_list->lkey, write.source, write.bytes, 0) != nullptr);
    }
    write.request.sg_list = nullptr;  // the caller's
    ++pair.taken;
    pair.queue.push_back(std::move(write));
  }
  return 0;
}

int post_srq_recv(ibv_srq* base, ibv_recv_wr* request, ibv_recv_wr** refused) {
  std::lock_guard lock(fake().mutex);
  auto& receives = *static_cast<FakeReceives*>(base);
  for (; request != nullptr; request = request->next) {
    *refused = request;
    if (receives.posted == receives.depth) return ENOMEM;
    ++receives.posted;
  }
  return 0;
}

int poll_cq(ibv_cq* base, int room, ibv_wc* completions) {
  std::lock_guard lock(fake().mutex);
  // A few writes of pairs drawn at random, so that pairs overtake each other.
  for (int i = 0; i < 16 && !fake().pairs.empty(); ++i) {
    auto at = fake().pairs.begin();
    std::advance(at, static_cast<long>(fake().engine() % fake().pairs.size()));
    for (std::size_t burst = 1 + fake().engine() % 8; burst > 0 && carry(*at->second); --burst) {
    }
  }
  auto& entries = static_cast<FakeQueue*>(base)->entries;
  int count = 0;
  for (; count < room && !entries.empty(); ++count) {
    completions[count] = entries.front();
    entries.pop_front();
    if (completions[count].opcode == IBV_WC_RECV_RDMA_WITH_IMM) continue;
    ++fake().counts.completions;
    const auto pair = fake().pairs.find(completions[count].qp_num);
    if (pair == fake().pairs.end()) continue;
    pair->second->taken -= pair->second->retires.front();
    pair->second->retires.pop_front();
  }
  return count;
}

ibv_device* the_device() {
  static ibv_device device = {};
  return &device;
}

VerbsLibrary make_table() {
  VerbsLibrary table;
  table.get_device_list = [](int* count) -> ibv_device** {
    static ibv_device* list[] = {the_device(), nullptr};
    *count = 1;
    return list;
  };
  table.free_device_list = [](ibv_device**) {};
  table.get_device_name = [](ibv_device*) { return "fake0"; };
  table.open_device = [](ibv_device* device) -> ibv_context* {
    ibv_context* context = make<ibv_context>("context");
    if (context == nullptr) return nullptr;
    context->device = device;
    context->ops.post_send = post_send;
    context->ops.post_srq_recv = post_srq_recv;
    context->ops.poll_cq = poll_cq;
    return context;
  };
  table.close_device = destroy<ibv_context>;
  table.query_device = [](ibv_context*, ibv_device_attr* attributes) {
    *attributes = {};
    attributes->max_qp_wr = 1 << 14;
    attributes->max_cqe = 1 << 20;
    attributes->max_srq = 1 << 10;
    attributes->max_srq_wr = 1 << 14;
    return 0;
  };
  table.query_port = [](ibv_context*, std::uint8_t, _compat_ibv_port_attr* attributes) {
    auto& port = *reinterpret_cast<ibv_port_attr*>(attributes);
    port.state = IBV_PORT_ACTIVE;
    port.link_layer = IBV_LINK_LAYER_ETHERNET;
    port.active_mtu = IBV_MTU_4096;
    port.max_msg_sz = kMaxMessage;
    return 0;
  };
  table.query_gid = [](ibv_context*, std::uint8_t, int index, union ibv_gid* gid) {
    gid->raw[15] = static_cast<std::uint8_t>(index + 1);
    return 0;
  };
  table.alloc_pd = [](ibv_context* context) {
    ibv_pd* domain = make<ibv_pd>("pd");
    if (domain != nullptr) domain->context = context;
    return domain;
  };
  table.dealloc_pd = destroy<ibv_pd>;
  static const auto add_region = [](const char* what, void* data, std::size_t bytes, int access) -> ibv_mr* {
    FakeRegion* region = make<FakeRegion>(what);
    if (region == nullptr) return nullptr;
    std::lock_guard lock(fake().mutex);
    region->addr = data;
    region->length = bytes;
    region->access = access;
    region->lkey = region->rkey = fake().next_number++;
    fake().regions[region->rkey] = region;
    return region;
  };
  table.reg_mr = [](ibv_pd*, void* data, std::size_t bytes, int access) {
    return add_region("mr", data, bytes, access);
  };
  table.reg_dmabuf_mr = [](ibv_pd*, std::uint64_t, std::size_t bytes, std::uint64_t address, int, int access) {
    return add_region("dmabuf", reinterpret_cast<void*>(address), bytes, access);
  };
  table.dereg_mr = [](ibv_mr* region) {
    {
      std::lock_guard lock(fake().mutex);
      fake().regions.erase(region->rkey);
    }
    return destroy(static_cast<FakeRegion*>(region));
  };
  table.create_cq = [](ibv_context* context, int entries, void*, ibv_comp_channel*, int) -> ibv_cq* {
    FakeQueue* queue = make<FakeQueue>("cq");
    if (queue == nullptr) return nullptr;
    queue->context = context;
    queue->cqe = entries;
    return queue;
  };
  table.destroy_cq = [](ibv_cq* queue) { return destroy(static_cast<FakeQueue*>(queue)); };
  table.create_srq = [](ibv_pd* domain, ibv_srq_init_attr* wanted) -> ibv_srq* {
    FakeReceives* receives = make<FakeReceives>("srq");
    if (receives == nullptr) return nullptr;
    receives->context = domain->context;
    receives->depth = wanted->attr.max_wr;
    return receives;
  };
  table.destroy_srq = [](ibv_srq* receives) { return destroy(static_cast<FakeReceives*>(receives)); };
  table.create_qp = [](ibv_pd* domain, ibv_qp_init_attr* wanted) -> ibv_qp* {
    FakePair* pair = make<FakePair>("qp");
    if (pair == nullptr) return nullptr;
    std::lock_guard lock(fake().mutex);
    pair->context = domain->context;
    pair->send_cq = wanted->send_cq;
    pair->recv_cq = wanted->recv_cq;
    pair->srq = wanted->srq;
    pair->depth = wanted->cap.max_send_wr;
    pair->qp_num = fake().next_number++;
    fake().pairs[pair->qp_num] = pair;
    return pair;
  };
  table.modify_qp = [](ibv_qp* base, ibv_qp_attr* change, int) {
    const char* what = change->qp_state == IBV_QPS_INIT ? "init" : change->qp_state == IBV_QPS_RTR ? "rtr" : "rts";
    std::lock_guard lock(fake().mutex);
    if (const int code = fake().faults.create ? fake().faults.create(what) : 0; code != 0) return code;
    if (change->qp_state == IBV_QPS_RTR &&
        (change->path_mtu < IBV_MTU_256 || change->path_mtu > IBV_MTU_4096 || change->dest_qp_num >= 1 << 24)) {
      return EINVAL;
    }
    base->state = change->qp_state;
    if (change->qp_state == IBV_QPS_RTR) pair_of(base)->remote = change->dest_qp_num;
    return 0;
  };
  table.destroy_qp = [](ibv_qp* base) {
    {
      std::lock_guard lock(fake().mutex);
      fake().pairs.erase(base->qp_num);
    }
    return destroy(pair_of(base));
  };
  table.wc_status_str = [](ibv_wc_status status) {
    return status == IBV_WC_RETRY_EXC_ERR    ? "transport retry counter exceeded"
           : status == IBV_WC_REM_ACCESS_ERR ? "remote access error"
                                             : "another error";
  };
  return table;
}

}  // namespace

const VerbsLibrary& fake_verbs() {
  static const VerbsLibrary table = make_table();
  return table;
}

Nic fake_nic() {
  Nic nic;
  nic.device = "fake0";
  nic.active = true;
  nic.ethernet = true;
  return nic;
}

void set_fake_faults(const FakeVerbsFaults& faults) {
  std::lock_guard lock(fake().mutex);
  fake().faults = faults;
  fake().posts = fake().writes = 0;
  fake().counts = {};
}

std::int64_t fake_objects() {
  std::lock_guard lock(fake().mutex);
  return fake().objects;
}

FakeVerbsCounts fake_counts() {
  std::lock_guard lock(fake().mutex);
  return fake().counts;
}

}  // namespace mkernel
