// How the processes of a world find each other, agree, and notice that one has died.
//
// Rank 0 listens, all others connect to it, and these connections stay open: a process that dies closes its own,
// whatever killed it, and rank 0 tells the rest. A host that vanishes without a word is noticed by missing signs of
// life. One thread per process, the watch, does all reading and writing.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "mkernel/result.h"
#include "world/packet.h"
#include "world/socket.h"

namespace mkernel {

struct BootstrapOptions {
  std::int32_t rank = 0;
  std::int32_t size = 2;  // at least 2
  std::string job;        // only processes that give the same are let in
  std::string address;    // of rank 0, see meeting_point()
  double start_s = 60;    // in which all must have come
  double silence_s = 15;  // after which a process that gives no sign of life counts as lost
};

class Bootstrap {
 public:
  // What happened to another process, or what it tells of itself. Called by the watch at most once.
  using OnFailure = std::function<void(const Error&)>;

  // Returns when all processes are there. Errors: kBadArgument, kIo, kTimeout (and who is missing), kPeerLost.
  static Result<std::unique_ptr<Bootstrap>> create(const BootstrapOptions& options);
  ~Bootstrap() { leave(); }
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  // From now on failures go to `on_failure`; one that has happened before at once.
  void watch(OnFailure on_failure);

  // Gives all ranks everybody's text, by rank. All ranks must call it with the same label, in the same order; one that
  // does not is named, and the world fails. Errors: kTimeout, kPeerLost, kAborted, kBadArgument (text too long).
  Result<std::vector<std::string>> exchange(const std::string& label, const std::string& text, double deadline_s);

  // Leaves in good order, after which nothing is heard or said; a process that ends without doing so counts as dead.
  void leave();

  // Tells all other processes that this one cannot go on. The first error that anybody tells counts.
  void tell_failure(const Error& error);

  // IP address of this host on its way to rank 0 (for rank 0: to rank 1).
  const std::string& local_address() const { return local_address_; }

  static constexpr std::size_t kMaxTextBytes = 4096;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::int32_t rank = -1;
    Socket socket;
    FrameParser parser{0};
    std::string out;
    Clock::time_point last_heard;
    bool leaving = false;  // has said goodbye
  };
  struct Gather {
    std::vector<std::optional<std::string>> texts;  // by rank; the label comes first
    std::int32_t missing = 0;
  };

  explicit Bootstrap(const BootstrapOptions& options);
  Status wait_for_all(const MeetingPoint& point);
  Status find_rank_0(const MeetingPoint& point);
  bool is_root() const { return options_.rank == 0; }
  std::size_t max_payload() const;

  void run_watch();
  void poke();
  void read_peer(Peer& peer);
  void handle(Peer& peer, const Frame& frame);
  void lose(Peer& peer, const std::string& how);
  void fail(const Error& error, std::int32_t told_by);
  static Error has_left(const Peer& peer);
  void send(Peer& peer, FrameType type, std::string_view payload = {});
  void gather(std::uint32_t number, std::int32_t rank, std::string label_and_text);
  void finish_gather(std::uint32_t number);

  BootstrapOptions options_;
  std::string local_address_;
  std::vector<Peer> peers_;  // rank 0: all others; else rank 0
  Socket wake_;              // an event counter that ends the watch's poll()

  std::mutex mutex_;  // guards all below, and peers_ once the watch runs
  std::condition_variable changed_;
  OnFailure on_failure_;
  std::optional<Error> failure_;
  std::map<std::uint32_t, Gather> gathers_;                     // rank 0: not complete yet
  std::map<std::uint32_t, std::vector<std::string>> gathered_;  // complete, not yet taken
  std::uint32_t next_gather_ = 0;
  bool exchanging_ = false;  // a thread of this process waits in exchange()
  bool stop_ = false;
  std::mutex exchange_mutex_;  // one exchange at a time
  std::thread watch_;
};

}  // namespace mkernel
