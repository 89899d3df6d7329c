// One operator on GPUs: its memory on every rank, and what a launch of its kernel needs. Included by .cu files only.
#pragma once
#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "exec/cuda/attention_operator.h"
#include "exec/cuda/cuda_executor.h"
#include "exec/cuda/device_call.h"
#include "exec/cuda/device_heap.h"
#include "exec/cuda/kernel_table.h"
#include "exec/cuda/support_kernels.h"
#include "exec/cuda/task_table.h"
#include "exec/cuda/virtual_gpu.h"
#include "plan/heap_layout.h"

namespace mkernel {

// A block of a rank's memory: sizes in bytes from the start, each aligned to 256.
struct RankMemory {
  std::int64_t window = 0;  // these two begin at the same place on all ranks
  std::int64_t c_slots = 0;
  std::int64_t control = 0;
  std::int64_t heads = 0;
  std::int64_t begun = 0;
  std::int64_t lanes = 0;
  std::int64_t tasks = 0;
  std::int64_t claims = 0;
  std::int64_t records = 0;
  std::int64_t part_sums = 0;
  std::int64_t parts_done = 0;
  std::int64_t a_copy = 0;
  std::int64_t b_copy = 0;
  std::int64_t attention = 0;
  std::int64_t bytes = 0;
};

// As kernels get it.
DeviceMatrix device_matrix(const Matrix& m);

class CudaOperatorImpl : public CudaOperator {
 public:
  // What a rank keeps between launches. Of one in another process, the memory and where it begins.
  struct Rank {
    DeviceHeap memory;
    RankMemory at;
    TaskTable table;
    AlignedCopies aligned;
    DeviceRank device;  // as the kernel gets it
    CUtensorMap gather[2] = {};
    CUtensorMap packed[2] = {};
    AttentionTable attention;  // of ring_attention, which leaves `table` all but empty
    AttentionMemory attention_at;
    AttentionCall attention_call;  // its parts that stay the same
    std::int64_t task_count = 0;
    // Rows of A that a tile loads: whole swizzle atoms, but no more than its tallest needs.
    std::int32_t a_box_rows() const { return static_cast<std::int32_t>(max_of(ceil_div(table.tile_rows, 8) * 8, 8)); }
    cudaEvent_t done = nullptr;
    std::uint64_t launches = 0;  // guarded by the executor's launch mutex
    Nanos launched_ns = 0;       // of the last launch
    bool warned = false;
    bool failure_told = false;
  };
  // A launch, ready to be made: of a GEMM, whose kernel depends on how B lies, or of attention.
  struct Launch {
    DeviceCall call;
    KernelEntry kernel;
    AttentionCall attention_call;
    AttentionEntry attention_kernel;
    Repack copy_a;  // into own memory, first; of A, B where they need that
    Repack copy_b;
    bool deliver_c = false;  // C is in the window, and copied to the caller's afterwards
  };

  CudaOperatorImpl(std::uint32_t number, const CudaOperatorConfig& config, Partition partition,
                   std::int32_t first_rank);
  ~CudaOperatorImpl() override;

  // In this order: takes the memory of this process's ranks; reaches that of other processes, if there are any; fills
  // our ranks' memory. `rings[rank]` may be null (one node). `mailboxes[rank]` is mapped host memory.
  Status take_memory(VirtualGpus& gpus);
  Status reach_peers(VirtualGpus& gpus, const Status& taken);
  Status fill(VirtualGpus& gpus, const std::vector<const DeviceRing*>& rings,
              const std::vector<DeviceMailbox*>& mailboxes, double deadline_s);

  std::uint32_t number() const override { return number_; }
  const Plan& plan() const override { return config_.source->plan(); }
  Partition partition() const override { return partition_; }
  std::int64_t workspace_bytes() const override { return ranks_[static_cast<std::size_t>(first_rank_)].memory.bytes(); }
  std::int64_t tasks(std::int32_t rank) const override { return ranks_[static_cast<std::size_t>(rank)].task_count; }
  const CudaOperatorConfig& config() const { return config_; }
  const HeapLayout& layout() const { return layout_; }
  std::vector<std::byte*> heaps() const;
  Rank& rank(std::int32_t rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  bool is_attention() const { return plan().spec().op == Op::kRingAttention; }
  // Errors: kBadArgument, naming the matrix that lies in a way that needs any_layout, or the tensor that TMA cannot
  // read.
  Result<Launch> prepare(std::int32_t rank, const Arguments& arguments, std::uint32_t parts);

  // Bytes that take_memory() will take for `rank`, give or take what it decides then.
  static std::int64_t bytes_needed(const CudaOperatorConfig& config, std::int32_t rank, int sms);

 private:
  // GEMM + AllReduce between processes: the node's GPUs write C into a window of each other's memory, as they cannot
  // reach the callers' matrices.
  bool has_window() const { return static_cast<bool>(config_.share) && plan().spec().op == Op::kGemmAllReduce; }
  DeviceMatrix window(std::int32_t rank) const;
  RankMemory place(std::int32_t rank, const TaskTable& table, int sms) const;
  Status fill_rank(std::int32_t rank, const VirtualGpu& gpu);
  Status make_maps(Rank& rank);
  Status make_table(std::int32_t rank, int sms);
  Result<Launch> prepare_gemm(std::int32_t rank, const GemmArguments& arguments, std::uint32_t parts);
  Result<Launch> prepare_attention(std::int32_t rank, const AttentionArguments& arguments, std::uint32_t parts);
  Status take_a(std::int32_t rank, const Matrix& a, Launch& launch) const;
  Status take_b(std::int32_t rank, const Matrix& b, Launch& launch) const;
  Status take_c(std::int32_t rank, const Matrix& c, Launch& launch) const;

  const std::uint32_t number_;
  const CudaOperatorConfig config_;
  const Partition partition_;
  const HeapLayout layout_;
  const std::int32_t first_rank_;  // of those in this process
  std::vector<Rank> ranks_;
};

}  // namespace mkernel
