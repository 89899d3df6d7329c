#include "world/file_exchange.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <thread>

namespace mkernel {
namespace {

OwnedFile file_with(char content) {
  OwnedFile file(memfd_create("file_exchange_test", MFD_CLOEXEC));
  EXPECT_EQ(write(file.fd(), &content, 1), 1);
  return file;
}

char content_of(const SharedFile& shared) {
  char content = 0;
  EXPECT_EQ(pread(shared.file.fd(), &content, 1, 0), 1);
  return content;
}

TEST(FileExchangeTest, EverybodyGetsEverybodysFile) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{2}, std::size_t{40}}) {
    std::vector<FileExchange> exchanges;
    std::vector<std::string> addresses;
    for (std::size_t i = 0; i < count; ++i) {
      auto exchange = FileExchange::open();
      ASSERT_TRUE(exchange.ok()) << exchange.error().message;
      addresses.push_back(exchange->address());
      exchanges.push_back(std::move(*exchange));
    }
    std::vector<std::thread> threads;
    for (std::size_t own = 0; own < count; ++own) {
      threads.emplace_back([&, own] {
        const OwnedFile mine = file_with(static_cast<char>(own + 1));
        const auto files = exchanges[own].swap(addresses, own, mine.fd(), static_cast<std::int64_t>(own) + 100, 20);
        ASSERT_TRUE(files.ok()) << files.error().message;
        for (std::size_t i = 0; i < count; ++i) {
          if (i == own) continue;
          EXPECT_EQ(content_of((*files)[i]), static_cast<char>(i + 1));
          EXPECT_EQ((*files)[i].bytes, static_cast<std::int64_t>(i) + 100);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(FileExchangeTest, StrangersAreNotHeardAndWaitingEnds) {
  auto exchange = FileExchange::open();
  auto other = FileExchange::open();
  ASSERT_TRUE(exchange.ok() && other.ok());
  // Somebody who has seen the name of the socket, but does not know the token.
  const Socket stranger(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path, exchange->address().data(), 6);
  const char garbage[64] = {};
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{3}, sizeof garbage}) {
    EXPECT_EQ(sendto(stranger.fd(), garbage, bytes, 0, reinterpret_cast<sockaddr*>(&to), sizeof(sa_family_t) + 6),
              static_cast<ssize_t>(bytes));
  }
  const OwnedFile mine = file_with('x');
  const auto files = exchange->swap({exchange->address(), other->address()}, 0, mine.fd(), 1, 0.05);
  ASSERT_FALSE(files.ok());
  EXPECT_EQ(files.error().kind, ErrorKind::kTimeout);
  EXPECT_NE(files.error().message.find("1 processes"), std::string::npos) << files.error().message;
}

TEST(FileExchangeTest, AProcessThatIsGoneIsAnError) {
  auto exchange = FileExchange::open();
  ASSERT_TRUE(exchange.ok());
  std::string gone;
  {
    auto other = FileExchange::open();
    ASSERT_TRUE(other.ok());
    gone = other->address();
  }
  const OwnedFile mine = file_with('x');
  const auto files = exchange->swap({exchange->address(), gone}, 0, mine.fd(), 1, 5);
  ASSERT_FALSE(files.ok());
  EXPECT_EQ(files.error().kind, ErrorKind::kIo);
}

}  // namespace
}  // namespace mkernel
