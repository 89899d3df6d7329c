#include "exec/cuda/device_push.cuh"
#include "exec/cuda/kernel_shared.cuh"
#include "exec/cuda/support_kernels.h"
#include "net/record.h"

namespace mkernel {
namespace {

constexpr int kSquare = 32;     // a block moves 32 x 32 elements, so that reads and writes are both in long runs,
constexpr int kRepackRows = 8;  // 8 rows of threads, which take as many rows at once
constexpr int kRun = 64;        // where rows are contiguous a warp moves runs of 64 elements,
constexpr int kRuns = 8;        // so many of them
constexpr int kBlockRuns = kRuns * kRepackRows;

bool has_runs(const Repack& job) { return job.src.col_stride == 1; }
std::int64_t repack_blocks(const Repack& job) {
  if (has_runs(job)) return ceil_div(job.rows * ceil_div(job.dst_pitch, kRun), kBlockRuns);
  return ceil_div(job.dst_pitch, kSquare) * ceil_div(job.rows, kSquare);
}

// All runs of a warp are on their way before the first is written: loads under predicates, no branches.
__device__ __forceinline__ void repack_runs_warp(const Repack& job, std::int64_t first_run) {
  const std::int64_t across = ceil_div(job.dst_pitch, kRun);
  const auto* g_src = static_cast<const std::uint16_t*>(job.src.data);
  auto* g_dst = static_cast<std::uint16_t*>(job.dst);
  std::int64_t row = first_run / across;
  std::int64_t col = first_run % across * kRun + 2 * threadIdx.x;
  std::uint16_t low[kRuns];
  std::uint16_t high[kRuns];
  std::uint32_t* to[kRuns];
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const bool inside = row < job.rows;
    const std::uint16_t* p = g_src + row * job.src.row_stride + col;
    low[i] = 0;
    high[i] = 0;
    if (inside && col < job.cols) low[i] = p[0];
    if (inside && col + 1 < job.cols) high[i] = p[1];
    to[i] = inside && col < job.dst_pitch ? reinterpret_cast<std::uint32_t*>(g_dst + row * job.dst_pitch + col) : nullptr;
    col += kRun;
    const bool wraps = col >= across * kRun;
    col -= wraps ? across * kRun : 0;
    row += wraps ? 1 : 0;
  }
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    if (to[i] != nullptr) *to[i] = low[i] | static_cast<std::uint32_t>(high[i]) << 16;
  }
}

__device__ __forceinline__ void repack_square_cta(const Repack& job, std::int64_t square) {
  __shared__ std::uint16_t s_square[kSquare][kSquare + 2];  // padded against bank conflicts
  const DeviceMatrix& src = job.src;
  const auto* g_src = static_cast<const std::uint16_t*>(src.data);
  auto* g_dst = static_cast<std::uint16_t*>(job.dst);
  const std::int64_t across = ceil_div(job.dst_pitch, kSquare);
  const std::int64_t row0 = square / across * kSquare;
  const std::int64_t col0 = square % across * kSquare;
  const bool along_rows = src.row_stride < src.col_stride;  // the source is contiguous along rows: read that way
#pragma unroll
  for (int step = 0; step < kSquare; step += kRepackRows) {
    const int i = static_cast<int>(threadIdx.y) + step;
    const int r = along_rows ? static_cast<int>(threadIdx.x) : i;
    const int c = along_rows ? i : static_cast<int>(threadIdx.x);
    const std::int64_t row = row0 + r;
    const std::int64_t col = col0 + c;
    s_square[r][c] =
        row < job.rows && col < job.cols ? g_src[row * src.row_stride + col * src.col_stride] : std::uint16_t{0};
  }
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kSquare; step += kRepackRows) {
    const int r = static_cast<int>(threadIdx.y) + step;
    const std::int64_t row = row0 + r;
    const std::int64_t col = col0 + threadIdx.x;
    if (row < job.rows && col < job.dst_pitch) g_dst[row * job.dst_pitch + col] = s_square[r][threadIdx.x];
  }
}

// Blocks of `one` first; blockDim (32, 8).
__global__ void repack_kernel(const __grid_constant__ Repack one, std::int64_t one_blocks,
                              const __grid_constant__ Repack other) {
  let_next_begin();
  wait_for_stream();
  const bool is_one = blockIdx.x < one_blocks;
  const Repack& job = is_one ? one : other;
  const std::int64_t block = is_one ? blockIdx.x : blockIdx.x - one_blocks;
  if (job.src.col_stride == 1) {
    repack_runs_warp(job, block * kBlockRuns + threadIdx.y * kRuns);
  } else {
    repack_square_cta(job, block);
  }
}

