#include "exec/cuda/attention_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <queue>
#include <utility>

#include "base/check.h"
#include "exec/cuda/attention_config.h"
#include "plan/ring_attention.h"

namespace mkernel {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 29;         // sums of a few positions fit 32 bits
constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1024;  // TMA has 31-bit coordinates
constexpr int kFewSms = 64;  // contexts of so few must share the L2 cache with others: few heads at a time
constexpr std::int64_t kHeadsAtOnce = 2;
// What the beginning and the end of a tile take, in units of 128 keys (hopper-notes-attention.md, Q2).
constexpr double kTileCost = 1.5;

class Builder {
 public:
  Builder(const PlanSource& source, std::int32_t rank, int compute_ctas, int sms)
      : source_(source),
        plan_(source.plan()),
        ring_(plan_.ring_attention()),
        spec_(plan_.spec().attention),
        rank_(rank),
        compute_ctas_(compute_ctas),
        sms_(sms),
        q_split_(spec_.q_split(plan_.topo())),
        k_tokens_(spec_.k_split(plan_.topo()).tokens(rank)) {}

  Result<AttentionTable> build() {
    // Longest first keeps the lists nearly as long as each other, but for the mask; checked again below.
    if (plan_.topo().world() > 1 && ring_.tiles > std::int64_t{kOpenTiles} * compute_ctas_) {
      return too_many(ceil_div(ring_.tiles, compute_ctas_));
    }
    add_steps();
    share_out(take_tiles());
    add_lanes();
    const bool may_wait = std::any_of(table_.steps.begin(), table_.steps.end(), [](const auto& s) { return s.count; });
    for (std::size_t i = 0; i + 1 < table_.tile_begin.size() && may_wait; ++i) {
      const std::int32_t tiles = table_.tile_begin[i + 1] - table_.tile_begin[i];
      if (tiles > kOpenTiles) return too_many(tiles);
    }
    return std::move(table_);
  }

 private:
  Error too_many(std::int64_t tiles) const {
    return bad_argument(fmt::format(
        "{} x {} heads of {} queries make {} tiles for one SM, and {} may be open at a time: take more SMs or smaller "
        "batches",
        spec_.batch, spec_.heads, spec_.seq_q, tiles, kOpenTiles));
  }
  std::int64_t kv_head_of(std::int64_t head) const { return head / (spec_.heads / spec_.kv_heads); }
  std::int64_t head_of(const Task& task) const { return task.block.row / q_split_.tokens(rank_); }

  // Every tile's tasks must name the same keys, but for the head.
  void add_steps() {
    const std::int64_t steps = ring_.steps();
    table_.steps.resize(static_cast<std::size_t>(steps));
    for (std::int64_t index = 0; index < source_.count(rank_, Role::kCompute, 0); ++index) {
      const Task task = source_.task(rank_, Role::kCompute, 0, index);
      MK_CHECK(task.signals[1].reach == Reach::kNobody);  // slots for all: nobody waits for credits
      AttentionStep& step = table_.steps[static_cast<std::size_t>(index / ring_.tiles)];
      AttentionStep own;
      own.position = static_cast<std::int32_t>(task.kv_position);
      own.keys = static_cast<std::int32_t>(task.length / spec_.dim);
      own.own = task.src == Buffer::kK ? 1 : 0;
      MK_CHECK(task.waits[0].span <= 1);
      own.flag = task.waits[0].span == 0 ? 0 : task.waits[0].flag;
      own.count = task.waits[0].span == 0 ? 0 : task.waits[0].count;
      if (own.keys > 0) {
        const std::int64_t kv_head = kv_head_of(head_of(task));
        own.row = static_cast<std::int32_t>(own.own != 0 ? task.src_offset - kv_head * k_tokens_
                                                         : task.src_offset / spec_.dim - 2 * kv_head * own.keys);
      }
      if (step.keys == 0) step = own;
      MK_CHECK_OP(step.flag, ==, own.flag);
      MK_CHECK_OP(step.count, ==, own.count);
      if (own.keys == 0) continue;
      MK_CHECK_OP(step.keys, ==, own.keys);
      MK_CHECK_OP(step.position, ==, own.position);
      MK_CHECK_OP(step.row, ==, own.row);
    }
  }

  struct Costed {
    AttentionTile tile;
    std::int64_t group = 0;  // of heads
    double cost = 0;
  };

