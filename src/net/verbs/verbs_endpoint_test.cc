// What the conformance suite cannot ask of a device: faults at any point, doorbells, and refused addresses. Over the
// device of fake_verbs.h, in virtual time.
#include "net/verbs/verbs_endpoint.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "net/verbs/device.h"
#include "net/verbs/fake_verbs.h"
#include "net/verbs/registration.h"

namespace mkernel {
namespace {

constexpr std::int64_t kStampBytes = 4096;
constexpr std::int64_t kHeapBytes = kStampBytes + (4 << 20);
constexpr Nanos kStepNs = 1'000;

struct Mode {
  const char* name;
  VerbsMode mode = VerbsMode::kOrdered;
  bool notify = true;
};
constexpr Mode kOrdered = {"ordered"};
constexpr Mode kSilent = {"silent", VerbsMode::kOrdered, false};
constexpr Mode kCounted = {"counted", VerbsMode::kCounted};

VerbsOptions fake_options(const Mode& mode) {
  VerbsOptions options;
  options.mode = mode.mode;
  options.notify = mode.notify;
  options.nic = fake_nic();
  options.gid_index = 0;
  options.library = &fake_verbs();
  options.pieces = mode.mode == VerbsMode::kCounted ? 3 : 1;
  return options;
}

// Ranks 0, 1 and 2, of which 0 writes.
class Ranks {
 public:
  explicit Ranks(const VerbsOptions& options) : options_(options) {
    for (int rank = 0; rank < 3; ++rank) {
      heaps_.emplace_back(static_cast<std::size_t>(kHeapBytes));
      endpoints_.push_back(create_verbs_endpoint(rank, 3, options).value());
    }
    std::vector<RemoteHeap> told;
    for (int rank = 0; rank < 3; ++rank) {
      told.push_back(endpoint(rank).add_heap(0, {heaps_[rank].data(), kHeapBytes}, 0).value());
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        EXPECT_TRUE(endpoint(rank).connect(peer, endpoint(peer).address()).ok());
      }
    }
    for (int rank = 0; rank < 3; ++rank) {
      for (int peer = 0; peer < 3; ++peer) endpoint(rank).set_remote(0, peer, told[peer]);
    }
    for (std::int64_t i = kStampBytes; i < kHeapBytes; ++i) heaps_[0][i] = static_cast<std::byte>(i * 31 >> 3);
  }

  ProcessEndpoint& endpoint(int rank) { return *endpoints_[static_cast<std::size_t>(rank)]; }
  PostStatus post(int dst, std::int64_t flag, std::int64_t bytes) {
    Put put;
    put.id = static_cast<std::uint64_t>(flag);
    put.dst_rank = dst;
    put.epoch = 1;
    put.src_offset = put.dst_offset = kStampBytes + flag;
    put.bytes = bytes;
    put.flag = flag;
    put.value = 1;
    return endpoint(0).post(put, now_);
  }
  void flush() { endpoint(0).flush(now_); }
  void step() {
    now_ += kStepNs;
    std::array<TransportEvent, 16> events;
    for (int rank = 0; rank < 3; ++rank) {
      const int count = endpoint(rank).poll(now_, events);
      for (int i = 0; i < count; ++i) {
        const TransportEvent& event = events[static_cast<std::size_t>(i)];
        sent += event.kind == EventKind::kSent;
        failed += event.kind == EventKind::kFailed;
        if (event.kind == EventKind::kFailed) failed_peer = event.peer;
        told_ += event.kind == EventKind::kStamped;
        if (event.kind == EventKind::kArrived && ++pieces_[static_cast<std::size_t>(event.flag)] == options_.pieces) {
          pieces_[static_cast<std::size_t>(event.flag)] = 0;
          ++stamped;
        }
      }
    }
  }
  // Until `count` puts have been sent or have failed; false when they never are.
  bool settle(std::int64_t count) {
    for (int i = 0; i < 200'000; ++i) {
      if (sent + failed == count) {
        for (int more = 0; more < 100; ++more) step();  // what has arrived is told of
        if (options_.mode == VerbsMode::kOrdered) count_stamps();
        return true;
      }
      step();
    }
    return false;
  }
  // Ordered: whoever writes them, they lie in the heaps.
  void count_stamps() {
    stamped = 0;
    for (const auto& heap : heaps_) {
      for (std::int64_t flag = 0; flag < kStampBytes / 4; ++flag) {
        std::uint32_t stamp = 0;
        std::memcpy(&stamp, heap.data() + 4 * flag, sizeof stamp);
        EXPECT_LE(stamp, 1u);
        stamped += stamp == 1;
      }
    }
    EXPECT_EQ(told_, options_.notify ? stamped : 0);
  }
  bool is_there(int dst, std::int64_t flag, std::int64_t bytes) {
    return std::memcmp(heaps_[0].data() + kStampBytes + flag, heaps_[dst].data() + kStampBytes + flag,
                       static_cast<std::size_t>(bytes)) == 0;
  }
  Nanos now() const { return now_; }

