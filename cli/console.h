// Where a command writes: results to `out`; notes, warnings and progress to `err`, from any thread.
#pragma once
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <thread>

#include "mkernel/result.h"

namespace mkernel::cli {

enum class ExitCode : int { kGood = 0, kCheckFailed = 1, kBadArguments = 2, kRunFailed = 3 };

ExitCode exit_code(ErrorKind kind);
// "timeout", "peer lost" and so on.
std::string_view kind_name(ErrorKind kind);

class Console {
 public:
  // `err_is_terminal`: progress is shown in one line that is written over.
  Console(std::ostream& out, std::ostream& err, bool err_is_terminal)
      : out_(out), err_(err), terminal_(err_is_terminal) {}

  // This process is one of several. Errors say which, and only rank 0 shows results and progress.
  void speak_for_rank(int rank) { rank_ = rank; }
  bool leads() const { return rank_ <= 0; }

  std::ostream& out() { return out_; }
  bool terminal() const { return terminal_; }

  // A line on err.
  void note(const std::string& text);
  // The line that a terminal shows until the next one; empty takes it away.
  void status_line(const std::string& text);
  // One object, indented, on out. Bytes that are not UTF-8 are replaced.
  void json(const nlohmann::ordered_json& object);
  // Says "mkernel: <message>" on err, and with `as_json` the same on out. Returns the exit code of its kind.
  ExitCode fail(const Error& error, bool as_json = false);

 private:
  std::ostream& out_;
  std::ostream& err_;
  bool terminal_;
  int rank_ = -1;
  std::mutex mutex_;
  bool line_shown_ = false;
};

// Says on err what long work is doing: after 2 s and every 2 s; on a terminal in one line, more often. Work that ends
// sooner leaves no trace.
class Progress {
 public:
  explicit Progress(Console& console, std::string state);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void set(std::string state);

 private:
  void work();

  Console& console_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::string state_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace mkernel::cli
