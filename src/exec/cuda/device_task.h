// What the persistent kernel reads: a rank's tasks as a table in GPU memory, and the memory they speak of.
//
// A plan is pure arithmetic, but 64-bit divisions are slow on a GPU and would take registers from the roles. So the
// host evaluates a rank's plan once, at creation, into 128-byte rows (task_table.h); the kernel knows no operator.
#pragma once
#include <cstdint>

#include "base/macros.h"
#include "exec/cuda/device_ring.h"
#include "plan/plan.h"

namespace mkernel {

enum class DeviceAction : std::uint8_t {
  kGemm,
  kMove,   // copy (one source) or reduction (several)
  kFlush,  // store what the consumers still hold; the scheduler is about to wait
  kExit,   // leave the kernel
};

// How a task's results or sources are accessed.
enum class Path : std::uint8_t {
  kTensor,  // GEMM: TMA stores of 64 x 64 boxes
  kBulk,    // moves: contiguous 16-byte pieces through shared memory
  kDirect,  // single elements by the consumers' threads: any offset, pitch and shape, slower
};

// Raises `flag` by one on GPUs [gpu_begin, gpu_end) of the node. When that completes the flag's use on the own rank,
// the records [record, record + records) are pushed: the network writes that waited for it.
struct DeviceSignal {
  std::uint32_t flag = 0;
  std::uint16_t gpu_begin = 0;  // equal to gpu_end: no signal
  std::uint16_t gpu_end = 0;
  std::uint32_t record = 0;
  std::uint16_t records = 0;
  std::uint16_t local = 0;         // not 0: only this GPU raises and reads the flag
  std::uint32_t record_count = 0;  // raises per use that complete the flag
};

// Where what other nodes have sent lies: the first element of the first node's, and the distance to the next.
struct Arrivals {
  std::int64_t offset;
  std::int64_t stride;
};

// Which blocks of K a row of a tile multiplies. Of several parts the one that is finished last adds all up.
struct TilePart {
  std::int32_t first_block;
  std::int32_t blocks;
  std::uint32_t slot;    // of the tile's first part: where its sums lie, those of the others after it
  std::uint16_t number;  // in the order of K
  std::uint16_t count;
};

// One task. Offsets in elements of their buffer, relative to the epoch's parity.
struct alignas(16) DeviceTask {
  std::int64_t src_offset = 0;  // first element in `src`; for A: its row
  union {
    Arrivals arrivals = {};  // of a move
    TilePart part;           // of a tile
  };
  std::int64_t dst_offset = 0;
  std::int32_t row = 0;  // of C; of A's rows for copies of A
  std::int32_t col = 0;
  std::int32_t rows = 0;  // rectangle that is computed or moved; packed buffers hold it row by row
  std::int32_t cols = 0;
  Wait waits[2];
  DeviceSignal signals[2];
  std::uint32_t index = 0;  // in its lane of the plan, for messages
  DeviceAction action = DeviceAction::kGemm;
  Path path = Path::kDirect;
  Source source = Source::kNone;
  Buffer src = Buffer::kA;
  Buffer dst = Buffer::kC;
  Reach dst_reach = Reach::kSelf;
  bool keep_result = false;
  std::uint8_t role_lane = 0;  // role in the low two bits, the low six bits of the lane above, for messages
  std::uint8_t marks = 0;      // kFirstOfLane, kLastOfLane
  // Of a tile in several parts, in the ring's copy of the row, by the consumers: all parts are done, this CTA has the
  // sum.
  bool complete = false;
};
inline constexpr std::uint8_t kFirstOfLane = 1;
inline constexpr std::uint8_t kLastOfLane = 2;
static_assert(sizeof(DeviceTask) == 128);

// A network write that the store warps hand to the proxy.
struct DeviceRecord {
  std::uint32_t task = 0;  // send_id() in the plan
  std::uint32_t node = 0;  // of the destination
};

// A lane as the kernel serves it. Compute is lane 0; moves (intra, then recv) follow.
struct DeviceLane {
  std::uint32_t first = 0;  // row of its first task
  std::uint32_t count = 0;
};

// When things happened in a run, in nanoseconds of the GPU's global timer; 0: not at all.
struct DeviceTimes {
  std::uint64_t start = 0;
  std::uint64_t first[kRoleCount] = {};  // by role: the first task was taken (kSend: its record written)
  std::uint64_t last[kRoleCount] = {};
  std::uint64_t end = 0;
};

inline constexpr std::uint64_t kTimesKept = 1024;  // runs whose times a rank keeps, the one under way among them

// What CTAs of one rank and operator share, in GPU memory. Words that are polled stand on cache lines of their own.
struct alignas(128) DeviceControl {
  std::uint64_t epoch = 0;        // completed runs; advanced by the last CTA out
  DeviceTimes times[kTimesKept];  // of the last runs: the flight record of a GPU
  MK_HD DeviceTimes& of(std::uint64_t run) { return times[run % kTimesKept]; }
  const DeviceTimes& of(std::uint64_t run) const { return times[run % kTimesKept]; }
  alignas(128) std::uint32_t exited = 0;
  alignas(128) std::uint32_t abort = 0;  // not 0: leave
};
struct alignas(32) DeviceHead {
  std::uint32_t next = 0;  // compute: tickets drawn; moves: no task of the lane before this one is left
  std::uint32_t unused[7] = {};
};

// Why a rank left early, in mapped host memory. `state` goes 0 -> 1 (being written) -> 2 (complete).
struct DeviceAbort {
  std::uint32_t state = 0;
  std::uint32_t role = 0;
  std::uint32_t lane = 0;
  std::uint32_t task = 0;  // kNoTask: the completion of the call
  std::uint32_t flag = 0;
  std::uint32_t wanted = 0;
  std::uint32_t seen = 0;
  std::uint32_t kind = 0;  // DeviceAbortKind
  std::uint64_t epoch = 0;
  std::uint64_t waited_ns = 0;
};
inline constexpr std::uint32_t kNoTask = 0xffffffffu;
enum class DeviceAbortKind : std::uint32_t { kFlag = 1, kRingFull = 2 };

// Words that a rank's kernel and the host share, in mapped host memory.
struct alignas(128) DeviceMailbox {
  DeviceAbort abort;                     // written by the kernel
  alignas(128) std::uint32_t leave = 0;  // written by the host: not 0 makes the kernel leave
};

// The caller's C on one GPU, for the GPUs of its node that write into it.
struct alignas(16) DeviceMatrix {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  std::int64_t wide = 0;  // not 0: col_stride is 1 and every row starts at a multiple of 16 bytes
};

inline constexpr int kMaxGpusPerNode = 16;  // a table in shared memory has this many entries

// Everything that stays the same from launch to launch.
struct DeviceRank {
  std::int32_t rank = 0;
  std::int32_t node = 0;
  std::int32_t gpu = 0;
  std::int32_t nodes = 1;
  std::int32_t gpus = 1;
  std::int32_t lanes = 1;
  std::uint32_t op = 0;
  std::uint32_t flag_count = 0;
  Wait completion;
  std::uint32_t partial_fp32 = 0;
  std::int64_t gather_pitch = 0;
  std::int64_t buffer_begin[kBufferCount] = {};         // bytes from the heap's start, parity 0
  std::int64_t buffer_parity_bytes[kBufferCount] = {};  // distance to parity 1
  std::byte* heaps[kMaxGpusPerNode] = {};               // by GPU of the node
  DeviceMatrix* c_slots[kMaxGpusPerNode] = {};  // by GPU of the node: two entries each, by parity, in its own memory
  const DeviceTask* tasks = nullptr;
  const DeviceRecord* records = nullptr;
  const DeviceLane* lane_table = nullptr;  // `lanes` entries
  DeviceLane compute;                      // the first of them
  DeviceHead* heads = nullptr;             // `lanes` entries
  std::uint32_t* begun = nullptr;          // by CTA: not 0 once its first tile is taken; 0 between calls
  std::int32_t ctas = 0;                   // entries of `begun`: at most so many CTAs are launched
  std::uint64_t* claims = nullptr;         // by row: the last epoch in which the move was taken
  float* part_sums = nullptr;              // by slot: what a tile's part has got, as the consumers hold it
  std::uint32_t* parts_done = nullptr;     // by slot; 0 between calls
  DeviceControl* control = nullptr;
  DeviceMailbox* mailbox = nullptr;
  const DeviceRing* rings = nullptr;  // by node
  std::uint64_t deadline_ns = 0;
};

}  // namespace mkernel
