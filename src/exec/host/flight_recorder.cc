#include "exec/host/flight_recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>

#include "plan/print.h"

namespace mkernel {
namespace {

std::string_view state_name(FlightState state) {
  switch (state) {
    case FlightState::kLaunched: return "launched";
    case FlightState::kStarted: return "started";
    case FlightState::kBegun: return "begun";
    case FlightState::kDone: return "done";
    case FlightState::kPosted: return "posted";
    case FlightState::kStamped: return "stamped";
    case FlightState::kComplete: return "complete";
    case FlightState::kFailed: return "failed";
  }
  return "?";
}

std::uint64_t pack(const FlightEntry& entry) {
  return std::uint64_t{entry.lane} | std::uint64_t{entry.op & 0xff} << 16 |
         static_cast<std::uint64_t>(entry.role) << 24 | static_cast<std::uint64_t>(entry.state) << 28 |
         std::uint64_t{static_cast<std::uint32_t>(entry.peer)} << 32;
}

FlightEntry unpack(std::uint64_t word) {
  FlightEntry entry;
  entry.lane = static_cast<std::uint16_t>(word);
  entry.op = static_cast<std::uint32_t>(word >> 16 & 0xff);
  entry.role = static_cast<Role>(word >> 24 & 0xf);
  entry.state = static_cast<FlightState>(word >> 28 & 0xf);
  entry.peer = static_cast<std::int32_t>(static_cast<std::uint32_t>(word >> 32));
  return entry;
}

}  // namespace

void FlightRecorder::note(const FlightEntry& entry) {
  // order: none. Entries are read for a person, after the fact; each word is whole.
  const std::uint64_t number = count_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slots_[number % kEntries];
  slot.time_ns.store(entry.time_ns, std::memory_order_relaxed);
  slot.what.store(pack(entry), std::memory_order_relaxed);
  slot.epoch.store(entry.epoch, std::memory_order_relaxed);
  slot.index.store(entry.index, std::memory_order_relaxed);
}

std::string FlightRecorder::text(Nanos start_ns, std::span<const std::string> names) const {
  const std::uint64_t end = count_.load(std::memory_order_relaxed);
  const std::uint64_t begin = end - std::min<std::uint64_t>(end, kEntries);
  std::string text;
  for (std::uint64_t number = begin; number < end; ++number) {
    const Slot& slot = slots_[number % kEntries];
    const FlightEntry entry = unpack(slot.what.load(std::memory_order_relaxed));
    const std::uint64_t epoch = slot.epoch.load(std::memory_order_relaxed);
    const std::int64_t index = slot.index.load(std::memory_order_relaxed);
    const double time_s = static_cast<double>(slot.time_ns.load(std::memory_order_relaxed) - start_ns) * 1e-9;
    auto out = std::back_inserter(text);
    fmt::format_to(out, "{:.6f} s: {:<8}", time_s, state_name(entry.state));
    if (entry.state == FlightState::kFailed || entry.op >= names.size()) {
      text += " the world\n";
      continue;
    }
    fmt::format_to(out, " {}, epoch {}", names[entry.op], epoch);
    if (entry.state == FlightState::kStamped) {
      fmt::format_to(out, ", flag {}", index);
    } else if (index >= 0) {
      fmt::format_to(out, ", {} lane {} task {}", role_name(entry.role), entry.lane, index);
    }
    if (entry.peer >= 0) fmt::format_to(out, ", peer {}", entry.peer);
    text += '\n';
  }
  return text;
}

}  // namespace mkernel
