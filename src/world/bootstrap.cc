#include "world/bootstrap.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace mkernel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kProtocolVersion = 1;
constexpr std::size_t kMaxHello = 4096;
constexpr std::size_t kMaxStrangers = 256;               // connections that have not yet said who they are
constexpr auto kIntroduction = std::chrono::seconds(5);  // in which they must
constexpr auto kAnswer = std::chrono::seconds(3);        // in which rank 0 must answer; whoever does not is another
constexpr auto kRetryPause = std::chrono::milliseconds(20);
constexpr auto kBeatPause = std::chrono::milliseconds(500);
constexpr auto kFarewell = std::chrono::seconds(1);  // for what is still to be written when a process leaves
constexpr int kConnectMs = 2000;

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e8)));
}

int milliseconds_until(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left + 1, 0, 1000));
}

// Writes a few bytes to a socket whose buffer is empty.
bool write_small(const Socket& socket, FrameType type, std::string_view payload) {
  std::string bytes = encode_frame(type, payload);
  return write_some(socket, bytes) && bytes.empty();
}

}  // namespace

Bootstrap::Bootstrap(const BootstrapOptions& options) : options_(options) {
  MK_CHECK(options.size >= 2 && options.rank >= 0 && options.rank < options.size);
}

std::size_t Bootstrap::max_payload() const {
  return static_cast<std::size_t>(options_.size) * (2 * kMaxTextBytes + 16) + 1024;
}

Result<std::unique_ptr<Bootstrap>> Bootstrap::create(const BootstrapOptions& options) {
  if (options.job.size() > kMaxHello / 2) return bad_argument("the job's name is longer than 2048 bytes");
  const Result<MeetingPoint> point = meeting_point(options.address, options.job);
  if (!point.ok()) return point.error();
  std::unique_ptr<Bootstrap> bootstrap(new Bootstrap(options));
  bootstrap->wake_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!bootstrap->wake_.open()) {
    return Error{ErrorKind::kIo, fmt::format("the system gives no event counter: {}", std::strerror(errno))};
  }
  const Status met = bootstrap->is_root() ? bootstrap->wait_for_all(*point) : bootstrap->find_rank_0(*point);
  if (!met.ok()) return met.error();
  bootstrap->local_address_ = own_address(bootstrap->peers_[0].socket);
  bootstrap->watch_ = std::thread([raw = bootstrap.get()] { raw->run_watch(); });
  return bootstrap;
}

