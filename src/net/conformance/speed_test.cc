// How fast each kind of network is between two processes that poll. Prints figures and asserts none: they are read
// beside those of the networks' own tools (scripts/rdma_tests.sh). Started by a launcher that says so (mpirun -np 2 and
// so on, docs/cluster.md) the two are its processes, on two hosts as well; else the second is a fork of the first.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "net/conformance/networks.h"
#include "world/bootstrap.h"
#include "world/launch.h"

namespace mkernel {
namespace {

constexpr std::int64_t kStampBytes = 4096;
constexpr std::int64_t kLargestPut = 1 << 20;
constexpr int kInFlight = 16;

std::int64_t rounds(const char* variable, std::int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::max(1, std::atoi(text)) : otherwise;
}

// Gives the other process a text and returns the other's.
using Swap = std::function<std::string(const std::string&)>;

// Through a socket between the two.
Swap swap_over(int socket) {
  return [socket](const std::string& text) {
    const std::size_t size = text.size();
    MK_CHECK(::write(socket, &size, sizeof size) == static_cast<ssize_t>(sizeof size));
    MK_CHECK(::write(socket, text.data(), size) == static_cast<ssize_t>(size));
    const auto read_all = [socket](void* data, std::size_t bytes) {
      for (std::size_t done = 0; done < bytes;) {
        const ssize_t got = ::read(socket, static_cast<char*>(data) + done, bytes - done);
        MK_CHECK(got > 0);
        done += static_cast<std::size_t>(got);
      }
    };
    std::size_t other = 0;
    read_all(&other, sizeof other);
    std::string got(other, '\0');
    read_all(got.data(), other);
    return got;
  };
}

// One of two processes: its end of the network, and a way to the other for what comes before.
class Side {
 public:
  Side(const NetworkKind& kind, int rank, Swap swap) : kind_(kind), rank_(rank), swap_(std::move(swap)) {
    heap_.resize(kStampBytes + kInFlight * kLargestPut);
    endpoint_ = make_endpoint(kind, rank, 2, kInFlight);
    const std::string address = swap_(endpoint_->address());
    MK_CHECK(endpoint_->connect(1 - rank, address).ok());
    const RemoteHeap mine = endpoint_->add_heap(0, {heap_.data(), std::int64_t(heap_.size())}, 0).value();
    const std::string told = swap_({reinterpret_cast<const char*>(&mine), sizeof mine});
    RemoteHeap other;
    MK_CHECK_OP(told.size(), ==, sizeof other);
    std::memcpy(&other, told.data(), sizeof other);
    endpoint_->set_remote(0, 1 - rank, other);
  }

  // Until flag `flag` of ours is `value`.
  void await(std::int64_t flag, std::uint32_t value) {
    std::atomic_ref<std::uint32_t> stamp(stamps()[flag]);
    while (stamp.load(std::memory_order_acquire) != value) poll();
  }
  void put(std::int64_t bytes, std::int64_t flag, std::uint32_t value) {
    Put put;
    put.src_rank = rank_;
    put.dst_rank = 1 - rank_;
    put.epoch = 2 * std::uint64_t{value} - 1;  // use_of_epoch() of it is value
    put.src_offset = put.dst_offset = kStampBytes + (flag % kInFlight) * kLargestPut;
    put.bytes = bytes;
    put.flag = flag;
    put.value = value;
    while (endpoint_->post(put, clock_now()) != PostStatus::kPosted) poll();
    ++posted_;
  }
  void flush() { endpoint_->flush(clock_now()); }
  void await_sent() {
    while (sent_ < posted_) poll();
  }
  // Returns when both have come here.
  void meet() { swap_("here"); }

 private:
  std::uint32_t* stamps() { return reinterpret_cast<std::uint32_t*>(heap_.data()); }
  void poll() {
    std::array<TransportEvent, 32> events;
    const int count = endpoint_->poll(clock_now(), events);
    for (int i = 0; i < count; ++i) {
      const TransportEvent& event = events[static_cast<std::size_t>(i)];
      MK_CHECK(event.kind != EventKind::kFailed);
      sent_ += event.kind == EventKind::kSent;
      if (event.kind != EventKind::kArrived || ++pieces_[static_cast<std::size_t>(event.flag)] < kind_.pieces) continue;
      pieces_[static_cast<std::size_t>(event.flag)] = 0;
      std::atomic_ref<std::uint32_t>(stamps()[event.flag])
          .store(static_cast<std::uint32_t>((event.epoch + 1) / 2), std::memory_order_release);
    }
  }