  std::vector<Costed> take_tiles() const {
    std::vector<Costed> tiles;
    for (std::int64_t number = 0; number < ring_.tiles; ++number) {
      const Task task = source_.task(rank_, Role::kCompute, 0, number);
      if (task.block.rows == 0) continue;
      const std::int64_t head = head_of(task);
      const std::int64_t token = task.block.row % q_split_.tokens(rank_);
      Costed entry;
      AttentionTile& tile = entry.tile;
      tile.token = static_cast<std::int32_t>(token);
      tile.rows = static_cast<std::int32_t>(task.block.rows);
      tile.head = static_cast<std::int32_t>(head % spec_.heads);
      tile.batch = static_cast<std::int32_t>(head / spec_.heads);
      tile.kv_head = static_cast<std::int32_t>(kv_head_of(head) % spec_.kv_heads);
      tile.position = static_cast<std::int32_t>(q_split_.position(rank_, token));
      tile.number = static_cast<std::int32_t>(number);
      entry.group = sms_ < kFewSms ? head / kHeadsAtOnce : 0;
      entry.cost = cost_of(tile);
      tiles.push_back(entry);
    }
    return tiles;
  }

  double cost_of(const AttentionTile& tile) const {
    if (spec_.packed) return kTileCost;  // only a call knows
    const KeyRange sees = spec_.mask.sees(tile.position, tile.rows, spec_.seq_q, spec_.seq_k);
    double cost = kTileCost;
    for (const AttentionStep& step : table_.steps) {
      const std::int64_t begin = max_of(sees.begin, step.position);
      const std::int64_t end = min_of(sees.end, step.position + step.keys);
      if (begin < end) cost += static_cast<double>(ceil_div(end - begin, 128));
    }
    return cost;
  }

  // Longest first, each to the CTA that has least so far.
  void share_out(std::vector<Costed> tiles) {
    std::stable_sort(tiles.begin(), tiles.end(), [](const Costed& a, const Costed& b) {
      return a.group != b.group ? a.group < b.group : a.cost > b.cost;
    });
    using Load = std::pair<double, int>;
    std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
    for (int cta = 0; cta < compute_ctas_; ++cta) loads.push({0.0, cta});
    std::vector<std::vector<AttentionTile>> lists(static_cast<std::size_t>(compute_ctas_));
    for (const Costed& entry : tiles) {
      const auto [load, cta] = loads.top();
      loads.pop();
      loads.push({load + entry.cost, cta});
      lists[static_cast<std::size_t>(cta)].push_back(entry.tile);
    }
    table_.tile_begin.push_back(0);
    for (const auto& list : lists) {
      table_.tiles.insert(table_.tiles.end(), list.begin(), list.end());
      table_.tile_begin.push_back(static_cast<std::int32_t>(table_.tiles.size()));
    }
  }

  void add_lanes() {
    for (const Role role : {Role::kIntra, Role::kRecv}) {
      for (std::int32_t lane = 0; lane < plan_.lanes(role); ++lane) add_lane(role, lane);
    }
    table_.move_lanes = static_cast<std::int32_t>(table_.lanes.size());
    for (std::int32_t lane = 0; lane < plan_.lanes(Role::kSend); ++lane) add_lane(Role::kSend, lane);
    table_.send_lanes = static_cast<std::int32_t>(table_.lanes.size()) - table_.move_lanes;
  }

  void add_lane(Role role, std::int32_t lane) {
    DeviceLane entry;
    entry.first = static_cast<std::uint32_t>(table_.tasks.size());
    const std::int64_t count = source_.count(rank_, role, lane);
    for (std::int64_t index = 0; index < count; ++index) {
      const Task task = source_.task(rank_, role, lane, index);
      if (task.action == Action::kNone) continue;
      DeviceTask row = role == Role::kSend ? send_row(task, {lane, index}) : move_row(task);
      row.waits[0] = task.waits[0];
      row.waits[1] = task.waits[1];
      row.index = static_cast<std::uint32_t>(index);
      row.role_lane = static_cast<std::uint8_t>(static_cast<int>(role) | ((lane & 0x3f) << 2));
      table_.tasks.push_back(row);
    }
    entry.count = static_cast<std::uint32_t>(table_.tasks.size()) - entry.first;
    if (entry.count > 0) {
      table_.tasks[entry.first].marks |= kFirstOfLane;
      table_.tasks.back().marks |= kLastOfLane;
    }
    table_.lanes.push_back(entry);
  }

