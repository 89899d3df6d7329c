// How fast each kind of network is between two processes that poll. Prints figures and asserts none: they are read
// beside those of the networks' own tools (scripts/rdma_tests.sh, scripts/network_speed.sh).
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/check.h"
#include "net/conformance/networks.h"

namespace mkernel {
namespace {

constexpr std::int64_t kStampBytes = 4096;
constexpr std::int64_t kLargestPut = 1 << 20;
constexpr int kInFlight = 16;

std::int64_t rounds(const char* variable, std::int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::max(1, std::atoi(text)) : otherwise;
}

// One of two processes: its end of the network, and a socket to the other for what comes before.
class Side {
 public:
  Side(const NetworkKind& kind, int rank, int socket) : kind_(kind), rank_(rank), socket_(socket) {
    heap_.resize(kStampBytes + kInFlight * kLargestPut);
    endpoint_ = make_endpoint(kind, rank, 2, kInFlight);
    const std::string address = swap_text(endpoint_->address());
    MK_CHECK(endpoint_->connect(1 - rank, address).ok());
    const RemoteHeap mine = endpoint_->add_heap(0, {heap_.data(), std::int64_t(heap_.size())}, 0).value();
    RemoteHeap other;
    write_all(&mine, sizeof mine);
    read_all(&other, sizeof other);
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
  void meet() {
    char token = 0;
    write_all(&token, 1);
    read_all(&token, 1);
  }

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
  std::string swap_text(const std::string& text) {
    const std::size_t size = text.size();
    std::size_t other = 0;
    write_all(&size, sizeof size);
    read_all(&other, sizeof other);
    write_all(text.data(), size);
    std::string got(other, '\0');
    read_all(got.data(), other);
    return got;
  }
  void write_all(const void* data, std::size_t bytes) {
    MK_CHECK(::write(socket_, data, bytes) == static_cast<ssize_t>(bytes));
  }
  void read_all(void* data, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t got = ::read(socket_, static_cast<char*>(data) + done, bytes - done);
      MK_CHECK(got > 0);
      done += static_cast<std::size_t>(got);
    }
  }

  NetworkKind kind_;
  int rank_;
  int socket_;
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

Figures measure(const NetworkKind& kind, int rank, int socket) {
  Side side(kind, rank, socket);
  Figures figures;
  std::uint32_t value = 1;
  figures.small_us = latency_us(side, rank, 8, value);
  figures.medium_us = latency_us(side, rank, 4096, value);
  figures.large_mb_s = bandwidth(side, rank, kLargestPut, value);
  return figures;
}

class NetworkSpeedTest : public testing::TestWithParam<NetworkKind> {};

INSTANTIATE_TEST_SUITE_P(Networks, NetworkSpeedTest, testing::ValuesIn(network_kinds()),
                         [](const auto& param) { return network_name(param.param); });

TEST_P(NetworkSpeedTest, TimingOfTwoProcessesThatPoll) {
  const NetworkKind kind = GetParam();
  if (kind.family == NetworkKind::Family::kLocal || kind.fake) GTEST_SKIP() << "lives in one process";
  if (kind.shuffle) GTEST_SKIP() << "is slow on purpose";
  if (const std::string obstacle = network_obstacle(kind); !obstacle.empty()) GTEST_SKIP() << obstacle;
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    measure(kind, 1, sockets[1]);
    _exit(0);
  }
  const Figures figures = measure(kind, 0, sockets[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::printf("%-18s 8 B %8.1f us   4 KiB %8.1f us   1 MiB %8.1f MB/s\n", kind.name.c_str(), figures.small_us,
              figures.medium_us, figures.large_mb_s);
}

}  // namespace
}  // namespace mkernel
