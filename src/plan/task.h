// The vocabulary of plans: what a task waits for, what it does, what it signals. docs/plan-vocabulary.md explains it.
#pragma once
#include <cstdint>

#include "base/macros.h"
#include "plan/tiles.h"

namespace mkernel {

// What an SM is doing. `send` needs no SM: a spare warp serves it.
enum class Role : std::uint8_t { kCompute, kIntra, kSend, kRecv };
inline constexpr int kRoleCount = 4;

enum class Action : std::uint8_t {
  kNone,            // a slot without work: takes part in no wait and no signal
  kGemm,            // dst = A[block.rows, K] * B[K, block.cols]
  kCopy,            // dst = src, byte by byte
  kReduce,          // dst = round(sum of the sources in their stated order, in fp32)
  kPut,             // network write of a contiguous range to `peer`, followed by its stamp
  kAttend,          // folds keys and values into the running state of a tile of queries (ring_attention)
  kAttendBackward,  // adds what a tile of keys and a tile of queries are to each other to the gradients of both
};

// The memory a plan speaks of. What stands before kGather is the caller's and is touched by its own rank only, with one
// exception: in gemm_all_reduce the reducing GPU writes finished tiles into the C of its node's GPUs. All else is
// workspace in the symmetric heap, twice, by epoch parity.
enum class Buffer : std::uint8_t {
  kA,            // (rows, K) input
  kB,            // (K, cols) input
  kC,            // (rows, cols) output
  kQ,            // (batch * heads * tokens, dim) queries
  kK,            // (batch * kv_heads * tokens, dim) keys
  kV,            // as kK, values
  kO,            // as kQ; output of ring_attention, input of its backward
  kLse,          // (batch * heads * tokens, 1) fp32 log-sum-exp of the scaled scores, as kO
  kDo,           // as kQ, gradient of the output
  kDq,           // as kQ, output of the backward
  kDk,           // as kK, output of the backward
  kDv,           // as kK, output of the backward
  kGather,       // (M, pitch) rows of A of every rank, row-major, in the input type
  kPartial,      // own GEMM results, packed tiles, partial type; read by the GPUs of the node. Of the backward: own
                 // parts of the gradients of the chunks in kKv's slots, laid out like these
  kNodePartial,  // sums over the node, packed tiles, partial type; read by the network
  kArrival,      // node sums of other nodes, packed tiles, partial type; written by the network
  kResult,       // finished tiles, packed, output type; read and written by the network
  kKv,           // chunks of keys and values: own ones for the network to read, then slots for those of other ranks
  kState,        // running state of each tile of queries between the tasks that add to it, fp32; of its own rank only
  kKeyState,     // the same of the keys and values in kKv's slots (backward)
};
inline constexpr int kBufferCount = 20;

MK_HD constexpr bool is_workspace(Buffer buffer) { return buffer >= Buffer::kGather; }
// Those that a plan writes for the caller; kO only where it is not an input.
MK_HD constexpr bool is_output(Buffer buffer) {
  return buffer == Buffer::kC || buffer == Buffer::kO || buffer == Buffer::kDq || buffer == Buffer::kDk ||
         buffer == Buffer::kDv;
}

// Waits until every one of the `span` flags from `flag` on, in the waiting rank's own heap, has reached
// use * count (signed distance, so flags may wrap). Counters of a range share one count; stamps have count 1.
struct Wait {
  std::uint32_t flag = 0;
  std::uint32_t span = 0;  // 0: no wait
  std::uint32_t count = 0;

  bool operator==(const Wait&) const = default;
};

// Which ranks of the acting rank's node an effect reaches.
enum class Reach : std::uint8_t {
  kNobody,
  kSelf,   // the acting rank
  kPeers,  // the other GPUs of the node
  kNode,   // all GPUs of the node
  kRank,   // the rank that the task names as `peer`
};

// Raises `flag` of every rank in reach, after the task's writes: a counter by one, a stamp to the current use.
struct Signal {
  std::uint32_t flag = 0;
  Reach reach = Reach::kNobody;
  bool stamp = false;
  std::uint16_t ranks = 1;  // kRank: so many of the node, from `peer` on

  bool operator==(const Signal&) const = default;
};

// Where a task's sources lie.
enum class Source : std::uint8_t {
  kNone,
  kOwn,   // `src` at `src_offset`, acting rank's heap (or rows of its A)
  kNode,  // `src` at `src_offset` on GPUs 0..G-1 of the node, in this order
  kRail,  // node sums 0..N-1 in this order: own from kNodePartial at `src_offset`, others from kArrival
          // at `arrival_offset` + index * `arrival_stride` (index counts the other nodes upwards)
};

// One unit of work. Plain data; offsets are in elements of the buffer's type and relative to the current parity.
struct Task {
  Action action = Action::kNone;
  Source source = Source::kNone;
  Buffer src = Buffer::kA;
  Buffer dst = Buffer::kC;
  Reach dst_reach = Reach::kNobody;  // whose `dst` is written
  bool keep_result = false;          // the same values also go to own kResult at `dst_offset`
  bool resume = false;               // kAttend..: goes on from the state at `dst_offset`, else begins
  bool park = false;                 // kAttend..: leaves its state there, else writes kO and kLse, or kDq
  bool resume_keys = false;          // kAttendBackward: goes on from the sums at `key_place`, else begins
  bool park_keys = false;            // kAttendBackward: leaves them there, else writes kPartial, or kDk and kDv
  std::int32_t peer = -1;            // the destination of kPut, else the rank a person would name; -1: none
  Wait waits[2];
  Signal signals[2];
  Block block;                      // rectangle of C or kO; for copies of A: rows of `block.row` on, all K columns
  std::int64_t src_offset = 0;      // first element in a heap buffer; for kA, kK and kV the row
  std::int64_t arrival_offset = 0;  // see Source::kRail
  std::int64_t arrival_stride = 0;
  std::int64_t dst_offset = 0;  // packed offset in a heap buffer; unused when dst is kC
  std::int64_t length = 0;  // elements that kPut and heap copies move; kAttend..: elements of keys, as many of values
  std::int64_t kv_position = 0;     // kAttend..: the place of the first key in the whole sequence
  std::int64_t key_rows = 0;        // kAttendBackward: keys of its tile, also where `length` is 0 as nobody sees any
  std::int64_t key_place = 0;       // kAttendBackward: where their sums lie, in kKeyState and in kPartial
  std::int64_t value_distance = 0;  // kAttendBackward: from keys to values, there and in kKv

  bool operator==(const Task&) const = default;
};

}  // namespace mkernel
