#include "exec/cuda/device_push.cuh"
#include "exec/cuda/kernel_shared.cuh"
#include "exec/cuda/support_kernels.h"
#include "net/record.h"

namespace mkernel {
namespace {

constexpr int kSquare = 32;  // a block moves 32 x 32 elements, so that reads and writes are both in long runs

// One block per square of dst; blockDim (32, 8).
__global__ void repack_kernel(std::uint16_t* dst, std::int64_t dst_pitch, DeviceMatrix src, std::int64_t rows,
                              std::int64_t cols, std::int64_t squares_across) {
  __shared__ std::uint16_t s_square[kSquare][kSquare + 2];  // padded against bank conflicts
  const auto* g_src = static_cast<const std::uint16_t*>(src.data);
  const std::int64_t row0 = blockIdx.x / squares_across * kSquare;
  const std::int64_t col0 = blockIdx.x % squares_across * kSquare;
  const bool along_rows = src.row_stride < src.col_stride;  // the source is contiguous along rows: read that way
  for (int i = static_cast<int>(threadIdx.y); i < kSquare; i += static_cast<int>(blockDim.y)) {
    const int r = along_rows ? static_cast<int>(threadIdx.x) : i;
    const int c = along_rows ? i : static_cast<int>(threadIdx.x);
    const std::int64_t row = row0 + r;
    const std::int64_t col = col0 + c;
    s_square[r][c] = row < rows && col < cols ? g_src[row * src.row_stride + col * src.col_stride] : std::uint16_t{0};
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.y); r < kSquare; r += static_cast<int>(blockDim.y)) {
    const std::int64_t row = row0 + r;
    const std::int64_t col = col0 + threadIdx.x;
    if (row < rows && col < dst_pitch) dst[row * dst_pitch + col] = s_square[r][threadIdx.x];
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
  for (const DeviceSignal& signal : rank.tasks[rank.lane_table[0].first + row].signals) {
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

void launch_repack(void* dst, std::int64_t dst_pitch, const DeviceMatrix& src, std::int64_t rows, std::int64_t cols,
                   cudaStream_t stream) {
  const std::int64_t across = ceil_div(dst_pitch, kSquare);
  const std::int64_t blocks = across * ceil_div(rows, kSquare);
  if (blocks == 0) return;
  repack_kernel<<<static_cast<unsigned>(blocks), dim3(kSquare, 8), 0, stream>>>(static_cast<std::uint16_t*>(dst),
                                                                                dst_pitch, src, rows, cols, across);
}

void launch_raise_signals(const DeviceCall& call, std::uint32_t compute_tasks, cudaStream_t stream) {
  constexpr unsigned kBlock = 128;
  if (compute_tasks == 0) return;
  tell_c_kernel<<<1, 1, 0, stream>>>(call);
  raise_signals_kernel<<<(compute_tasks + kBlock - 1) / kBlock, kBlock, 0, stream>>>(call, compute_tasks);
}

}  // namespace mkernel
