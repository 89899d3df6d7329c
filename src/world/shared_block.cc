#include "world/shared_block.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "world/packet.h"

namespace mkernel {

SharedBlock::~SharedBlock() {
  close_ticket();
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

void SharedBlock::swap(SharedBlock& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

Status SharedBlock::map() {
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (data == MAP_FAILED) {
    return Error{ErrorKind::kOutOfMemory,
                 fmt::format("{} bytes of shared memory cannot be mapped: {}", bytes_, std::strerror(errno))};
  }
  data_ = static_cast<std::byte*>(data);
  return Ok{};
}

Result<SharedBlock> SharedBlock::create(std::int64_t bytes) {
  SharedBlock block;
  block.bytes_ = bytes;
  block.file_ = memfd_create("mkernel", MFD_CLOEXEC);
  if (block.file_ < 0 || ftruncate(block.file_, bytes) != 0) {
    return Error{ErrorKind::kOutOfMemory,
                 fmt::format("the system gives no {} bytes of shared memory: {}", bytes, std::strerror(errno))};
  }
  if (Status status = block.map(); !status.ok()) return status.error();
  return block;
}

std::string SharedBlock::ticket() const {
  struct stat status = {};
  fstat(file_, &status);
  return PacketWriter()
      .text(std::to_string(getpid()))
      .text(std::to_string(file_))
      .text(std::to_string(status.st_ino))
      .text(std::to_string(bytes_))
      .bytes();
}

Result<SharedBlock> SharedBlock::open(const std::string& ticket) {
  PacketReader reader(ticket);
  const std::string process = reader.text();
  const std::string file = reader.text();
  const std::string number = reader.text();
  const std::string bytes = reader.text();
  // Numbers, lest a path come of them that leads elsewhere.
  for (const std::string& text : {process, file}) {
    if (text.empty() || !std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      return Error{ErrorKind::kIo, "a process of this host sent something else than where its memory is"};
    }
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", process, file);
  SharedBlock block;
  block.file_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (block.file_ < 0) {
    return Error{ErrorKind::kIo, fmt::format("the memory of process {} cannot be opened ({}): {}; processes of a node "
                                             "must belong to one user and see each other in /proc",
                                             process, path, std::strerror(errno))};
  }
  struct stat status = {};
  fstat(block.file_, &status);
  // Another process may have got the number since.
  if (!reader.complete() || std::to_string(status.st_ino) != number || std::to_string(status.st_size) != bytes) {
    return Error{ErrorKind::kIo, fmt::format("{} is no longer the memory that process {} shares", path, process)};
  }
  block.bytes_ = status.st_size;
  if (Status mapped = block.map(); !mapped.ok()) return mapped.error();
  return block;
}

void SharedBlock::close_ticket() {
  if (file_ >= 0) close(std::exchange(file_, -1));
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = {};
  static_cast<void>(!readlink("/proc/self/ns/pid", space, sizeof space - 1));
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return fmt::format("{} ({} {})", name, boot, space);
}

}  // namespace mkernel
