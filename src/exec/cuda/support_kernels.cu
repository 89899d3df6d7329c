#include "exec/cuda/device_push.cuh"
#include "exec/cuda/kernel_shared.cuh"
#include "exec/cuda/support_kernels.h"
#include "net/record.h"

namespace mkernel {
namespace {

constexpr int kSquare = 32;     // a block moves 32 x 32 elements, so that reads and writes are both in long runs
constexpr int kRepackRows = 8;  // rows that the block's threads take at once

std::int64_t squares_across(const Repack& job) { return ceil_div(job.dst_pitch, kSquare); }
std::int64_t squares(const Repack& job) { return squares_across(job) * ceil_div(job.rows, kSquare); }

// One block per square of a dst, those of `one` first; blockDim (32, 8).
__global__ void repack_kernel(Repack one, std::int64_t one_squares, std::int64_t one_across, Repack other,
                              std::int64_t other_across) {
  __shared__ std::uint16_t s_square[kSquare][kSquare + 2];  // padded against bank conflicts
  const bool is_one = blockIdx.x < one_squares;
  const Repack job = is_one ? one : other;
  const std::int64_t square = is_one ? blockIdx.x : blockIdx.x - one_squares;
  const std::int64_t across = is_one ? one_across : other_across;
  const DeviceMatrix& src = job.src;
  const auto* g_src = static_cast<const std::uint16_t*>(src.data);
  auto* g_dst = static_cast<std::uint16_t*>(job.dst);
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

void launch_repack(const Repack& one, const Repack& other, cudaStream_t stream) {
  const std::int64_t blocks = squares(one) + squares(other);
  if (blocks == 0) return;
  repack_kernel<<<static_cast<unsigned>(blocks), dim3(kSquare, kRepackRows), 0, stream>>>(
      one, squares(one), max_of(1, squares_across(one)), other, max_of(1, squares_across(other)));
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
