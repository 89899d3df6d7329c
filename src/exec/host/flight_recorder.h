// The last operations of a rank, kept at all times, so that a failure can be explained afterwards.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>

#include "net/transport.h"
#include "plan/task.h"

namespace mkernel {

enum class FlightState : std::uint8_t {
  kLaunched,  // the caller has handed a call over
  kStarted,   // the call's turn has come
  kBegun,     // an SM has taken a task
  kDone,
  kPosted,    // the record of a send task is in its ring
  kStamped,   // a stamp from the network has become visible; `index` is its flag, parity included
  kComplete,  // the call is over
  kFailed,    // the world has failed
};

struct FlightEntry {
  Nanos time_ns = 0;
  FlightState state = FlightState::kLaunched;
  std::uint32_t op = 0;  // number of the operator in its world
  Role role = Role::kCompute;
  std::uint16_t lane = 0;
  std::uint64_t epoch = 0;
  std::int64_t index = -1;  // -1: the call as a whole
  std::int32_t peer = -1;   // -1: none
};

// Written by any thread, without locks or allocation. Entries that are being overwritten while they are read may come
// out mixed; nothing else may.
class FlightRecorder {
 public:
  static constexpr std::size_t kEntries = 1024;

  void note(const FlightEntry& entry);
  // One line per operation, oldest first, times in seconds since `start_ns`. `names` are the operators', by number.
  std::string text(Nanos start_ns, std::span<const std::string> names) const;

 private:
  struct Slot {
    std::atomic<std::int64_t> time_ns{0};
    std::atomic<std::uint64_t> what{0};  // peer, state, role, op, lane
    std::atomic<std::uint64_t> epoch{0};
    std::atomic<std::int64_t> index{0};
  };

  std::array<Slot, kEntries> slots_;
  std::atomic<std::uint64_t> count_{0};
};

}  // namespace mkernel
