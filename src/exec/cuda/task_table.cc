#include "exec/cuda/task_table.h"

#include <fmt/format.h>

#include <map>

#include "base/check.h"
#include "exec/cuda/kernel_config.h"

namespace mkernel {
namespace {

constexpr std::int64_t kMaxCoordinate = (std::int64_t{1} << 31) - 1;
constexpr std::int32_t kMaxBulkSources = 256;  // each needs room for a unit in a stage of 24 KiB
constexpr std::int64_t kUnit = 8;              // elements that moves handle at once: 16 bytes of a 16-bit type

class Builder {
 public:
  Builder(const PlanSource& source, std::int32_t rank)
      : source_(source),
        plan_(source.plan()),
        rank_(rank),
        blocks_(static_cast<std::int32_t>(ceil_div(plan_.gemm_k(rank), kBlockK))) {}

  TaskTable build(const SplitK& split_k) {
    note_sends();
    choose_parts(split_k);
    add_lane(Role::kCompute, 0);
    for (const Role role : {Role::kIntra, Role::kRecv}) {
      for (std::int32_t lane = 0; lane < plan_.lanes(role); ++lane) add_lane(role, lane);
    }
    for (const auto& [flag, send] : sends_) MK_CHECK_OP(send.raises, ==, send.count);
    return std::move(table_);
  }

 private:
  // The network writes that wait for one flag of this rank, and how often the rank's own tasks raise it.
  struct Send {
    std::uint32_t count = 0;  // raises that the writes wait for
    std::uint32_t raises = 0;
    std::vector<DeviceRecord> records;
    std::uint32_t first = kNoTask;  // in the table, once a signal names them
  };

  // Store warps push a record when a signal completes what its task waits for. That needs sends that wait for exactly
  // one counter, which only tasks of this rank raise; build() checks the second half.
  void note_sends() {
    for (std::int32_t lane = 0; lane < plan_.lanes(Role::kSend); ++lane) {
      const std::int64_t count = source_.count(rank_, Role::kSend, lane);
      for (std::int64_t index = 0; index < count; ++index) {
        const Task task = source_.task(rank_, Role::kSend, lane, index);
        if (task.action == Action::kNone) continue;
        MK_CHECK_OP(task.waits[0].span, ==, 1u);
        MK_CHECK_OP(task.waits[1].span, ==, 0u);
        Send& send = sends_[task.waits[0].flag];
        MK_CHECK(send.count == 0 || send.count == task.waits[0].count);
        send.count = task.waits[0].count;
        send.records.push_back({static_cast<std::uint32_t>(send_id(plan_, {lane, index})),
                                static_cast<std::uint32_t>(plan_.topo().node_of(task.peer))});
      }
    }
  }

  void add_lane(Role role, std::int32_t lane) {
    DeviceLane entry;
    entry.first = static_cast<std::uint32_t>(table_.tasks.size());
    const std::int64_t count = source_.count(rank_, role, lane);
    for (std::int64_t index = 0; index < count; ++index) {
      const Task task = source_.task(rank_, role, lane, index);
      if (task.action == Action::kNone) continue;
      DeviceTask row = make_row(task);
      row.index = static_cast<std::uint32_t>(index);
      row.role_lane = static_cast<std::uint8_t>(static_cast<int>(role) | ((lane & 0x3f) << 2));
      if (role == Role::kCompute && tiles_++ >= split_.first_tile && split_.parts > 1) {
        add_parts(row);
      } else {
        table_.tasks.push_back(row);
      }
    }
    entry.count = static_cast<std::uint32_t>(table_.tasks.size()) - entry.first;
    if (entry.count > 0) {
      table_.tasks[entry.first].marks |= kFirstOfLane;
      table_.tasks.back().marks |= kLastOfLane;
    }
    table_.lanes.push_back(entry);
  }

  void choose_parts(const SplitK& split_k) {
    std::int64_t tiles = 0;
    std::int64_t rows = 0;
    const std::int64_t count = source_.count(rank_, Role::kCompute, 0);
    for (std::int64_t index = 0; index < count; ++index) {
      const Task task = source_.task(rank_, Role::kCompute, 0, index);
      if (task.action == Action::kNone) continue;
      ++tiles;
      rows = max_of(rows, task.block.rows);
    }
    table_.tile_rows = static_cast<std::int32_t>(rows);
    if (!has_parts(plan_.spec().tiling.bn)) return;
    const std::int32_t parts = min_of(split_k.parts, blocks_);
    if (parts > 1) split_ = {0, parts};
    if (split_k.parts == 0) split_ = choose_split(plan_.spec(), tiles, split_k.sms);
  }

  // A tile whose K is cut: its parts follow each other, all with its waits and signals.
  void add_parts(DeviceTask row) {
    row.part.slot = table_.parts;
    row.part.count = static_cast<std::uint16_t>(split_.parts);
    table_.parts += row.part.count;
    for (std::int32_t i = 0; i < split_.parts; ++i) {
      row.part.number = static_cast<std::uint16_t>(i);
      row.part.first_block = static_cast<std::int32_t>(std::int64_t{blocks_} * i / split_.parts);
      row.part.blocks =
          static_cast<std::int32_t>(std::int64_t{blocks_} * (i + 1) / split_.parts) - row.part.first_block;
      table_.tasks.push_back(row);
    }
  }

