// Memory that the processes of a host share. It has no name, so nothing is left behind however they end.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "mkernel/result.h"

namespace mkernel {

class SharedBlock {
 public:
  SharedBlock() = default;
  SharedBlock(SharedBlock&& other) noexcept { swap(other); }
  SharedBlock& operator=(SharedBlock&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedBlock();

  // Zeroed. Errors: kOutOfMemory.
  static Result<SharedBlock> create(std::int64_t bytes);
  // A block of another process of this host, by what its ticket() says. Errors: kIo.
  static Result<SharedBlock> open(const std::string& ticket);

  // What another process must know to open the block. Good until close_ticket().
  std::string ticket() const;
  // Afterwards nobody can open the block any more; who has it keeps it.
  void close_ticket();

  std::byte* data() const { return data_; }

 private:
  void swap(SharedBlock& other) noexcept;
  Status map();

  int file_ = -1;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Two processes that have the same can open each other's blocks: it names the running system and its process numbers.
std::string host_identity();

}  // namespace mkernel
