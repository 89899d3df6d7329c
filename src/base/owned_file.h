// File descriptors with an owner.
#pragma once
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace mkernel {

// Closes what it holds.
class OwnedFile {
 public:
  OwnedFile() = default;
  explicit OwnedFile(int fd) : fd_(fd) {}
  OwnedFile(OwnedFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFile& operator=(OwnedFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFile() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Memory of another process, and how much of it there is.
struct SharedFile {
  OwnedFile file;
  std::int64_t bytes = 0;
};

}  // namespace mkernel