// Rank 0. Whoever connects has a few seconds to say that it belongs to us.
Status Bootstrap::wait_for_all(const MeetingPoint& point) {
  const Clock::time_point end = after(options_.start_s);
  // Whoever had the place before us may still be about to leave it.
  Result<Socket> listener = listen_at(point);
  while (!listener.ok() && Clock::now() < end) {
    std::this_thread::sleep_for(kRetryPause);
    listener = listen_at(point);
  }
  if (!listener.ok()) return listener.error();
  struct Stranger {
    Socket socket;
    FrameParser parser{kMaxHello};
    Clock::time_point until;
  };
  std::vector<Stranger> strangers;
  std::vector<Peer> joined(static_cast<std::size_t>(options_.size));
  std::int32_t missing = options_.size - 1;
  std::string last_refusal;

  // Lets a process in, or says why not.
  const auto introduce = [&](Stranger& stranger, const Frame& frame) -> std::string {
    PacketReader reader(frame.payload);
    const std::string job = reader.text();
    const std::uint32_t version = reader.number();
    const std::uint32_t rank = reader.number();
    const std::uint32_t size = reader.number();
    if (frame.type != FrameType::kHello || !reader.complete()) return "it said no hello";
    if (job != options_.job) return "another job waits here";
    if (version != kProtocolVersion) return fmt::format("rank 0 speaks version {}, it {}", kProtocolVersion, version);
    if (size != static_cast<std::uint32_t>(options_.size)) {
      return fmt::format("rank {} was told of {} processes, rank 0 of {}", rank, size, options_.size);
    }
    if (rank == 0 || rank >= size) return fmt::format("its rank is {}, it must be 1 to {}", rank, size - 1);
    Peer& peer = joined[rank];
    if (peer.socket.open()) return fmt::format("rank {} is there already", rank);
    if (!write_small(stranger.socket, FrameType::kAccepted, {})) return "it has gone";
    peer.rank = static_cast<std::int32_t>(rank);
    peer.socket = std::move(stranger.socket);
    peer.parser = FrameParser(max_payload());
    --missing;
    return "";
  };

  // Ends the wait of those who are in.
  const auto give_up = [&](ErrorKind kind, const std::string& text) {
    const std::string payload = PacketWriter().number(static_cast<std::uint32_t>(kind)).text(text).bytes();
    for (Peer& peer : joined) {
      if (peer.socket.open()) write_small(peer.socket, FrameType::kFailure, payload);
    }
    return Error{kind, text};
  };

  Clock::time_point next_beat = Clock::now() + kBeatPause;
  while (missing > 0) {
    if (Clock::now() >= next_beat) {
      // Those who are in wait for the rest, and must know that we live. Whoever cannot be written to is gone, which
      // reading will tell.
      for (Peer& peer : joined) {
        if (peer.socket.open()) static_cast<void>(write_small(peer.socket, FrameType::kBeat, {}));
      }
      next_beat = Clock::now() + kBeatPause;
    }
    if (Clock::now() >= end) {
      std::vector<int> absent;
      for (int rank = 1; rank < options_.size; ++rank) {
        if (!joined[static_cast<std::size_t>(rank)].socket.open()) absent.push_back(rank);
      }
      return give_up(ErrorKind::kTimeout,
                     fmt::format("rank 0 waited {:g} s at {} and rank{} {} of {} did not come{}", options_.start_s,
                                 point.text(), absent.size() == 1 ? "" : "s", fmt::join(absent, ", "), options_.size,
                                 last_refusal.empty() ? "" : " (somebody was turned away: " + last_refusal + ")"));
    }
    std::vector<pollfd> entries = {{listener->fd(), POLLIN, 0}};
    for (const Stranger& stranger : strangers) entries.push_back({stranger.socket.fd(), POLLIN, 0});
    for (const Peer& peer : joined) {
      if (peer.socket.open()) entries.push_back({peer.socket.fd(), POLLIN, 0});
    }
    poll(entries.data(), entries.size(), std::min(milliseconds_until(end), 100));
    for (Peer& peer : joined) {
      std::string ignored;
      // Nobody who was let in has anything to say yet, so all that can come is the end.
      if (!peer.socket.open() || (read_some(peer.socket, ignored) && ignored.empty())) continue;
      peer.socket.close();
      return give_up(ErrorKind::kPeerLost, fmt::format("rank {} died while the world was starting", peer.rank));
    }
    for (std::size_t i = 0; i < strangers.size();) {
      Stranger& stranger = strangers[i];
      std::string bytes;
      bool keep = read_some(stranger.socket, bytes) && Clock::now() < stranger.until;
      stranger.parser.feed(bytes);
      if (const std::optional<Frame> frame = stranger.parser.next()) {
        keep = false;
        if (const std::string refusal = introduce(stranger, *frame); !refusal.empty()) {
          last_refusal = refusal;
          write_small(stranger.socket, FrameType::kRefused, PacketWriter().text(refusal).bytes());
        }
      } else if (stranger.parser.broken()) {
        keep = false;
        last_refusal = "it said no hello";
      }
      if (keep) {
        ++i;
      } else {
        strangers.erase(strangers.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    while (strangers.size() < kMaxStrangers) {
      Socket socket = accept_from(*listener);
      if (!socket.open()) break;
      strangers.push_back({std::move(socket), FrameParser(kMaxHello), Clock::now() + kIntroduction});
    }
  }
  // Before anybody is welcomed: whoever starts the next world of this job must not find this door.
  listener->close();
  for (Peer& peer : joined) {
    if (peer.rank < 0) continue;
    peer.last_heard = Clock::now();
    peers_.push_back(std::move(peer));
    send(peers_.back(), FrameType::kWelcome);
  }
  return Ok{};
}

// All other ranks: tries every place until rank 0 of our own job answers.
Status Bootstrap::find_rank_0(const MeetingPoint& point) {
  const Clock::time_point end = after(options_.start_s);
  const std::size_t places = std::max<std::size_t>(1, point.ports.size());
  const std::string hello = PacketWriter()
                                .text(options_.job)
                                .number(kProtocolVersion)
                                .number(static_cast<std::uint32_t>(options_.rank))
                                .number(static_cast<std::uint32_t>(options_.size))
                                .bytes();
  std::string why = "nobody was there";
  bool told = false;  // why rank 0 turned us away; that it has given up since then explains less
  for (std::size_t place = 0; Clock::now() < end; place = (place + 1) % places) {
    Socket socket = connect_to(point, place, std::min(kConnectMs, milliseconds_until(end)));
    if (!socket.open()) {
      if (!told) why = std::strerror(errno);
      if (place + 1 == places) std::this_thread::sleep_for(kRetryPause);
      continue;
    }
    if (!write_small(socket, FrameType::kHello, hello)) continue;
    FrameParser parser(max_payload());
    Clock::time_point until = std::min(end, Clock::now() + kAnswer);
    bool gone = false;
    Clock::time_point last_heard = Clock::now();
    while (!gone && Clock::now() < until) {
      pollfd entry = {socket.fd(), POLLIN, 0};
      poll(&entry, 1, milliseconds_until(std::min(until, Clock::now() + kBeatPause)));
      std::string bytes;
      gone = !read_some(socket, bytes);
      if (!bytes.empty()) last_heard = Clock::now();
      const double silent_s = std::chrono::duration<double>(Clock::now() - last_heard).count();
      if (until > end && silent_s > options_.silence_s) {
        return Error{ErrorKind::kPeerLost, fmt::format("rank 0 has given no sign of life for {:.0f} s", silent_s)};
      }
      parser.feed(bytes);
      while (const std::optional<Frame> frame = parser.next()) {
        if (frame->type == FrameType::kRefused) {
          why = "it was turned away: " + PacketReader(frame->payload).text();
          gone = told = true;
        } else if (frame->type == FrameType::kAccepted) {
          // Rank 0 knows who is missing, so it is the first to give up.
          until = end + kFarewell;
          why = "it was there, and then fell silent";
        } else if (frame->type == FrameType::kFailure) {
          PacketReader reader(frame->payload);
          const std::uint32_t kind = reader.number();
          const std::string text = reader.text();
          if (!reader.complete() || text.empty() || kind > static_cast<std::uint32_t>(ErrorKind::kUnsupported)) {
            return Error{ErrorKind::kPeerLost, "rank 0 sent a message that cannot be read"};
          }
          return Error{static_cast<ErrorKind>(kind), text};
        } else if (frame->type == FrameType::kWelcome) {
          Peer root;
          root.rank = 0;
          root.socket = std::move(socket);
          root.parser = std::move(parser);
          root.last_heard = Clock::now();
          peers_.push_back(std::move(root));
          return Ok{};
        }
      }
      gone = gone || parser.broken();
    }
    if (until > end) {
      return Error{ErrorKind::kPeerLost, "rank 0 died while the world was starting"};
    }
    std::this_thread::sleep_for(kRetryPause);
  }
  return Error{ErrorKind::kTimeout, fmt::format("rank {} of {} did not find rank 0 within {:g} s at {}: {}",
                                                options_.rank, options_.size, options_.start_s, point.text(), why)};
}

void Bootstrap::leave() {
  if (!watch_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Peer& peer : peers_) send(peer, FrameType::kGoodbye);
    stop_ = true;
  }
  poke();
  watch_.join();
}

void Bootstrap::watch(OnFailure on_failure) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_) {
    on_failure_ = std::move(on_failure);
    return;
  }
  const Error error = *failure_;
  lock.unlock();
  on_failure(error);
}

