#include "exec/cuda/flight_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "plan/print.h"

namespace mkernel {
namespace {

// When each role took its first and its last task: how far a call has come that did not end.
void append_roles(const DeviceTimes& times, std::string& text) {
  const auto micros = [&](std::uint64_t t) { return static_cast<double>(t - times.start) * 1e-3; };
  for (int role = 0; role < kRoleCount; ++role) {
    if (times.first[role] == 0) continue;
    fmt::format_to(std::back_inserter(text), ", {} from {:.1f}", role_name(static_cast<Role>(role)),
                   micros(times.first[role]));
    if (times.last[role] != 0) fmt::format_to(std::back_inserter(text), " to {:.1f}", micros(times.last[role]));
  }
}

std::string line_of(const GpuCall& call, std::uint64_t zero_ns) {
  const DeviceTimes& times = call.times;
  if (times.start == 0) return fmt::format("launched {}, epoch {}, not begun\n", call.op, call.epoch);
  const bool complete = times.end != 0;
  std::string text = fmt::format("{:.6f} s: {} {}, epoch {}", static_cast<double>(times.start - zero_ns) * 1e-9,
                                 complete ? "complete" : "started", call.op, call.epoch);
  if (complete) {
    fmt::format_to(std::back_inserter(text), ", took {:.1f} us", static_cast<double>(times.end - times.start) * 1e-3);
  } else {
    text += ", not complete";
  }
  append_roles(times, text);
  return text + '\n';
}

}  // namespace

void append_calls(const DeviceControl& control, const std::string& op, std::uint64_t start_epoch,
                  std::uint64_t launched, std::vector<GpuCall>& calls) {
  const std::uint64_t complete = control.epoch;
  // The place of the next run is clear, or that run has begun.
  const std::uint64_t kept = std::min(complete - start_epoch, kTimesKept - 1);
  for (std::uint64_t epoch = complete - kept + 1; epoch <= complete; ++epoch) {
    calls.push_back({op, epoch, control.of(epoch)});
  }
  // A replayed graph's launches are not known to the host.
  const bool begun = control.of(complete + 1).start != 0;
  const std::uint64_t end = std::max(launched, complete + (begun ? 1 : 0));
  for (std::uint64_t epoch = complete + 1; epoch <= end; ++epoch) {
    calls.push_back({op, epoch, epoch == complete + 1 ? control.of(epoch) : DeviceTimes{}});
  }
}

std::string flight_text(std::vector<GpuCall> calls, const std::string& failure) {
  // Those that have not begun come last.
  std::stable_sort(calls.begin(), calls.end(),
                   [](const GpuCall& a, const GpuCall& b) { return a.times.start - 1 < b.times.start - 1; });
  if (calls.size() > kTimesKept) calls.erase(calls.begin(), calls.end() - static_cast<std::ptrdiff_t>(kTimesKept));
  std::string text;
  for (const GpuCall& call : calls) text += line_of(call, calls.front().times.start);
  if (!failure.empty()) text += "failed: " + failure + '\n';
  return text;
}

}  // namespace mkernel
