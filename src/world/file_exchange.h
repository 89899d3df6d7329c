// File descriptors that processes of a host give each other, as CUDA shares memory: over unix sockets without a file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/owned_file.h"
#include "mkernel/result.h"
#include "world/socket.h"

namespace mkernel {

class FileExchange {
 public:
  // Errors: kIo.
  static Result<FileExchange> open();

  // What others must know to give us a file; only who does is heard.
  std::string address() const { return name_ + token_; }
  // Gives `file` (which stays the caller's) to the owners of `addresses`, and returns what each of them gives to us, in
  // the same order. `own` is the place of our own address among them, which gets nothing. Once per exchange.
  // Errors: kTimeout, kIo.
  Result<std::vector<SharedFile>> swap(const std::vector<std::string>& addresses, std::size_t own, int file,
                                       std::int64_t bytes, double deadline_s);

 private:
  bool give(const std::string& address, std::size_t own, int file, std::int64_t bytes, int& error) const;
  bool take(std::vector<SharedFile>& into) const;

  Socket socket_;
  std::string name_;   // of the socket, as the system has chosen it
  std::string token_;  // random bytes that a message to us must begin with
};

}  // namespace mkernel