Result<std::vector<std::string>> Bootstrap::exchange(const std::string& label, const std::string& text,
                                                     double deadline_s) {
  if (label.size() > kMaxTextBytes || text.size() > kMaxTextBytes) {
    return bad_argument(fmt::format("ranks exchange at most {} bytes", kMaxTextBytes));
  }
  std::lock_guard<std::mutex> one(exchange_mutex_);
  const std::string mine = PacketWriter().text(label).text(text).bytes();
  std::unique_lock<std::mutex> lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.socket.open() && !failure_) fail(has_left(peer), peer.rank);
  }
  if (failure_) {
    const Error error = *failure_;
    lock.unlock();
    poke();
    return error;
  }
  exchanging_ = true;
  const std::uint32_t number = next_gather_++;
  if (is_root()) {
    gather(number, 0, mine);
  } else {
    send(peers_[0], FrameType::kGather, PacketWriter().number(number).text(mine).bytes());
  }
  lock.unlock();
  poke();
  lock.lock();
  const auto done = [&] { return failure_ || gathered_.count(number) > 0; };
  // Rank 0 knows who is missing, so it is the first to give up.
  const double patience = deadline_s + (is_root() ? 0 : 2);
  const bool in_time = changed_.wait_until(lock, after(patience), done);
  exchanging_ = false;
  if (const auto it = gathered_.find(number); it != gathered_.end()) {
    std::vector<std::string> texts = std::move(it->second);
    gathered_.erase(it);
    return texts;
  }
  if (in_time) return *failure_;
  std::vector<int> absent;
  for (int rank = 0; is_root() && rank < options_.size; ++rank) {
    if (!gathers_[number].texts[static_cast<std::size_t>(rank)]) absent.push_back(rank);
  }
  const Error error{ErrorKind::kTimeout,
                    absent.empty()
                        ? fmt::format("rank {} waited {:g} s for rank 0 to {}", options_.rank, deadline_s, label)
                        : fmt::format("rank 0 waited {:g} s for rank{} {} to {}", deadline_s,
                                      absent.size() == 1 ? "" : "s", fmt::join(absent, ", "), label)};
  fail(error, options_.rank);
  lock.unlock();
  poke();
  return error;
}

