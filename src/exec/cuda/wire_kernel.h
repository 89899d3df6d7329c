// The copy kernel of the wire: what host and GPU share, and how it is launched.
//
// One kernel per GPU, one CTA per rank, on SMs that no rank owns. It stays until it is told to stop, which the host
// does when there has been no traffic for a while: else whoever waits for the whole GPU (cudaDeviceSynchronize,
// cudaFree) would wait for ever. A CTA takes commands from a ring in pinned memory. Every 64-bit word of a command
// carries the low 8 bits of its lap, like the records of net/ring.h: so a command that has arrived is seen with a
// single read of all its words, without a flag beside it that would have to be read first.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "base/macros.h"

namespace mkernel {

inline constexpr std::uint32_t kWireDepth = 128;     // copies, and as many stamps, that a rank may have queued
inline constexpr std::uint32_t kWireCommands = 512;  // of the ring: holds all of these, and the command to stop
inline constexpr std::uint32_t kWireCommandsLog2 = 9;
static_assert(kWireCommands == 1u << kWireCommandsLog2 && kWireCommands > 2 * kWireDepth);
inline constexpr int kMaxWireRanks = 16;  // per GPU: 132 SMs in groups of 8

enum class WireVerb : std::uint32_t { kCopy = 1, kStamp = 2, kStop = 3 };

struct WireCommand {
  WireVerb verb = WireVerb::kCopy;
  std::uint32_t rank = 0;     // kStamp: whose copies it waits for
  std::uint64_t address = 0;  // kCopy: destination; kStamp: the flag
  std::uint64_t source = 0;   // kCopy
  std::uint64_t bytes = 0;    // kCopy
  std::uint32_t value = 0;    // kStamp: what the flag becomes
  std::uint32_t count = 0;    // kStamp: after how many copies
};

// As it stands in the ring; `lap` as in ring_lap(). Addresses have up to 56 bits, as those of Hopper do.
struct alignas(32) WireWords {
  std::uint64_t word[4];
};
MK_HD constexpr WireWords wire_words(const WireCommand& c, std::uint64_t lap) {
  const bool copy = c.verb == WireVerb::kCopy;
  return {{(c.address << 8) | lap, ((copy ? c.source : std::uint64_t{c.value}) << 8) | lap,
           ((copy ? c.bytes : std::uint64_t{c.count}) << 8) | lap,
           (std::uint64_t{c.rank} << 16) | (static_cast<std::uint64_t>(c.verb) << 8) | lap}};
}
MK_HD constexpr WireCommand wire_command(const WireWords& w) {
  const std::uint64_t second = w.word[1] >> 8;
  const std::uint64_t third = w.word[2] >> 8;
  WireCommand c;
  c.verb = static_cast<WireVerb>((w.word[3] >> 8) & 0xff);
  c.rank = static_cast<std::uint32_t>(w.word[3] >> 16);
  c.address = w.word[0] >> 8;
  c.source = second;
  c.bytes = third;
  c.value = static_cast<std::uint32_t>(second);
  c.count = static_cast<std::uint32_t>(third);
  return c;
}

MK_HD constexpr std::uint64_t done_word(std::uint32_t copies, std::uint32_t stamps) {
  return (std::uint64_t{stamps} << 32) | copies;
}

// What a CTA and the thread of its rank's proxy share, in pinned memory.
struct alignas(128) WireMailbox {
  WireWords commands[kWireCommands];
  alignas(128) std::uint64_t done = 0;   // done_word(); written by the GPU
  alignas(128) std::uint64_t leave = 0;  // not 0: the CTA leaves at once; written by the host
};

// Where a CTA goes on: what earlier kernels have done for this rank, modulo 2^32.
struct WireLane {
  WireMailbox* mailbox = nullptr;
  std::uint32_t rank = 0;
  std::uint32_t position = 0;  // commands taken
  std::uint32_t copies = 0;    // done
  std::uint32_t stamps = 0;
};

struct WireArguments {
  WireLane lanes[kMaxWireRanks];    // by CTA
  std::uint32_t* copied = nullptr;  // null, or a word every kCopiedStride for each rank of the world: its copies done
  std::uint32_t stages = 0;         // of shared memory
};
inline constexpr std::uint32_t kCopiedStride = 32;  // words: a cache line each

// Prepares launches for `ranks` CTAs on `sms` SMs of the current device, and says how many stages there is room for.
// All CTAs must be resident at once: cudaErrorLaunchOutOfResources when they cannot be.
cudaError_t prepare_wire_kernel(int ranks, int sms, std::uint32_t& stages);
cudaError_t launch_wire_kernel(const WireArguments& arguments, int ranks, cudaStream_t stream);

}  // namespace mkernel
