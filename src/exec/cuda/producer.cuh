// The producer: one thread that loads operands of GEMM tiles and sources of moves into the stages.
#pragma once
#include "exec/cuda/kernel_shared.cuh"

namespace mkernel {

template <class Tile, Major kMajorB>
struct Producer {
  const DeviceCall& call;
  SharedMemory<Tile>& s;
  EpochView epoch{};
  RingPosition<Tile::kStages> stage{0, 1};

  __device__ void run_thread() {
    RingPosition<kTaskRing> at;
    bool begun = false;
    wait_for_stream();
    for (bool more = true; more; at.advance()) {
      s.ring_full[at.slot].wait(at.phase);
      const DeviceTask& task = s.ring[at.slot];
      // An early tile comes before the epoch is known, and does not ask for it.
      if (!begun && (at.slot != 0 || task.action != DeviceAction::kGemm || task.src != Buffer::kA)) {
        s.begun.wait(0);
        epoch = EpochView(s.epoch);
        begun = true;
      }
      // order: what the scheduler has acquired for this task comes before our loads; pairs with the signals of
      // whoever wrote it (Store::raise, the network's stamps).
      if ((task.waits[0].span | task.waits[1].span) != 0) fence_proxy_async();
      if (task.action == DeviceAction::kGemm) {
        load_tile(task);
      } else {
        s.picked.arrive();
        if (task.action == DeviceAction::kMove && task.path == Path::kBulk) load_move(task);
        more = task.action != DeviceAction::kExit;
      }
      s.ring_empty[at.slot].arrive();
    }
  }

 private:
  __device__ void load_tile(const DeviceTask& task) {
    const CUtensorMap& a = task.src == Buffer::kA ? call.a : call.gather[epoch.parity ^ planted(Fault::kStaleGather)];
    const auto a_row = static_cast<std::int32_t>(task.src_offset);
    const std::int32_t col = task.col;
    const std::int32_t begin = task.part.first_block;
    const std::int32_t end = begin + (call.k > 0 ? task.part.blocks : 0);
    const std::int32_t choose = max(end - kChooseAhead, begin);
    if (begin == end) s.picked.arrive();
    for (std::int32_t k = begin; k < end; ++k) {
      if (k == choose) s.picked.arrive();
      if (!planted(Fault::kNoStageWait)) s.empty[stage.slot].wait(stage.phase);
      Mbarrier& full = s.full[stage.slot];
      std::byte* s_a = s.stages[stage.slot];  // (BM, BK); rows beyond those of any tile are left as they are
      std::byte* s_b = s_a + Tile::kABytes;   // (BN, BK), or (BK, 64) boxes along n
      full.arrive_and_expect(static_cast<std::uint32_t>(call.a_bytes + Tile::kBBytes));
      tma_load_thread(s_a, a, k * kBlockK, a_row, full);
      if constexpr (kMajorB == Major::kK) {
        tma_load_thread(s_b, call.b, k * kBlockK, col, full);
      } else {
#pragma unroll
        for (int box = 0; box < Tile::kBn / 64; ++box) {
          tma_load_thread(s_b + box * kBoxBytes, call.b, col + box * 64, k * kBlockK, full);
        }
      }
      stage.advance();
    }
  }

  __device__ void load_move(const DeviceTask& task) {
    const DeviceRank& rank = call.rank;
    const Slabs slabs(task, rank, Tile::kStageBytes);
    const bool contiguous = task.src != Buffer::kA;
    const std::int64_t row_bytes =
        contiguous ? std::int64_t{slabs.row_units} * slabs.unit_bytes : call.a_matrix.row_stride * 2;
    slabs.for_each([&](std::int32_t row, std::int32_t rows, std::int32_t unit, std::int32_t units) {
      s.empty[stage.slot].wait(stage.phase);
      Mbarrier& full = s.full[stage.slot];
      const std::int32_t bytes = units * slabs.unit_bytes;
      full.arrive_and_expect(static_cast<std::uint32_t>(bytes * rows * slabs.sources));
      for (std::int32_t i = 0; i < slabs.sources; ++i) {
        std::byte* s_dst = s.stages[stage.slot] + i * slabs.source_bytes;
        const std::byte* g_src = source_address(task, rank, call.a_matrix, epoch, i) + row * row_bytes +
                                 std::int64_t{unit} * slabs.unit_bytes;
        if (contiguous) {
          bulk_load_thread(s_dst, g_src, bytes * rows, full);
        } else {
          for (std::int32_t r = 0; r < rows; ++r)
            bulk_load_thread(s_dst + r * bytes, g_src + r * row_bytes, bytes, full);
        }
      }
      stage.advance();
    });
  }
};

}  // namespace mkernel
