// Errors as values: every public call that can fail returns a Result.
#pragma once
#include <string>
#include <utility>
#include <variant>

namespace mkernel {

// What kind of failure it was; the CLI maps these to exit codes.
enum class ErrorKind {
  kBadArgument,  // refused before anything started; the message names the argument and what is accepted
  kOutOfMemory,  // refused before anything started: the call needs more memory than there is
  kCheckFailed,  // ran to the end, and a result was found wrong
  kTimeout,      // a wait passed its deadline
  kPeerLost,     // a rank died, or the network reported that it is gone
  kAborted,      // this world has failed before; create a new one
  kIo,           // a file could not be read or written
  kUnsupported,  // this machine, or this build, lacks what the call needs; the message names it
};

// One sentence for a person, and a kind for a program.
struct Error {
  ErrorKind kind = ErrorKind::kBadArgument;
  std::string message;
};

inline Error bad_argument(std::string message) { return {ErrorKind::kBadArgument, std::move(message)}; }

// Either a value or an Error. `value()` on an error is a bug of the caller and throws std::bad_variant_access.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : data_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : data_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return data_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& value() & { return std::get<0>(data_); }
  const T& value() const& { return std::get<0>(data_); }
  T&& value() && { return std::get<0>(std::move(data_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const { return std::get<1>(data_); }

 private:
  std::variant<T, Error> data_;
};

// Success without a value.
struct Ok {};
using Status = Result<Ok>;

}  // namespace mkernel
