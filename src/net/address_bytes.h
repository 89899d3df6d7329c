// Addresses of queue pairs as bytes, little-endian. Reading trusts nobody.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace mkernel {

template <class T>
void append_bytes(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Takes a value from the front; false when there is none.
template <class T>
bool take_bytes(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof value) return false;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return true;
}

}  // namespace mkernel
