// What every network must do for mKernel: write bytes into a peer's heap, then a stamp.
//
// The contract: a stamp is visible only after all bytes it vouches for.
#pragma once
#include <cstdint>
#include <limits>
#include <span>

namespace mkernel {

// Nanoseconds of whichever clock drives the caller: steady clock or virtual time.
using Nanos = std::int64_t;
inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

// One network write. Offsets are bytes in operator `op`'s heap on the rank concerned.
struct Put {
  std::uint64_t id = 0;  // the poster's, comes back in the completion
  std::int32_t src_rank = 0;
  std::int32_t dst_rank = 0;
  std::uint32_t op = 0;
  std::uint64_t epoch = 0;
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::int64_t bytes = 0;
  std::int64_t flag = 0;    // index of the stamp among the destination's flags, parity included
  std::uint32_t value = 0;  // what the stamp becomes
};

enum class PostStatus : std::uint8_t {
  kPosted,
  kAgain,  // not now (ENOMEM for the moment): nothing happened, post the same again later
  kFull,   // not before a put of this endpoint is sent or has failed: nothing happened, and no other put would be taken
  kFatal,  // this destination cannot be reached any more
};

enum class EventKind : std::uint8_t {
  kSent,     // put `id` is done: its source may be overwritten
  kFailed,   // put `id` will never arrive; `peer` is lost
  kArrived,  // counted-immediate networks: one piece of the put that stamps `flag` of `op` has landed here
  kStamped,  // the network has written `flag` of `op` here itself, and says so for those who sleep
};

struct TransportEvent {
  EventKind kind = EventKind::kSent;
  std::int32_t peer = -1;
  std::uint64_t id = 0;
  std::uint32_t op = 0;
  std::uint64_t epoch = 0;
  std::int64_t flag = 0;
};

// One rank's end of a network. Used by one thread at a time; never blocks, allocates or reads a clock.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual PostStatus post(const Put& put, Nanos now) = 0;
  // What post() has accepted may wait for this call, so that puts to one destination go out together.
  virtual void flush(Nanos /*now*/) {}
  // Moves the network on to `now` and fills `events`; returns how many. Call again while it fills all of them.
  virtual int poll(Nanos now, std::span<TransportEvent> events) = 0;
  // When poll() would next have something to do; kNever when nothing is in flight.
  virtual Nanos next_event() const = 0;
  // How many pieces (each with an arrival of its own) a put is cut into; 0: the network writes stamps itself.
  virtual int arrivals_per_put() const = 0;
};

// What arrivals do to heaps. The simulator and the executors implement it.
class Landing {
 public:
  virtual ~Landing() = default;
  // Copies bytes [begin, begin + bytes) of the put. Called once or, in pieces, several times per put.
  virtual void land(const Put& put, std::int64_t begin, std::int64_t bytes) = 0;
  // Writes the stamp with release order; wakes whoever waits for it.
  virtual void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) = 0;
  // The network has written the stamp itself: wakes whoever waits for it, if anybody sleeps here. By the time of the
  // call the stamp may have been written again, so nobody may take `value` for what it is now.
  virtual void stamped(std::int32_t /*rank*/, std::uint32_t /*op*/, std::int64_t /*flag*/, std::uint32_t /*value*/) {}
};

}  // namespace mkernel