  // Of the caller's tensors: `row` is the token, `col` the head, all batches' heads counted on.
  DeviceTask move_row(const Task& task) const {
    MK_CHECK(task.action == Action::kCopy);
    DeviceTask row;
    row.action = DeviceAction::kMove;
    row.path = Path::kBulk;
    row.source = task.source;
    row.src = task.src;
    row.dst = task.dst;
    row.dst_reach = task.dst_reach;
    row.dst_offset = task.dst_offset;
    row.rows = static_cast<std::int32_t>(task.block.rows);
    row.cols = static_cast<std::int32_t>(spec_.dim);
    if (task.src == Buffer::kKv) {
      row.src_offset = task.src_offset;
    } else if (k_tokens_ > 0) {
      row.row = static_cast<std::int32_t>(task.src_offset % k_tokens_);
      row.col = static_cast<std::int32_t>(task.src_offset / k_tokens_);
    }
    for (int i = 0; i < 2; ++i) row.signals[i] = signal_row(task.signals[i]);
    return row;
  }
  DeviceSignal signal_row(const Signal& signal) const {
    DeviceSignal row;
    if (signal.reach == Reach::kNobody) return row;
    MK_CHECK(!signal.stamp);  // stamps are the network's
    MK_CHECK(signal.reach == Reach::kSelf || signal.reach == Reach::kPeers);
    row.flag = signal.flag;
    const bool self = signal.reach == Reach::kSelf;
    row.local = self ? 1 : 0;
    row.gpu_begin = static_cast<std::uint16_t>(self ? plan_.topo().gpu_of(rank_) : 0);
    row.gpu_end = static_cast<std::uint16_t>(self ? row.gpu_begin + 1 : plan_.topo().gpus);
    return row;
  }
  // `row` is the number in the command record, `col` the node that it goes to.
  DeviceTask send_row(const Task& task, const SendId& id) const {
    MK_CHECK(task.action == Action::kPut);
    DeviceTask row;
    row.row = static_cast<std::int32_t>(send_id(plan_, id));
    row.col = plan_.topo().node_of(task.peer);
    return row;
  }

  const PlanSource& source_;
  const Plan& plan_;
  const RingAttentionPlan& ring_;
  const AttentionSpec& spec_;
  const std::int32_t rank_;
  const int compute_ctas_;
  const int sms_;
  const SequenceSplit q_split_;
  const std::int64_t k_tokens_;
  AttentionTable table_;
};

}  // namespace

Status validate_gpu_attention(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  if (spec.dtype == Dtype::kFp32) return bad_argument("dtype fp32 has no GPU kernel: bf16 and fp16 are accepted");
  if (spec.tiling.bm != kAttentionRows) {
    return bad_argument(fmt::format("bm is {}: on a GPU a tile has {} queries", spec.tiling.bm, kAttentionRows));
  }
  if (!(a.scale > 0)) {
    return Error{ErrorKind::kUnsupported, fmt::format("scale is {}: the GPU kernel takes positive ones only", a.scale)};
  }
  const struct {
    const char* name;
    std::int64_t value;
  } sizes[] = {{"seq_q", a.seq_q}, {"seq_k", a.seq_k}};
  for (const auto& size : sizes) {
    if (size.value <= kMaxTokens) continue;
    return bad_argument(fmt::format("{} is {}: on a GPU at most {} is accepted, since positions have 32 bits there",
                                    size.name, size.value, kMaxTokens));
  }
  const RingAttentionPlan plan = RingAttentionPlan::make(spec);
  if (plan.depth < plan.rounds) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("slot_rounds is {}: the GPU kernel wants slots for all {} rounds so far (-1)",
                             a.slot_rounds, plan.rounds)};
  }
  if (plan.buffer_elements(Buffer::kKv) / a.dim > kMaxRows || plan.steps() > 0x7ffe ||
      std::int64_t{2} * a.batch * a.kv_heads * max_of(1, a.k_split(spec.topo).max_size()) > kMaxRows) {
    return bad_argument(fmt::format(
        "{} x {} key heads of {} keys make more rows or chunks than TMA's 31-bit coordinates and 15 bits can name",
        a.batch, a.kv_heads, a.seq_k));
  }
  return Ok{};
}

Result<AttentionTable> make_attention_table(const PlanSource& source, std::int32_t rank, int compute_ctas, int sms) {
  if (Status status = validate_gpu_attention(source.plan().spec()); !status.ok()) return status.error();
  return Builder(source, rank, compute_ctas, sms).build();
}

}  // namespace mkernel
