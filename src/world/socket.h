// Sockets as the bootstrap needs them: all non-blocking, closed by their owner, and never inherited by a child.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mkernel/result.h"

namespace mkernel {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close() { *this = Socket(); }

 private:
  int fd_ = -1;
};

// Where rank 0 of a job may be found. All ranks derive the same list.
struct MeetingPoint {
  std::string host;                  // empty: a unix socket of this host, without a file
  std::string name;                  // of the unix socket
  std::vector<std::uint16_t> ports;  // to be tried in turn

  std::string text() const;
};

// `address` is "", "host", "host:port" or "[ip6]:port". Without a port, several that depend on the job's name are
// tried, so that jobs stay out of each other's way. Errors: kBadArgument.
Result<MeetingPoint> meeting_point(std::string_view address, std::string_view job);

// Rank 0: at the first place that is free. Errors: kIo.
Result<Socket> listen_at(const MeetingPoint& point);
// A connection that somebody has made; not open() when there is none.
Socket accept_from(const Socket& listener);
// Connects to the `index`-th place, waiting at most `wait_ms`; not open() with errno when nobody is there.
Socket connect_to(const MeetingPoint& point, std::size_t index, int wait_ms);

// The IP address of our end; "127.0.0.1" for a unix socket.
std::string own_address(const Socket& socket);

// Reads what is there, appended to `into`; false when the other side is gone.
bool read_some(const Socket& socket, std::string& into);
// Writes the begin of `from` as far as there is room, and takes it off; false when the other side is gone.
bool write_some(const Socket& socket, std::string& from);

}  // namespace mkernel
