#include "cli/console.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

namespace mkernel::cli {

ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadArgument:
    case ErrorKind::kOutOfMemory: return ExitCode::kBadArguments;
    case ErrorKind::kCheckFailed: return ExitCode::kCheckFailed;
    case ErrorKind::kTimeout:
    case ErrorKind::kPeerLost:
    case ErrorKind::kAborted:
    case ErrorKind::kIo: return ExitCode::kRunFailed;
    case ErrorKind::kUnsupported: return ExitCode::kBadArguments;
  }
  return ExitCode::kRunFailed;
}

std::string_view kind_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadArgument: return "bad argument";
    case ErrorKind::kOutOfMemory: return "out of memory";
    case ErrorKind::kCheckFailed: return "check failed";
    case ErrorKind::kTimeout: return "timeout";
    case ErrorKind::kPeerLost: return "peer lost";
    case ErrorKind::kAborted: return "aborted";
    case ErrorKind::kIo: return "input or output";
    case ErrorKind::kUnsupported: return "not supported here";
  }
  return "?";
}

void Console::note(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(line_shown_, false)) err_ << "\r\x1b[K";
  err_ << text << "\n" << std::flush;
}

void Console::status_line(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (text.empty() && !line_shown_) return;
  err_ << "\r\x1b[K" << text << std::flush;
  line_shown_ = !text.empty();
}

void Console::json(const nlohmann::ordered_json& object) {
  out_ << object.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n" << std::flush;
}

ExitCode Console::fail(const Error& error, bool as_json) {
  note((rank_ < 0 ? "mkernel: " : fmt::format("mkernel (rank {}): ", rank_)) + error.message);
  const ExitCode code = exit_code(error.kind);
  if (as_json && leads() && code != ExitCode::kBadArguments) {
    json({{"ok", false}, {"error", {{"kind", kind_name(error.kind)}, {"message", error.message}}}});
  }
  return code;
}

Progress::Progress(Console& console, std::string state)
    : console_(console), state_(std::move(state)), thread_([this] { work(); }) {}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  console_.status_line("");
}

void Progress::set(std::string state) {
  const std::lock_guard lock(mutex_);
  state_ = std::move(state);
}

void Progress::work() {
  using namespace std::chrono_literals;
  const auto start = std::chrono::steady_clock::now();
  const auto interval = console_.terminal() ? 250ms : 2000ms;
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, interval, [this] { return stop_; })) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!console_.leads()) continue;
    const std::string text = fmt::format("{}, {:.0f} s", state_, seconds);
    lock.unlock();
    if (console_.terminal()) {
      console_.status_line(text);
    } else {
      console_.note(text);
    }
    lock.lock();
  }
}

}  // namespace mkernel::cli
