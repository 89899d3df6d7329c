#include "world/socket.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>

namespace mkernel {
namespace {

constexpr int kPortsTried = 16;
// Ports that Linux gives to nobody by itself (ip_local_port_range begins at 32768).
constexpr std::uint32_t kFirstPort = 20'000;
constexpr std::uint32_t kPortCount = 12'000;
constexpr int kBacklog = 512;

// FNV-1a, 64 bits.
std::uint64_t hash(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return value;
}

sockaddr_un unix_address(const std::string& name, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  // A first byte of 0 makes it abstract: no file, and gone with its last user.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Socket new_socket(int family) { return Socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

// Abstract unix sockets have no permissions: another user's process is as good as none.
bool same_user(const Socket& socket, int family) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  return family != AF_UNIX ||
         (getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == getuid());
}

void send_at_once(const Socket& socket) {
  const int on = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // fails on unix sockets, which need it not
}

// On all interfaces, for both kinds of IP where the system has both.
Socket listen_on_port(std::uint16_t port) {
  for (const int family : {AF_INET6, AF_INET}) {
    Socket socket = new_socket(family);
    if (!socket.open()) continue;
    const int on = 1;
    const int off = 0;
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int code = 0;
    if (family == AF_INET6) {
      setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      sockaddr_in6 address = {};
      address.sin6_family = AF_INET6;
      address.sin6_addr = in6addr_any;
      address.sin6_port = htons(port);
      code = bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    } else {
      sockaddr_in address = {};
      address.sin_family = AF_INET;
      address.sin_port = htons(port);
      code = bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    }
    if (code == 0 && listen(socket.fd(), kBacklog) == 0) return socket;
    if (errno == EADDRINUSE) return {};
  }
  return {};
}

// Waits for a connection that is being made.
bool connected(const Socket& socket, int wait_ms) {
  pollfd entry = {socket.fd(), POLLOUT, 0};
  if (poll(&entry, 1, wait_ms) != 1) {
    errno = ETIMEDOUT;
    return false;
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  errno = error;
  return error == 0;
}

Socket connect_address(const sockaddr* address, socklen_t length, int wait_ms) {
  Socket socket = new_socket(address->sa_family);
  if (!socket.open()) return {};
  if (connect(socket.fd(), address, length) != 0) {
    if (errno != EINPROGRESS || !connected(socket, wait_ms)) return {};
  }
  if (!same_user(socket, address->sa_family)) {
    errno = EACCES;
    return {};
  }
  send_at_once(socket);
  return socket;
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

std::string MeetingPoint::text() const {
  if (host.empty()) return fmt::format("this host's socket @{}", name);
  return ports.size() == 1 ? fmt::format("{} port {}", host, ports[0])
                           : fmt::format("{} ports {}", host, fmt::join(ports, ", "));
}

Result<MeetingPoint> meeting_point(std::string_view address, std::string_view job) {
  MeetingPoint point;
  if (address.empty()) {
    point.name = fmt::format("mkernel-{}-{:016x}{:016x}", getuid(), hash(job), hash(std::string(job) + "2"));
    return point;
  }
  std::string_view port;
  std::string_view host = address;
  if (host.front() == '[') {
    const std::size_t end = host.find(']');
    if (end == std::string_view::npos) {
      return bad_argument(fmt::format("the address {} of rank 0 has a [ without a ]", address));
    }
    if (end + 1 < host.size()) port = host.substr(end + 1);
    host = host.substr(1, end - 1);
  } else if (const std::size_t colon = host.find(':'); colon != std::string_view::npos && colon == host.rfind(':')) {
    port = host.substr(colon);
    host = host.substr(0, colon);
  }
  point.host = host;
  if (port.empty()) {
    for (int i = 0; i < kPortsTried; ++i) {
      const std::uint64_t draw = hash(fmt::format("{}/{}", job, i));
      point.ports.push_back(static_cast<std::uint16_t>(kFirstPort + draw % kPortCount));
    }
    return point;
  }
  std::uint32_t number = 0;
  const char* end = port.data() + port.size();
  const auto parsed = std::from_chars(port.data() + 1, end, number);
  if (host.empty() || port[0] != ':' || parsed.ec != std::errc() || parsed.ptr != end || number < 1 ||
      number > 65'535) {
    return bad_argument(fmt::format(
        "the address {} of rank 0 must be HOST, HOST:PORT or [IP6]:PORT with a port of 1 to 65535", address));
  }
  point.ports.push_back(static_cast<std::uint16_t>(number));
  return point;
}

Result<Socket> listen_at(const MeetingPoint& point) {
  if (point.host.empty()) {
    socklen_t length = 0;
    const sockaddr_un address = unix_address(point.name, length);
    Socket socket = new_socket(AF_UNIX);
    if (socket.open() && bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
        listen(socket.fd(), kBacklog) == 0) {
      return socket;
    }
  } else {
    for (const std::uint16_t port : point.ports) {
      if (Socket socket = listen_on_port(port); socket.open()) return socket;
    }
  }
  return Error{ErrorKind::kIo,
               fmt::format("rank 0 cannot wait for the other ranks at {}: {}", point.text(), std::strerror(errno))};
}

Socket accept_from(const Socket& listener) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  Socket socket(accept4(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket.open() || !same_user(socket, address.ss_family)) return {};
  send_at_once(socket);
  return socket;
}

Socket connect_to(const MeetingPoint& point, std::size_t index, int wait_ms) {
  if (point.host.empty()) {
    socklen_t length = 0;
    const sockaddr_un address = unix_address(point.name, length);
    return connect_address(reinterpret_cast<const sockaddr*>(&address), length, wait_ms);
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(point.ports[index]);
  if (getaddrinfo(point.host.c_str(), port.c_str(), &hints, &found) != 0) {
    errno = EHOSTUNREACH;
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, &freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (Socket socket = connect_address(entry->ai_addr, entry->ai_addrlen, wait_ms); socket.open()) return socket;
  }
  return {};
}

std::string own_address(const Socket& socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return "127.0.0.1";
  std::array<char, INET6_ADDRSTRLEN> text = {};
  if (address.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text.data(), text.size());
    return text.data();
  }
  if (address.ss_family != AF_INET6) return "127.0.0.1";
  const in6_addr& ip6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&ip6)) {
    inet_ntop(AF_INET, ip6.s6_addr + 12, text.data(), text.size());
  } else {
    inet_ntop(AF_INET6, &ip6, text.data(), text.size());
  }
  return text.data();
}

bool read_some(const Socket& socket, std::string& into) {
  std::array<char, 65'536> bytes;
  const ssize_t count = recv(socket.fd(), bytes.data(), bytes.size(), 0);
  if (count > 0) into.append(bytes.data(), static_cast<std::size_t>(count));
  return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

bool write_some(const Socket& socket, std::string& from) {
  if (from.empty()) return true;
  const ssize_t count = send(socket.fd(), from.data(), from.size(), MSG_NOSIGNAL);
  if (count > 0) from.erase(0, static_cast<std::size_t>(count));
  return count >= 0 || errno == EAGAIN || errno == EINTR;
}

}  // namespace mkernel
