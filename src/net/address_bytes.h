// Addresses of endpoints and heaps as bytes, little-endian. Reading trusts nobody.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "net/process_endpoint.h"

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

inline constexpr std::uint32_t kMaxRails = 16;  // cards of one rank

inline std::string heap_bytes(const RemoteHeap& heap) {
  std::string bytes;
  append_bytes(bytes, heap.key);
  append_bytes(bytes, heap.address);
  append_bytes(bytes, static_cast<std::uint32_t>(heap.rails.size()));
  for (const RemoteHeap& rail : heap.rails) {
    append_bytes(bytes, rail.key);
    append_bytes(bytes, rail.address);
  }
  return bytes;
}

// False when `bytes` are not those of a heap.
inline bool read_heap(std::string_view bytes, RemoteHeap& heap) {
  std::uint32_t count = 0;
  if (!take_bytes(bytes, heap.key) || !take_bytes(bytes, heap.address) || !take_bytes(bytes, count)) return false;
  if (count > kMaxRails) return false;
  heap.rails.assign(count, {});
  for (RemoteHeap& rail : heap.rails) {
    if (!take_bytes(bytes, rail.key) || !take_bytes(bytes, rail.address)) return false;
  }
  return bytes.empty();
}

}  // namespace mkernel
