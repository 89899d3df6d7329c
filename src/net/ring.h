// The command ring: many producers (warps of one GPU, or threads) hand 64-bit records to one proxy.
//
// Positions count pushes from `start` on and wrap at 2^32; position p lives in slot p % depth. A record carries the low
// 8 bits of its lap, p / depth + 1, so the slot itself says whether it holds the record that the consumer expects: no
// word is set aside to mean "empty", and an all-zero record is as good as any other. `head` is the next position to
// reserve, `tail` the next one to take. A producer reserves only while head - tail < depth, so a slot's next lap is
// written after its last one was read, and neighbouring laps differ in their 8 bits.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/check.h"
#include "net/record.h"

namespace mkernel {

// Deeper rings would break the lap count at the wrap: 2^32 positions must be a multiple of 256 laps.
inline constexpr std::uint32_t kMaxRingDepth = 1u << 24;

// What a producer needs: plain data with plain pointers, as a kernel argument would be. Every word behind them is
// accessed atomically.
struct RingView {
  std::uint64_t* slots = nullptr;
  std::uint32_t* head = nullptr;
  std::uint32_t* tail = nullptr;
  std::uint32_t depth = 1;       // a power of two
  std::uint32_t depth_log2 = 0;  // so that lap and slot need no division
};

constexpr std::uint32_t ring_lap(std::uint32_t position, std::uint32_t depth_log2) {
  return ((position >> depth_log2) + 1) & 0xff;
}

// Reserves the next position, or nothing while the ring is full. The caller must publish() at it, soon: the consumer
// takes nothing beyond a reserved position.
inline std::optional<std::uint32_t> try_reserve(const RingView& ring) {
  std::atomic_ref<std::uint32_t> head(*ring.head);
  std::atomic_ref<std::uint32_t> tail(*ring.tail);
  std::uint32_t position = head.load(std::memory_order_relaxed);
  // Every round that fails is one in which another producer reserved a position, or the consumer freed some.
  for (;;) {
    // order: the consumer has read the slot's last lap before we overwrite it; pairs with CommandRing::pop().
    const std::uint32_t used = position - tail.load(std::memory_order_acquire);
    if (used == ring.depth) return std::nullopt;
    if (used < ring.depth) {
      // order: none needed. The record is published by its slot, and the free slot was acquired through the tail.
      if (head.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) return position;
    } else {
      position = head.load(std::memory_order_relaxed);  // the tail has overtaken the head that we knew
    }
  }
}

inline void publish(const RingView& ring, std::uint32_t position, Record record) {
  record.lap = ring_lap(position, ring.depth_log2);
  // order: all that the producer (or whoever it acquired from) wrote, above all the payload that the record names, is
  // visible to whoever sees the record; pairs with CommandRing::peek().
  std::atomic_ref<std::uint64_t>(ring.slots[position & (ring.depth - 1)])
      .store(encode(record), std::memory_order_release);
}

// False when the ring is full: nothing happened, push the same record again later. `record.lap` is ignored.
inline bool try_push(const RingView& ring, const Record& record) {
  const std::optional<std::uint32_t> position = try_reserve(ring);
  if (!position) return false;
  publish(ring, *position, record);
  return true;
}

// Where a ring lies whose memory belongs to somebody else, as when a GPU pushes: slots and tail are reachable by
// producers and consumer and outlive the ring; the head is the producers' own.
struct RingMemory {
  std::uint64_t* slots = nullptr;  // `depth` of them
  std::uint32_t* tail = nullptr;
  std::uint32_t depth = 1;  // a power of two
};

// Owner and consumer's side of a ring. One thread at a time peeks and pops; views stay valid as long as the ring lives.
class CommandRing {
 public:
  // `start` is the first position; anything but 0 is for tests of the wrap.
  explicit CommandRing(std::uint32_t depth, std::uint32_t start = 0)
      : head_(start), own_slots_(std::make_unique<std::uint64_t[]>(depth)) {
    attach({own_slots_.get(), &own_tail_, depth}, start);
    producers_head_ = &head_;
  }
  // The view has no head: it is for the producers' side to add, and begins at `start` too.
  explicit CommandRing(const RingMemory& memory, std::uint32_t start = 0) { attach(memory, start); }
  CommandRing(const CommandRing&) = delete;
  CommandRing& operator=(const CommandRing&) = delete;

  RingView view() { return {slots_, producers_head_, tail_, depth_, depth_log2_}; }
  std::uint32_t depth() const { return depth_; }

  // Reads the oldest record and leaves it in the ring; false when it is not (or not yet) there.
  bool peek(Record& record) {
    std::atomic_ref<std::uint64_t> slot(slots_[next_ & (depth_ - 1)]);
    // order: with the record comes all that its producer wrote before; pairs with publish().
    const Record seen = decode(slot.load(std::memory_order_acquire));
    if (seen.lap != ring_lap(next_, depth_log2_)) return false;
    record = seen;
    return true;
  }

  // Frees the slot of the record that peek() has just returned.
  void pop() {
    Record record;
    MK_CHECK(peek(record));
    ++next_;
    // order: our read of the slot comes before any write of its next lap; pairs with try_reserve().
    std::atomic_ref<std::uint32_t>(*tail_).store(next_, std::memory_order_release);
  }

  // Whether nothing is reserved or published; exact only while no producer is at work. A ring without a head cannot see
  // reservations, only what is published.
  bool empty() {
    Record record;
    if (producers_head_ == nullptr) return !peek(record);
    // order: none needed, the answer is a snapshot.
    return std::atomic_ref<std::uint32_t>(*producers_head_).load(std::memory_order_relaxed) == next_;
  }

 private:
  void attach(const RingMemory& memory, std::uint32_t start) {
    MK_CHECK(std::has_single_bit(memory.depth));
    MK_CHECK_OP(memory.depth, <=, kMaxRingDepth);
    MK_CHECK(memory.slots != nullptr && memory.tail != nullptr);
    slots_ = memory.slots;
    tail_ = memory.tail;
    next_ = start;
    depth_ = memory.depth;
    depth_log2_ = static_cast<std::uint32_t>(std::countr_zero(depth_));
    *tail_ = start;
    // Each slot looks as if its last lap had been taken, whatever the memory held before.
    for (std::uint32_t i = 0; i < depth_; ++i) {
      const std::uint32_t position = start + i;
      Record record;
      record.lap = ring_lap(position - depth_, depth_log2_);
      slots_[position & (depth_ - 1)] = encode(record);
    }
  }

  // A cache line each: producers write one, the consumer the other. What never changes is with the consumer's words, as
  // producers have their own copy of it in a view.
  alignas(64) std::uint32_t head_ = 0;
  alignas(64) std::uint32_t own_tail_ = 0;
  std::uint32_t next_ = 0;  // the tail, as its only writer knows it
  std::uint32_t depth_ = 1;
  std::uint32_t depth_log2_ = 0;
  std::uint64_t* slots_ = nullptr;
  std::uint32_t* tail_ = nullptr;
  std::uint32_t* producers_head_ = nullptr;  // null: only the producers know it
  std::unique_ptr<std::uint64_t[]> own_slots_;
};

}  // namespace mkernel
