#include "world/file_exchange.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "base/check.h"

namespace mkernel {
namespace {

constexpr std::size_t kNameBytes = 6;  // of a name that the system chooses: a zero and five digits
constexpr std::size_t kTokenBytes = 16;

struct Message {
  char token[kTokenBytes];
  std::uint64_t from = 0;
  std::int64_t bytes = 0;
};

union Control {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

Error io_error(const char* doing) { return {ErrorKind::kIo, fmt::format("{}: {}", doing, std::strerror(errno))}; }

}  // namespace

Result<FileExchange> FileExchange::open() {
  FileExchange exchange;
  exchange.socket_ = Socket(socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!exchange.socket_.open()) return io_error("making a socket for file descriptors");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Without a name the system chooses one that is free.
  if (bind(exchange.socket_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0) {
    return io_error("naming a socket for file descriptors");
  }
  socklen_t size = sizeof address;
  if (getsockname(exchange.socket_.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return io_error("asking for the name of a socket");
  }
  MK_CHECK_OP(size, ==, sizeof(sa_family_t) + kNameBytes);
  exchange.name_.assign(address.sun_path, kNameBytes);
  exchange.token_.resize(kTokenBytes);
  if (getrandom(exchange.token_.data(), kTokenBytes, 0) != static_cast<ssize_t>(kTokenBytes)) {
    return io_error("asking for random bytes");
  }
  return exchange;
}

// False with errno in `error` when it did not go.
bool FileExchange::give(const std::string& to, std::size_t own, int file, std::int64_t bytes, int& error) const {
  Message message;
  std::memcpy(message.token, to.data() + kNameBytes, kTokenBytes);
  message.from = own;
  message.bytes = bytes;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, to.data(), kNameBytes);
  iovec data{&message, sizeof message};
  Control control{};
  msghdr header{};
  header.msg_name = &address;
  header.msg_namelen = sizeof(sa_family_t) + kNameBytes;
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = &control;
  header.msg_controllen = sizeof control;
  cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &file, sizeof file);
  if (sendmsg(socket_.fd(), &header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof message)) return true;
  error = errno;
  return false;
}

// One message, if there is any. What does not know the token, or comes from nobody we wait for, is thrown away.
bool FileExchange::take(std::vector<SharedFile>& into) const {
  Message message;
  iovec data{&message, sizeof message};
  Control control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = &control;
  header.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket_.fd(), &header, MSG_CMSG_CLOEXEC);
  if (got < 0) return false;
  OwnedFile file;
  const cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS && rights->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
    file = OwnedFile(fd);
  }
  const bool known = got == static_cast<ssize_t>(sizeof message) && file.fd() >= 0 &&
                     std::memcmp(message.token, token_.data(), kTokenBytes) == 0 && message.from < into.size() &&
                     message.bytes > 0;
  if (known && into[message.from].file.fd() < 0) into[message.from] = {std::move(file), message.bytes};
  return true;
}

Result<std::vector<SharedFile>> FileExchange::swap(const std::vector<std::string>& addresses, std::size_t own, int file,
                                                   std::int64_t bytes, double deadline_s) {
  MK_CHECK_OP(own, <, addresses.size());
  for (const std::string& address : addresses) {
    if (address.size() != kNameBytes + kTokenBytes) {
      return Error{ErrorKind::kAborted, "a rank sent something else than the address of its socket"};
    }
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(deadline_s, 1e9));
  std::vector<SharedFile> files(addresses.size());
  std::size_t given = 0;
  for (;;) {
    int error = 0;
    while (given < addresses.size() && (given == own || give(addresses[given], own, file, bytes, error))) ++given;
    if (error != 0 && error != EAGAIN && error != ENOBUFS) {
      errno = error;
      return io_error("giving a file descriptor to another process of this host");
    }
    while (take(files)) {
    }
    const auto missing =
        std::count_if(files.begin(), files.end(), [](const SharedFile& shared) { return shared.file.fd() < 0; });
    if (given == addresses.size() && missing == 1) return files;  // our own
    if (std::chrono::steady_clock::now() > end) {
      return Error{ErrorKind::kTimeout, fmt::format("waited {:.1f} s for file descriptors of {} processes of this host",
                                                    deadline_s, missing - 1)};
    }
    pollfd wait{socket_.fd(), POLLIN, 0};
    static_cast<void>(poll(&wait, 1, 1));
  }
}

}  // namespace mkernel