  NetworkKind kind_;
  int rank_;
  Swap swap_;
  std::vector<std::byte> heap_;
  std::unique_ptr<ProcessEndpoint> endpoint_;
  std::array<int, kStampBytes / 4> pieces_ = {};
  std::int64_t posted_ = 0;
  std::int64_t sent_ = 0;
};

// Half the median of a round trip, microseconds; rank 0's.
double latency_us(Side& side, int rank, std::int64_t bytes, std::uint32_t& value) {
  const std::int64_t count = rounds("MKERNEL_SPEED_ROUNDS", 2000);
  std::vector<Nanos> times;
  side.meet();
  for (std::int64_t i = 0; i < count; ++i, ++value) {
    const Nanos begin = clock_now();
    if (rank == 1) side.await(0, value);
    side.put(bytes, 0, value);
    side.flush();
    if (rank == 0) side.await(0, value);
    times.push_back(clock_now() - begin);
  }
  side.await_sent();
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return static_cast<double>(times[times.size() / 2]) / 2000;
}

// From rank 0 to rank 1 until the last stamp is seen there, 10^6 bytes per second.
double bandwidth(Side& side, int rank, std::int64_t bytes, std::uint32_t& value) {
  const std::int64_t count = std::max<std::int64_t>(8, rounds("MKERNEL_SPEED_MEGABYTES", 2048) * 1'000'000 / bytes);
  side.meet();
  const Nanos begin = clock_now();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t flag = 1 + i % kInFlight;
    if (rank == 0) {
      side.put(bytes, flag, value + static_cast<std::uint32_t>(i / kInFlight));
      side.flush();
    }
  }
  const std::uint32_t last = value + static_cast<std::uint32_t>((count - 1) / kInFlight);
  if (rank == 0) side.await_sent();
  // Writes may overtake each other, so all flags of the last round are looked at.
  for (std::int64_t i = std::max<std::int64_t>(0, count - kInFlight); rank == 1 && i < count; ++i) {
    side.await(1 + i % kInFlight, value + static_cast<std::uint32_t>(i / kInFlight));
  }
  side.meet();
  value = last + 1;
  return static_cast<double>(count * bytes) * 1e3 / static_cast<double>(clock_now() - begin);
}

struct Figures {
  double small_us = 0;
  double medium_us = 0;
  double large_mb_s = 0;
};

Figures measure(const NetworkKind& kind, int rank, const Swap& swap) {
  Side side(kind, rank, swap);
  Figures figures;
  std::uint32_t value = 1;
  figures.small_us = latency_us(side, rank, 8, value);
  figures.medium_us = latency_us(side, rank, 4096, value);
  figures.large_mb_s = bandwidth(side, rank, kLargestPut, value);
  return figures;
}

void print(const NetworkKind& kind, const Figures& figures) {
  std::printf("%-18s 8 B %8.1f us   4 KiB %8.1f us   1 MiB %8.1f MB/s\n", kind.name.c_str(), figures.small_us,
              figures.medium_us, figures.large_mb_s);
}

// As one of the two processes of a launcher.
void measure_as(const Processes& processes, NetworkKind kind) {
  BootstrapOptions options;
  options.rank = processes.rank;
  options.size = 2;
  options.job = processes.job + " " + kind.name;
  options.address = processes.address;
  const auto bootstrap = Bootstrap::create(options);
  ASSERT_TRUE(bootstrap.ok()) << bootstrap.error().message;
  kind.local_address = processes.interface.empty() ? (*bootstrap)->local_address() : processes.interface;
  const Swap swap = [&](const std::string& text) {
    return (*bootstrap)->exchange("measure", text, 60).value()[static_cast<std::size_t>(1 - processes.rank)];
  };
  const Figures figures = measure(kind, processes.rank, swap);
  if (processes.rank == 0) print(kind, figures);
}

class NetworkSpeedTest : public testing::TestWithParam<NetworkKind> {};

INSTANTIATE_TEST_SUITE_P(Networks, NetworkSpeedTest, testing::ValuesIn(network_kinds()),
                         [](const auto& param) { return network_name(param.param); });

TEST_P(NetworkSpeedTest, TimingOfTwoProcessesThatPoll) {
  const NetworkKind kind = GetParam();
  if (kind.family == NetworkKind::Family::kLocal || kind.fake) GTEST_SKIP() << "lives in one process";
  if (kind.shuffle) GTEST_SKIP() << "is slow on purpose";
  if (const std::string obstacle = network_obstacle(kind); !obstacle.empty()) GTEST_SKIP() << obstacle;
  if (const Result<Processes> processes = processes_from_environment(); processes.ok() && processes->size == 2) {
    return measure_as(*processes, kind);
  }
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    measure(kind, 1, swap_over(sockets[1]));
    _exit(0);
  }
  const Figures figures = measure(kind, 0, swap_over(sockets[0]));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  print(kind, figures);
}

}  // namespace
}  // namespace mkernel