void Bootstrap::tell_failure(const Error& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    fail(error, options_.rank);
  }
  poke();
}

// The watch.

void Bootstrap::poke() {
  const std::uint64_t one = 1;
  // Fails only when the counter is at its end, and then the watch wakes anyway.
  static_cast<void>(!write(wake_.fd(), &one, sizeof one));
}

void Bootstrap::run_watch() {
  Clock::time_point next_beat = Clock::now();
  Clock::time_point last_word = Clock::time_point::max();
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    const Clock::time_point now = Clock::now();
    if (stop_) {
      last_word = std::min(last_word, now + kFarewell);
      const bool written = std::all_of(peers_.begin(), peers_.end(),
                                       [](const Peer& peer) { return !peer.socket.open() || peer.out.empty(); });
      if (written || now >= last_word) return;
    }
    if (now >= next_beat) {
      for (Peer& peer : peers_) {
        if (peer.out.empty()) send(peer, FrameType::kBeat);
      }
      next_beat = now + kBeatPause;
    }
    std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}};
    for (Peer& peer : peers_) {
      if (peer.socket.open() && !write_some(peer.socket, peer.out)) peer.out.clear();  // reading will tell
      const short events = static_cast<short>(peer.out.empty() ? POLLIN : POLLIN | POLLOUT);
      entries.push_back({peer.socket.fd(), events, 0});  // poll() passes over what is closed
    }
    lock.unlock();
    poll(entries.data(), entries.size(), milliseconds_until(next_beat));
    std::uint64_t pokes = 0;
    static_cast<void>(!read(wake_.fd(), &pokes, sizeof pokes));
    lock.lock();
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Peer& peer = peers_[i];
      if (!peer.socket.open()) continue;
      if (entries[i + 1].revents != 0) read_peer(peer);
      const double silent_s = std::chrono::duration<double>(Clock::now() - peer.last_heard).count();
      if (peer.socket.open() && silent_s > options_.silence_s) {
        lose(peer, fmt::format("has given no sign of life for {:.0f} s", silent_s));
      }
    }
    if (failure_ && on_failure_) {
      const OnFailure tell = std::exchange(on_failure_, {});
      const Error error = *failure_;
      lock.unlock();
      tell(error);
      lock.lock();
    }
  }
}

void Bootstrap::read_peer(Peer& peer) {
  std::string bytes;
  const bool there = read_some(peer.socket, bytes);
  if (!bytes.empty()) peer.last_heard = Clock::now();
  peer.parser.feed(bytes);
  while (const std::optional<Frame> frame = peer.parser.next()) handle(peer, *frame);
  if (peer.parser.broken()) {
    lose(peer, "sent what is no message of mKernel's");
  } else if (!there) {
    lose(peer, "died: its process has gone");
  }
}

