// The bootstrap among threads, which are as good as processes to it, and strangers that come in between.
#include "world/bootstrap.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <optional>

#include "world/process_group.h"

namespace mkernel {
namespace {

std::string new_job() {
  static std::atomic<int> count{0};
  return "bootstrap_test " + std::to_string(getpid()) + " " + std::to_string(count++);
}

using Made = Result<std::unique_ptr<Bootstrap>>;

BootstrapOptions options_of(std::int32_t rank, std::int32_t size, const std::string& job, const std::string& address) {
  BootstrapOptions options;
  options.rank = rank;
  options.size = size;
  options.job = job;
  options.address = address;
  options.start_s = 20;
  return options;
}

// Runs `body` for each rank in a thread of its own.
void for_ranks(std::int32_t size, const std::function<void(std::int32_t)>& body) {
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

class BootstrapTest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Places, BootstrapTest, testing::Values("", "127.0.0.1", "localhost", "[::1]"),
                         [](const auto& p) { return "place" + std::to_string(p.index); });

TEST_P(BootstrapTest, AllMeetAndExchangeInOrderManyTimes) {
  for (const int size : {2, 3, 8}) {
    const std::string job = new_job();
    for_ranks(size, [&](std::int32_t rank) {
      const Made made = Bootstrap::create(options_of(rank, size, job, GetParam()));
      ASSERT_TRUE(made.ok()) << made.error().message;
      EXPECT_NE((*made)->local_address(), "");
      for (int round = 0; round < 50; ++round) {
        const auto texts = (*made)->exchange("count", std::to_string(rank * 1000 + round), 20);
        ASSERT_TRUE(texts.ok()) << texts.error().message;
        for (int other = 0; other < size; ++other) {
          EXPECT_EQ((*texts)[static_cast<std::size_t>(other)], std::to_string(other * 1000 + round));
        }
      }
    });
  }
}

TEST_P(BootstrapTest, TwoJobsAtOnceAndManyWorldsOfOneJobDoNotMixUp) {
  const std::string jobs[] = {new_job(), new_job()};
  for_ranks(4, [&](std::int32_t i) {
    for (int round = 0; round < 50; ++round) {
      const std::string& job = jobs[i / 2];
      const Made made = Bootstrap::create(options_of(i % 2, 2, job, GetParam()));
      ASSERT_TRUE(made.ok()) << made.error().message;
      const auto texts = (*made)->exchange("compare", job + std::to_string(round), 20);
      ASSERT_TRUE(texts.ok()) << texts.error().message;
      EXPECT_EQ((*texts)[1 - i % 2], job + std::to_string(round));
    }
  });
}

TEST_P(BootstrapTest, StrangersAndGarbageAreTurnedAway) {
  const std::string job = new_job();
  const MeetingPoint point = meeting_point(GetParam(), job).value();
  std::atomic<bool> stop{false};
  std::thread strangers([&] {
    const std::string hello_of_another =
        encode_frame(FrameType::kHello, PacketWriter().text("another job").number(1).number(1).number(3).bytes());
    const std::string huge = PacketWriter().number(kFrameMagic).number(1).number(0xfffffff0).bytes();
    const std::string wrong_size =
        encode_frame(FrameType::kHello, PacketWriter().text(job).number(1).number(1).number(4).bytes());
    const std::string wrong_rank =
        encode_frame(FrameType::kHello, PacketWriter().text(job).number(1).number(70).number(3).bytes());
    std::vector<Socket> open;
    for (std::size_t i = 0; !stop; ++i) {
      Socket socket = connect_to(point, i % std::max<std::size_t>(1, point.ports.size()), 100);
      if (!socket.open()) continue;
      const std::string all[] = {"GET / HTTP/1.1\r\n\r\n",
                                 huge,
                                 hello_of_another,
                                 wrong_size,
                                 wrong_rank,
                                 "x",
                                 "",
                                 encode_frame(FrameType::kWelcome),
                                 hello_of_another.substr(0, 20)};
      std::string bytes = all[i % std::size(all)];
      write_some(socket, bytes);
      open.push_back(std::move(socket));
      if (open.size() > 20) open.clear();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for_ranks(3, [&](std::int32_t rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(rank * 200));
    const Made made = Bootstrap::create(options_of(rank, 3, job, GetParam()));
    ASSERT_TRUE(made.ok()) << made.error().message;
    const auto texts = (*made)->exchange("compare", "x", 20);
    EXPECT_TRUE(texts.ok());
  });
  stop = true;
  strangers.join();
}

TEST(Bootstrap, AHelloThatComesByteByByteIsUnderstood) {
  const std::string job = new_job();
  std::thread root([&] {
    const Made made = Bootstrap::create(options_of(0, 2, job, ""));
    EXPECT_TRUE(made.ok()) << made.error().message;
  });
  const MeetingPoint point = meeting_point("", job).value();
  Socket socket;
  while (!socket.open()) socket = connect_to(point, 0, 100);
  for (const char c : encode_frame(FrameType::kHello, PacketWriter().text(job).number(1).number(1).number(2).bytes())) {
    std::string one(1, c);
    ASSERT_TRUE(write_some(socket, one));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  root.join();
}

TEST(Bootstrap, WhoDoesNotComeIsNamedOnAllRanks) {
  const std::string job = new_job();
  for_ranks(2, [&](std::int32_t i) {
    BootstrapOptions options = options_of(2 * i, 4, job, "");
    options.start_s = 1;
    const Made made = Bootstrap::create(options);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().kind, ErrorKind::kTimeout);
    EXPECT_NE(made.error().message.find("ranks 1, 3 of 4 did not come"), std::string::npos) << made.error().message;
  });
  BootstrapOptions alone = options_of(1, 2, job, "");
  alone.start_s = 0.2;
  const Made made = Bootstrap::create(alone);
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.error().message.find("rank 1 of 2 did not find rank 0"), std::string::npos) << made.error().message;
}

TEST(Bootstrap, AnotherNumberOfProcessesAndATakenRankAreSaid) {
  const std::string job = new_job();
  for_ranks(2, [&](std::int32_t rank) {
    BootstrapOptions options = options_of(rank, rank == 0 ? 2 : 3, job, "");
    options.start_s = 1 + rank;  // rank 1 also finds nobody, after rank 0 has given up
    const Made made = Bootstrap::create(options);
    ASSERT_FALSE(made.ok());
    EXPECT_NE(made.error().message.find("was told of 3 processes, rank 0 of 2"), std::string::npos)
        << made.error().message;
  });
}

TEST(Bootstrap, APortThatIsTakenIsSaidAndOthersAreTried) {
  const std::string job = new_job();
  const MeetingPoint point = meeting_point("127.0.0.1", job).value();
  MeetingPoint first = point;
  first.ports.resize(1);
  const Result<Socket> taken = listen_at(first);
  ASSERT_TRUE(taken.ok());
  for_ranks(2, [&](std::int32_t rank) {
    const Made made = Bootstrap::create(options_of(rank, 2, job, "127.0.0.1"));
    EXPECT_TRUE(made.ok()) << made.error().message;
  });
  BootstrapOptions options = options_of(0, 2, job, "127.0.0.1:" + std::to_string(first.ports[0]));
  options.start_s = 0.2;
  const Made made = Bootstrap::create(options);
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.error().message.find("in use"), std::string::npos) << made.error().message;
}

TEST(Bootstrap, AddressesAreReadOrRefused) {
  EXPECT_EQ(meeting_point("host:123", "j").value().ports, std::vector<std::uint16_t>{123});
  EXPECT_EQ(meeting_point("host:123", "j").value().host, "host");
  EXPECT_EQ(meeting_point("[fe80::1]:9", "j").value().host, "fe80::1");
  EXPECT_EQ(meeting_point("fe80::1", "j").value().host, "fe80::1");
  EXPECT_GT(meeting_point("host", "j").value().ports.size(), 1u);
  EXPECT_NE(meeting_point("host", "j").value().ports, meeting_point("host", "k").value().ports);
  for (const char* bad : {"host:", "host:0", "host:65536", "host:1x", ":5", "[::1", "[::1]x"}) {
    EXPECT_FALSE(meeting_point(bad, "j").ok()) << bad;
  }
}

TEST(Bootstrap, DifferentCallsFailTheWorldAndNameTheRank) {
  const std::string job = new_job();
  for_ranks(3, [&](std::int32_t rank) {
    const Made made = Bootstrap::create(options_of(rank, 3, job, ""));
    ASSERT_TRUE(made.ok());
    std::atomic<int> told{0};
    (*made)->watch([&](const Error&) { ++told; });
    const auto texts = (*made)->exchange(rank == 2 ? "go" : "stay", "", 20);
    ASSERT_FALSE(texts.ok());
    EXPECT_NE(texts.error().message.find("rank 2 wants to go, but rank 0 wants to stay"), std::string::npos)
        << texts.error().message;
    const auto later = (*made)->exchange("stay", "", 20);
    EXPECT_FALSE(later.ok());
    while (told == 0) std::this_thread::yield();
    (*made)->leave();
    EXPECT_EQ(told, 1);
  });
}

TEST(Bootstrap, WhoLeavesOrIsLateIsNamedToThoseWhoWait) {
  const std::string job = new_job();
  for_ranks(3, [&](std::int32_t rank) {
    const Made made = Bootstrap::create(options_of(rank, 3, job, ""));
    ASSERT_TRUE(made.ok());
    if (rank == 1) return;
    const auto texts = (*made)->exchange("wait", "", 20);
    ASSERT_FALSE(texts.ok());
    EXPECT_EQ(texts.error().kind, ErrorKind::kPeerLost);
    EXPECT_EQ(texts.error().message, "rank 1 has left the world");
  });
  const std::string other = new_job();
  for_ranks(3, [&](std::int32_t rank) {
    const Made made = Bootstrap::create(options_of(rank, 3, other, ""));
    ASSERT_TRUE(made.ok());
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    const auto texts = (*made)->exchange("wait", "", rank == 2 ? 20 : 0.5);
    ASSERT_FALSE(texts.ok());
    EXPECT_NE(texts.error().message.find("rank 0 waited 0.5 s for rank 2 to wait"), std::string::npos)
        << texts.error().message;
  });
}

TEST(Bootstrap, AFailureOfAnyRankReachesAllOthersOnce) {
  for (const int who : {0, 2}) {
    const std::string job = new_job();
    for_ranks(4, [&](std::int32_t rank) {
      const Made made = Bootstrap::create(options_of(rank, 4, job, ""));
      ASSERT_TRUE(made.ok());
      std::mutex mutex;
      std::optional<Error> told;
      (*made)->watch([&](const Error& error) {
        const std::lock_guard<std::mutex> lock(mutex);
        EXPECT_FALSE(told);
        told = error;
      });
      if (rank == who) (*made)->tell_failure({ErrorKind::kTimeout, "it took too long"});
      for (int i = 0; i < 2000; ++i) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          if (told) break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      (*made)->leave();
      ASSERT_TRUE(told);
      EXPECT_EQ(told->kind, ErrorKind::kTimeout);
      EXPECT_EQ(told->message, "it took too long");
    });
  }
}

TEST(Bootstrap, ASilentProcessCountsAsLost) {
  const std::string job = new_job();
  std::thread silent([&] {
    const MeetingPoint point = meeting_point("", job).value();
    Socket socket;
    while (!socket.open()) socket = connect_to(point, 0, 100);
    std::string hello = encode_frame(FrameType::kHello, PacketWriter().text(job).number(1).number(1).number(2).bytes());
    write_some(socket, hello);
    std::this_thread::sleep_for(std::chrono::seconds(3));
  });
  BootstrapOptions options = options_of(0, 2, job, "");
  options.silence_s = 1;
  const Made made = Bootstrap::create(options);
  ASSERT_TRUE(made.ok());
  const auto texts = (*made)->exchange("wait", "", 20);
  ASSERT_FALSE(texts.ok());
  EXPECT_NE(texts.error().message.find("rank 1 has given no sign of life"), std::string::npos) << texts.error().message;
  silent.join();
}

// Rank 0 may be stopped when some have been let in and others have not come yet.
TEST(Bootstrap, ARank0ThatFallsSilentBeforeAllAreThereCountsAsLost) {
  const std::string job = new_job();
  const Result<Socket> listener = listen_at(meeting_point("", job).value());
  ASSERT_TRUE(listener.ok());
  std::thread silent([&] {
    Socket socket;
    while (!socket.open()) socket = accept_from(*listener);
    std::string accepted = encode_frame(FrameType::kAccepted);
    EXPECT_TRUE(write_some(socket, accepted));
    std::this_thread::sleep_for(std::chrono::seconds(4));
  });
  BootstrapOptions options = options_of(1, 3, job, "");
  options.silence_s = 1;
  const auto begin = std::chrono::steady_clock::now();
  const Made made = Bootstrap::create(options);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().kind, ErrorKind::kPeerLost);
  EXPECT_EQ(made.error().message, "rank 0 has given no sign of life for 1 s");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
  silent.join();
}

TEST(Bootstrap, WhoWaitsForALateRankHearsOfRank0Meanwhile) {
  const std::string job = new_job();
  for_ranks(3, [&](std::int32_t rank) {
    BootstrapOptions options = options_of(rank, 3, job, "");
    options.silence_s = 2;
    if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(4));
    const Made made = Bootstrap::create(options);
    EXPECT_TRUE(made.ok()) << rank << ": " << made.error().message;
  });
}

TEST(SharedBlock, AnotherMappingSeesTheSameBytesAndAStaleTicketIsRefused) {
  SharedBlock block = std::move(SharedBlock::create(100'000)).value();
  EXPECT_EQ(block.data()[99'999], std::byte{0});
  const std::string ticket = block.ticket();
  SharedBlock other = std::move(SharedBlock::open(ticket)).value();
  ASSERT_NE(other.data(), block.data());
  other.data()[5] = std::byte{7};
  EXPECT_EQ(block.data()[5], std::byte{7});
  block.close_ticket();
  EXPECT_FALSE(SharedBlock::open(ticket).ok());
  const SharedBlock next = std::move(SharedBlock::create(4096)).value();  // gets the same number
  EXPECT_FALSE(SharedBlock::open(ticket).ok());
  EXPECT_FALSE(SharedBlock::open("garbage").ok());
  // A ticket is made of numbers: no path may come of it.
  const std::string path = PacketWriter().text("1/../../dev").text("zero").text("1").text("0").bytes();
  EXPECT_EQ(SharedBlock::open(path).error().message,
            "a process of this host sent something else than where its memory is");
  EXPECT_EQ(block.data()[5], std::byte{7});
}

}  // namespace
}  // namespace mkernel