  DeviceTask make_row(const Task& task) {
    DeviceTask row;
    row.action = task.action == Action::kGemm ? DeviceAction::kGemm : DeviceAction::kMove;
    row.source = task.source;
    row.src = task.src;
    row.dst = task.dst;
    row.dst_reach = task.dst_reach;
    row.keep_result = task.keep_result;
    row.src_offset = task.src_offset;
    row.dst_offset = task.dst_offset;
    row.row = static_cast<std::int32_t>(task.block.row);
    row.col = static_cast<std::int32_t>(task.block.col);
    row.rows = static_cast<std::int32_t>(task.block.rows);
    row.cols = static_cast<std::int32_t>(task.block.cols);
    if (task.action == Action::kGemm) {
      if (task.src == Buffer::kGather) row.src_offset = task.src_offset / max_of(1, plan_.gather_pitch());
      row.path = gemm_path(task);
      row.part = {0, blocks_, 0, 0, 1};
    } else {
      row.arrivals = {task.arrival_offset, task.arrival_stride};
      if (task.dst == Buffer::kGather) row.cols = static_cast<std::int32_t>(plan_.gather_pitch());  // padding included
      row.path = move_path(task, row);
    }
    for (int i = 0; i < 2; ++i) {
      row.waits[i] = task.waits[i];
      row.signals[i] = make_signal(task.signals[i], task.peer);
    }
    return row;
  }

  // TMA stores write whole boxes, clipped at the matrix' edge only.
  Path gemm_path(const Task& task) const {
    const Tiling& tiling = plan_.spec().tiling;
    const bool full_rows = task.block.rows == tiling.bm;
    const bool full_cols = task.block.cols == tiling.bn;
    if (task.dst == Buffer::kC) {
      const Plan::Extent c = plan_.c_extent(rank_);
      const bool rows_end = task.block.row + task.block.rows == c.rows;
      const bool cols_end = task.block.col + task.block.cols == c.cols;
      return (full_rows || rows_end) && (full_cols || cols_end) ? Path::kTensor : Path::kDirect;
    }
    const bool whole = full_rows && full_cols && task.dst_offset % tiling.bn == 0 &&
                       task.dst_offset / tiling.bn <= kMaxCoordinate - tiling.bm;
    return whole && plan_.spec().partial != Dtype::kFp32 ? Path::kTensor : Path::kDirect;
  }

  Path move_path(const Task& task, const DeviceTask& row) const {
    const auto whole = [](std::int64_t elements) { return elements % kUnit == 0; };
    if (task.source == Source::kRail && plan_.topo().nodes > kMaxBulkSources) return Path::kDirect;
    if (!whole(row.cols) || !whole(task.arrival_offset) || !whole(task.arrival_stride)) return Path::kDirect;
    // A's rows are aligned when they come to the kernel.
    if (task.src != Buffer::kA && !whole(task.src_offset)) return Path::kDirect;
    if ((task.dst != Buffer::kC || task.keep_result) && !whole(task.dst_offset)) return Path::kDirect;
    return Path::kBulk;
  }

  DeviceSignal make_signal(const Signal& signal, std::int32_t peer) {
    DeviceSignal row;
    if (signal.reach == Reach::kNobody) return row;
    MK_CHECK(!signal.stamp);                  // stamps are the network's
    MK_CHECK(signal.reach != Reach::kPeers);  // no plan has this
    const Topology& topo = plan_.topo();
    row.flag = signal.flag;
    row.local = signal.reach == Reach::kSelf ? 1 : 0;
    const std::int32_t gpu = topo.gpu_of(signal.reach == Reach::kRank ? peer : rank_);
    const std::int32_t gpus = signal.reach == Reach::kRank ? signal.ranks : 1;
    row.gpu_begin = static_cast<std::uint16_t>(signal.reach == Reach::kNode ? 0 : gpu);
    row.gpu_end = static_cast<std::uint16_t>(signal.reach == Reach::kNode ? topo.gpus : gpu + gpus);
    const bool reaches_self = topo.gpu_of(rank_) >= row.gpu_begin && topo.gpu_of(rank_) < row.gpu_end;
    const auto it = reaches_self ? sends_.find(signal.flag) : sends_.end();
    if (it == sends_.end()) return row;
    Send& send = it->second;
    ++send.raises;
    if (send.first == kNoTask) {
      send.first = static_cast<std::uint32_t>(table_.records.size());
      table_.records.insert(table_.records.end(), send.records.begin(), send.records.end());
    }
    row.record = send.first;
    row.records = static_cast<std::uint16_t>(send.records.size());
    row.record_count = send.count;
    return row;
  }

  const PlanSource& source_;
  const Plan& plan_;
  const std::int32_t rank_;
  TileSplit split_;
  const std::int32_t blocks_;  // of K
  std::int64_t tiles_ = 0;     // so far
  std::map<std::uint32_t, Send> sends_;
  TaskTable table_;
};

}  // namespace

Result<TaskTable> make_task_table(const PlanSource& source, std::int32_t rank, const SplitK& split_k) {
  const PlanSpec& spec = source.plan().spec();
  const struct {
    const char* name;
    std::int64_t value;
  } sizes[] = {{"m", spec.m}, {"n", spec.n}, {"k", spec.k}};
  for (const auto& size : sizes) {
    if (size.value <= kMaxCoordinate - 1024) continue;
    return bad_argument(fmt::format("{} is {}: on a GPU at most {} is accepted, since TMA has 31-bit coordinates",
                                    size.name, size.value, kMaxCoordinate - 1024));
  }
  return Builder(source, rank).build(split_k);
}

}  // namespace mkernel