void Bootstrap::handle(Peer& peer, const Frame& frame) {
  PacketReader reader(frame.payload);
  switch (frame.type) {
    case FrameType::kGather: {
      const std::uint32_t number = reader.number();
      std::string text = reader.text();
      if (!is_root() || !reader.complete()) return lose(peer, "sent a message that cannot be read");
      // Nobody is ahead by more than the one exchange that it waits in.
      if (number - next_gather_ > 1 && next_gather_ - number > 1) return lose(peer, "sent an exchange out of turn");
      return gather(number, peer.rank, std::move(text));
    }
    case FrameType::kGathered: {
      const std::uint32_t number = reader.number();
      std::vector<std::string> texts(static_cast<std::size_t>(options_.size));
      for (std::string& text : texts) text = reader.text();
      if (is_root() || !reader.complete()) return lose(peer, "sent a message that cannot be read");
      gathered_[number] = std::move(texts);
      changed_.notify_all();
      return;
    }
    case FrameType::kFailure: {
      const std::uint32_t kind = reader.number();
      const std::string text = reader.text();
      if (!reader.complete() || text.empty() || kind > static_cast<std::uint32_t>(ErrorKind::kUnsupported)) {
        return lose(peer, "sent a message that cannot be read");
      }
      return fail({static_cast<ErrorKind>(kind), text}, peer.rank);
    }
    case FrameType::kGoodbye: peer.leaving = true; return;
    case FrameType::kBeat:
    case FrameType::kWelcome: return;
    case FrameType::kHello:
    case FrameType::kRefused:
    case FrameType::kAccepted: return lose(peer, "sent a message out of place");
  }
}

void Bootstrap::lose(Peer& peer, const std::string& how) {
  peer.socket.close();
  peer.out.clear();
  if (!peer.leaving) return fail({ErrorKind::kPeerLost, fmt::format("rank {} {}", peer.rank, how)}, peer.rank);
  // One that has left owes nothing more, unless somebody counts on it.
  if (exchanging_ || !gathers_.empty()) fail(has_left(peer), peer.rank);
}

Error Bootstrap::has_left(const Peer& peer) {
  return {ErrorKind::kPeerLost, fmt::format("rank {} has left the world", peer.rank)};
}

// The first failure counts. Rank 0 passes it on, others tell rank 0.
void Bootstrap::fail(const Error& error, std::int32_t told_by) {
  if (failure_) return;
  failure_ = error;
  const std::string payload = PacketWriter()
                                  .number(static_cast<std::uint32_t>(error.kind))
                                  .text(error.message.substr(0, kMaxTextBytes))
                                  .bytes();
  for (Peer& peer : peers_) {
    if (peer.rank != told_by) send(peer, FrameType::kFailure, payload);
  }
  changed_.notify_all();
}

void Bootstrap::send(Peer& peer, FrameType type, std::string_view payload) {
  if (peer.socket.open()) peer.out += encode_frame(type, payload);
}

// Rank 0: one rank's part of an exchange.
void Bootstrap::gather(std::uint32_t number, std::int32_t rank, std::string label_and_text) {
  if (failure_) return;  // nothing succeeds any more
  Gather& entry = gathers_[number];
  if (entry.texts.empty()) {
    entry.texts.resize(static_cast<std::size_t>(options_.size));
    entry.missing = options_.size;
  }
  std::optional<std::string>& slot = entry.texts[static_cast<std::size_t>(rank)];
  if (!slot) --entry.missing;
  slot = std::move(label_and_text);
  if (entry.missing == 0) finish_gather(number);
}

void Bootstrap::finish_gather(std::uint32_t number) {
  const Gather entry = std::move(gathers_[number]);
  gathers_.erase(number);
  std::vector<std::string> texts;
  std::string first_label;
  PacketWriter all;
  all.number(number);
  for (std::int32_t rank = 0; rank < options_.size; ++rank) {
    PacketReader reader(*entry.texts[static_cast<std::size_t>(rank)]);
    const std::string label = reader.text();
    texts.push_back(reader.text());
    if (rank == 0) first_label = label;
    if (!reader.complete() || label != first_label) {
      return fail(
          {ErrorKind::kAborted, fmt::format("rank {} wants to {}, but rank 0 wants to {}: all ranks must do the "
                                            "same in the same order",
                                            rank, label, first_label)},
          0);
    }
    all.text(texts.back());
  }
  for (Peer& peer : peers_) send(peer, FrameType::kGathered, all.bytes());
  gathered_[number] = std::move(texts);
  changed_.notify_all();
}

}  // namespace mkernel