  std::int64_t sent = 0;
  std::int64_t failed = 0;
  std::int64_t stamped = 0;
  std::int32_t failed_peer = -1;

 private:
  VerbsOptions options_;
  Nanos now_ = 1'000'000;
  std::vector<std::vector<std::byte>> heaps_;
  std::vector<std::unique_ptr<ProcessEndpoint>> endpoints_;
  std::int64_t told_ = 0;
  std::array<int, kStampBytes / 4> pieces_ = {};
};

class VerbsEndpointTest : public testing::TestWithParam<Mode> {
 protected:
  void SetUp() override { set_fake_faults({}); }
  void TearDown() override {
    set_fake_faults({});
    EXPECT_EQ(fake_objects(), 0) << "objects of libibverbs that nobody has destroyed";
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, VerbsEndpointTest, testing::Values(kOrdered, kSilent, kCounted),
                         [](const auto& param) { return std::string(param.param.name); });

// Case "a post that fails for the moment": nothing taken, some taken, or all but one.
TEST_P(VerbsEndpointTest, PostsThatFailForTheMomentLoseNothing) {
  for (int taken = 0; taken < 4; ++taken) {
    FakeVerbsFaults faults;
    faults.post = [&](std::int64_t call, int& accepted) {
      accepted = taken;
      return call % 3 != 0 ? ENOMEM : 0;
    };
    set_fake_faults(faults);
    Ranks ranks(fake_options(GetParam()));
    constexpr std::int64_t kPuts = 200;
    for (std::int64_t i = 0; i < kPuts; ++i) {
      while (ranks.post(1 + static_cast<int>(i % 2), i, 1 + i * 37 % 5000) != PostStatus::kPosted) ranks.step();
      if (i % 5 == 0) ranks.flush();
    }
    ASSERT_TRUE(ranks.settle(kPuts)) << ranks.sent;
    EXPECT_EQ(ranks.sent, kPuts);
    EXPECT_EQ(ranks.stamped, kPuts);
    for (std::int64_t i = 0; i < kPuts; ++i) {
      EXPECT_TRUE(ranks.is_there(1 + static_cast<int>(i % 2), i, 1)) << i;
    }
  }
}

TEST_P(VerbsEndpointTest, PostsThatFailForTheMomentForTooLongLoseThePeerByName) {
  FakeVerbsFaults faults;
  faults.post = [](std::int64_t, int&) { return ENOMEM; };
  set_fake_faults(faults);
  VerbsOptions options = fake_options(GetParam());
  options.max_post_failures_ns = 20'000'000;
  Ranks ranks(options);
  ASSERT_EQ(ranks.post(2, 0, 100), PostStatus::kPosted);
  ASSERT_EQ(ranks.post(2, 1, 100), PostStatus::kPosted);
  const Nanos begin = ranks.now();
  ASSERT_TRUE(ranks.settle(2));
  EXPECT_EQ(ranks.failed, 2);
  EXPECT_EQ(ranks.failed_peer, 2);
  EXPECT_GE(ranks.now() - begin, options.max_post_failures_ns);
  EXPECT_LE(ranks.now() - begin, 2 * options.max_post_failures_ns);
  EXPECT_EQ(ranks.endpoint(0).last_error(), "writing to rank 2: ibv_post_send says Cannot allocate memory");
  EXPECT_EQ(ranks.post(2, 2, 100), PostStatus::kFatal);
  set_fake_faults({});
  EXPECT_EQ(ranks.post(1, 3, 100), PostStatus::kPosted);
  EXPECT_TRUE(ranks.settle(3));
  EXPECT_EQ(ranks.sent, 1);
}

// reliability.md: every errno at the k-th call is retried or fatal, and nothing in between.
TEST_P(VerbsEndpointTest, EveryErrnoOfAPostIsForTheMomentOrFatal) {
  for (int code = 1; code <= 133; ++code) {
    for (const std::int64_t at : {1, 3}) {
      FakeVerbsFaults faults;
      faults.post = [&](std::int64_t call, int& accepted) {
        accepted = 0;
        return call == at ? code : 0;
      };
      set_fake_faults(faults);
      Ranks ranks(fake_options(GetParam()));
      std::int64_t posted = 0;
      for (std::int64_t i = 0; i < 8; ++i) {
        posted += ranks.post(1, i, 300) == PostStatus::kPosted;
        ranks.flush();
      }
      ASSERT_TRUE(ranks.settle(posted)) << code;
      const bool momentary = code == ENOMEM || code == EAGAIN || code == EBUSY || code == EINTR;
      EXPECT_EQ(ranks.failed == 0 && posted == 8, momentary) << code;
      EXPECT_EQ(ranks.stamped >= ranks.sent, true) << code;
      if (!momentary) {
        EXPECT_EQ(ranks.endpoint(0).last_error(),
                  std::string("writing to rank 1: ibv_post_send says ") + std::strerror(code));
      }
    }
  }
}

// A completion with a bad status never counts as delivered, and what others are sent goes on.
TEST_P(VerbsEndpointTest, EveryBadStatusLosesThePeerAndCountsNothingAsSent) {
  for (int status = IBV_WC_LOC_LEN_ERR; status <= IBV_WC_GENERAL_ERR; ++status) {
    for (const std::int64_t at : {1, 2, 5, 16, 17}) {
      FakeVerbsFaults faults;
      faults.write = [&](std::int64_t write) { return write == at ? ibv_wc_status(status) : IBV_WC_SUCCESS; };
      set_fake_faults(faults);
      Ranks ranks(fake_options(GetParam()));
      for (std::int64_t i = 0; i < 20; ++i) ASSERT_EQ(ranks.post(1, i, 700), PostStatus::kPosted);
      ranks.flush();
      ASSERT_TRUE(ranks.settle(20)) << status << " at " << at;
      EXPECT_GE(ranks.failed, 1);
      EXPECT_EQ(ranks.failed_peer, 1);
      EXPECT_GE(ranks.stamped, ranks.sent);
      EXPECT_EQ(ranks.endpoint(0).last_error().find("writing to rank 1: "), 0u) << ranks.endpoint(0).last_error();
      EXPECT_EQ(ranks.post(1, 20, 1), PostStatus::kFatal);
      ASSERT_EQ(ranks.post(2, 21, 5000), PostStatus::kPosted);
      ASSERT_TRUE(ranks.settle(21));
      EXPECT_TRUE(ranks.is_there(2, 21, 5000));
    }
  }
}

TEST(VerbsEndpoint, ABatchGoesOutWithOneDoorbellPerQueuePairAndFewCompletions) {
  for (const Mode& mode : {kOrdered, kSilent}) {
    set_fake_faults({});
    VerbsOptions options = fake_options(mode);
    options.lanes = 2;
    options.signal_every = 16;
    Ranks ranks(options);
    for (std::int64_t i = 0; i < 32; ++i) ASSERT_EQ(ranks.post(1, i, 64), PostStatus::kPosted);
    EXPECT_EQ(fake_counts().doorbells, 0);
    ranks.flush();
    EXPECT_EQ(fake_counts().doorbells, 2);
    ASSERT_TRUE(ranks.settle(32));
    // The NIC's stamps are writes of their own.
    const std::int64_t writes = mode.notify ? 32 : 64;
    EXPECT_EQ(fake_counts().writes, writes);
    EXPECT_LE(fake_counts().completions, writes / 16);
  }
  EXPECT_EQ(fake_objects(), 0);
}

// reliability.md, case 15: each creation step fails in turn.
TEST_P(VerbsEndpointTest, EveryStepOfTheStartThatFailsIsNamedAndLeaksNothing) {
  const struct {
    const char* what;
    const char* step;
  } steps[] = {{"context", "ibv_open_device"}, {"pd", "ibv_alloc_pd"},          {"cq", "ibv_create_cq"},
               {"srq", "ibv_create_srq"},      {"qp", "ibv_create_qp"},         {"init", "ibv_modify_qp to INIT"},
               {"mr", "ibv_reg_mr"},           {"rtr", "ibv_modify_qp to RTR"}, {"rts", "ibv_modify_qp to RTS"}};
  for (const auto& [what, step] : steps) {
    for (int at = 1; at <= 3; ++at) {
      SCOPED_TRACE(std::string(what) + ", call " + std::to_string(at));
      int calls = 0;
      FakeVerbsFaults faults;
      faults.create = [&](const char* name) { return std::strcmp(name, what) == 0 && ++calls == at ? ENOMEM : 0; };
      set_fake_faults(faults);
      std::string message;
      std::vector<std::byte> memory(4096);
      std::vector<std::unique_ptr<ProcessEndpoint>> endpoints;
      for (int rank = 0; rank < 3 && message.empty(); ++rank) {
        auto endpoint = create_verbs_endpoint(rank, 3, fake_options(GetParam()));
        if (!endpoint.ok()) {
          message = endpoint.error().message;
          break;
        }
        endpoints.push_back(std::move(endpoint).value());
        const auto heap = endpoints.back()->add_heap(0, {memory.data(), 4096}, 0);
        if (!heap.ok()) message = heap.error().message;
      }
      for (int rank = 1; rank < 3 && message.empty(); ++rank) {
        const Status status = endpoints[0]->connect(rank, endpoints[static_cast<std::size_t>(rank)]->address());
        if (status.ok()) continue;
        message = status.error().message;
        EXPECT_EQ(message.find("connecting to rank " + std::to_string(rank)), 0u) << message;
      }
      EXPECT_NE(message.find("fake0:1: " + std::string(step) + " says Cannot allocate memory"), std::string::npos)
          << message;
      endpoints.clear();
      EXPECT_EQ(fake_objects(), 0);
    }
  }
}

TEST_P(VerbsEndpointTest, AddressesOfOthersAreRefused) {
  const auto one = create_verbs_endpoint(0, 2, fake_options(GetParam())).value();
  VerbsOptions other_lanes = fake_options(GetParam());
  other_lanes.lanes = 3;
  const auto three_lanes = create_verbs_endpoint(1, 2, other_lanes).value();
  const Status lanes = one->connect(1, three_lanes->address());
  ASSERT_FALSE(lanes.ok());
  EXPECT_EQ(lanes.error().kind, ErrorKind::kBadArgument);
  EXPECT_NE(lanes.error().message.find("rank 1 uses 3 queue pairs per peer"), std::string::npos);
  VerbsOptions other_mode = fake_options(GetParam());
  other_mode.mode = VerbsMode::kOrdered;
  other_mode.notify = !GetParam().notify;
  const auto silent = create_verbs_endpoint(1, 2, other_mode).value();
  EXPECT_FALSE(one->connect(1, silent->address()).ok());

  const std::string good = create_verbs_endpoint(1, 2, fake_options(GetParam())).value()->address();
  for (std::size_t size = 0; size < good.size(); ++size) {
    const Status cut = one->connect(1, good.substr(0, size));
    ASSERT_FALSE(cut.ok()) << size;
    EXPECT_NE(cut.error().message.find("rank 1"), std::string::npos);
  }
  for (std::size_t byte = 0; byte < 4; ++byte) {
    std::string bad = good;
    bad[byte] = static_cast<char>(~bad[byte]);
    EXPECT_FALSE(one->connect(1, bad).ok());
  }
  // The address of a rank that has no queue pair for us.
  VerbsOptions others = fake_options(GetParam());
  others.peers = {2};
  const auto stranger = create_verbs_endpoint(1, 3, others).value();
  EXPECT_EQ(one->connect(1, stranger->address()).error().message, "rank 1 has no queue pair for rank 0");
}

TEST(VerbsRegistration, AGpusMemoryGoesByDmabufElseByItsAddressElseIsRefusedWithBothReasons) {
  set_fake_faults({});
  {
    const VerbsDevice device = open_device(fake_verbs(), "/sys", fake_nic(), 0).value();
    std::vector<std::byte> memory(4096);
    HeapMemory heap{memory.data(), 4096};
    EXPECT_EQ(register_memory(device, heap)->way, MemoryWay::kHost);
    heap.gpu = true;
    EXPECT_EQ(register_memory(device, heap)->way, MemoryWay::kPeermem);
    heap.dmabuf_file = 5;
    EXPECT_EQ(register_memory(device, heap)->way, MemoryWay::kDmabuf);
    std::string broken = "dmabuf";
    FakeVerbsFaults faults;
    faults.create = [&](const char* what) { return broken.find(what) != std::string::npos ? EOPNOTSUPP : 0; };
    set_fake_faults(faults);
    EXPECT_EQ(register_memory(device, heap)->way, MemoryWay::kPeermem);
    broken = "dmabuf mr";
    const auto refused = register_memory(device, heap);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().kind, ErrorKind::kUnsupported);
    EXPECT_EQ(refused.error().message,
              "fake0:1 reaches the GPU's memory neither by dma-buf (ibv_reg_dmabuf_mr says Operation not supported) "
              "nor by its address (ibv_reg_mr says Operation not supported; is nvidia_peermem loaded?)");
    heap.gpu = false;
    EXPECT_EQ(register_memory(device, heap).error().message,
              "4096 bytes of workspace cannot be registered: fake0:1: ibv_reg_mr says Operation not supported");
    set_fake_faults({});
  }
  EXPECT_EQ(fake_objects(), 0);
}

}  // namespace
}  // namespace mkernel