constexpr int kUnit = 8;  // elements of 16 bytes

// A thread per unit of a row.
__global__ void deliver_kernel(DeviceMatrix dst, DeviceMatrix src, std::int64_t units, std::int64_t across,
                               std::int64_t cols) {
  auto* g_dst = static_cast<std::uint16_t*>(dst.data);
  const auto* g_src = static_cast<const std::uint16_t*>(src.data);
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < units; i += stride) {
    const std::int64_t row = i / across;
    const std::int64_t col = i % across * kUnit;
    const uint4 unit = *reinterpret_cast<const uint4*>(g_src + row * src.row_stride + col);
    std::uint16_t* const to = g_dst + row * dst.row_stride + col * dst.col_stride;
    if (dst.wide != 0 && col + kUnit <= cols) {
      *reinterpret_cast<uint4*>(to) = unit;
      continue;
    }
    const std::uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      if (col + e < cols) to[e * dst.col_stride] = static_cast<std::uint16_t>(words[e / 2] >> (e % 2 * 16));
    }
  }
}

__global__ void tell_c_kernel(const __grid_constant__ DeviceCall call) {
  tell_c_thread(call, ld_relaxed_gpu(&call.rank.control->epoch) + 1);
}

__global__ void raise_signals_kernel(const __grid_constant__ DeviceCall call, std::uint32_t tasks) {
  const DeviceRank& rank = call.rank;
  const std::uint64_t epoch_number = ld_relaxed_gpu(&rank.control->epoch) + 1;
  const EpochView epoch(epoch_number);
  const std::uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= tasks) return;
  // order: what earlier kernels of the stream have written, tell_c_kernel among them, is complete.
  const DeviceTask& task = rank.tasks[rank.lane_table[0].first + row];
  if (task.part.number != 0) return;  // a tile signals once
  for (const DeviceSignal& signal : task.signals) {
    for (std::int32_t gpu = signal.gpu_begin; gpu < signal.gpu_end; ++gpu) {
      const std::uint32_t before = atom_add_acq_rel_sys(epoch.flag(rank, gpu, signal.flag), 1);
      if (signal.records == 0 || gpu != rank.gpu || before + 1 != epoch.use * signal.record_count) continue;
      for (std::uint32_t i = 0; i < signal.records; ++i) {
        const DeviceRecord& entry = rank.records[signal.record + i];
        Record record;
        record.op = rank.op;
        record.epoch = static_cast<std::uint32_t>(epoch_number) & 0xff;
        record.task = entry.task;
        if (!push_record(rank.rings[entry.node], encode(record), global_time_ns() + rank.deadline_ns,
                         &rank.control->abort)) {
          st_relaxed_sys(&rank.control->abort, 1);  // the ring is blocked for good
        }
      }
    }
  }
}

}  // namespace

cudaError_t launch_repack(const Repack& one, const Repack& other, cudaStream_t stream, Overlap overlap) {
  const std::int64_t blocks = repack_blocks(one) + repack_blocks(other);
  if (blocks == 0) return cudaSuccess;
  return launch(repack_kernel, static_cast<unsigned>(blocks), dim3(kSquare, kRepackRows), 0, stream, overlap, one,
                repack_blocks(one), other);
}

void launch_deliver(const DeviceMatrix& dst, const DeviceMatrix& src, std::int64_t rows, std::int64_t cols,
                    cudaStream_t stream) {
  constexpr unsigned kBlock = 256;
  constexpr std::int64_t kMostBlocks = 2048;
  const std::int64_t across = ceil_div(cols, kUnit);
  if (rows * across == 0) return;
  const std::int64_t blocks = min_of(ceil_div(rows * across, kBlock), kMostBlocks);
  deliver_kernel<<<static_cast<unsigned>(blocks), kBlock, 0, stream>>>(dst, src, rows * across, across, cols);
}

void launch_raise_signals(const DeviceCall& call, std::uint32_t compute_tasks, cudaStream_t stream) {
  constexpr unsigned kBlock = 128;
  if (compute_tasks == 0) return;
  tell_c_kernel<<<1, 1, 0, stream>>>(call);
  raise_signals_kernel<<<(compute_tasks + kBlock - 1) / kBlock, kBlock, 0, stream>>>(call, compute_tasks);
}

}  // namespace mkernel
