// The attention kernel's tables are run on the host: movers, senders, the network and CTAs that fold keys, in any
// order, as the kernel's roles would, with flags that only grow. Everybody must get to the end of several calls, and
// find the keys of this call, and no others, where a flag said that they are.
//
// The roles here are the kernel's without their arithmetic: AttentionMover::take(), AttentionSender::send_thread(),
// AttentionProducer::run_warp(), leave_attention_warp(). Of the network only what all transports promise is kept: a
// stamp comes after its own bytes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "exec/cuda/attention_table.h"
#include "ops/attention_spec.h"
#include "plan/flag_init.h"

namespace mkernel {
namespace {

constexpr int kCtas = 4;              // per rank
constexpr std::uint32_t kAhead = 16;  // as AttentionMover has it
constexpr std::size_t kInFlight = 3;  // copies that a rank does at a time

// What stands in a row of keys or values: who wrote it, and in which call.
std::uint64_t tag(std::uint64_t epoch, bool values, std::int64_t head, std::int64_t position) {
  return epoch << 52 | (values ? 1ull : 0ull) << 51 | static_cast<std::uint64_t>(head) << 32 |
         static_cast<std::uint64_t>(position);
}

class Replay {
 public:
  Replay(const PlanSpec& spec, std::uint64_t seed, std::uint64_t start_epoch, int compute_ctas)
      : source_(Plan(spec)),
        plan_(source_.plan()),
        layout_(plan_),
        k_split_(spec.attention.k_split(spec.topo)),
        random_(seed),
        start_epoch_(start_epoch),
        kv_rows_(plan_.buffer_elements(Buffer::kKv) / spec.attention.dim) {
    for (std::int32_t r = 0; r < plan_.topo().world(); ++r) {
      Rank rank;
      rank.table = make_attention_table(source_, r, compute_ctas, kCtas).value();
      rank.flags.assign(2 * std::size_t{plan_.flag_count()}, 0);
      init_flags(source_, r, start_epoch, rank.flags.data());
      for (auto& rows : rank.kv) rows.assign(static_cast<std::size_t>(kv_rows_), 0);
      rank.claims.assign(rank.table.tasks.size(), 0);
      rank.ctas.resize(rank.table.tile_begin.size() - 1);
      rank.epoch = start_epoch;
      ranks_.push_back(std::move(rank));
    }
  }

  // Empty when all ranks got through `calls` calls; else who waits for what, or what is wrong.
  std::string run(std::uint64_t calls) {
    last_epoch_ = start_epoch_ + calls;
    for (;;) {
      const double activity = random_.uniform();
      if (round(activity) || round(1)) {
        if (!wrong_.empty()) return wrong_;
        continue;
      }
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (ranks_[r].epoch != last_epoch_) return stall(static_cast<std::int32_t>(r));
      }
      return surplus();
    }
  }
  int parked() const { return parked_; }

 private:
  struct Move {
    std::uint32_t row = 0;
    bool copied = false;
  };
  struct Cta {
    std::int32_t opened = 0;
    std::int32_t ready = 0;
    std::int32_t finished = 0;
    std::int32_t at = 0;
    std::int32_t current = -1;  // tile in registers
    std::vector<std::int32_t> next_step;
  };
  struct Rank {
    AttentionTable table;
    std::vector<std::uint32_t> flags;
    std::vector<std::uint64_t> kv[2];  // by parity, one word for a row
    std::vector<std::uint64_t> claims;
    std::vector<std::uint32_t> heads;  // by lane
    std::vector<Move> moves;           // under way
    std::vector<Cta> ctas;
    std::uint64_t epoch = 0;  // completed
    bool running = false;
  };
  struct Write {
    std::int32_t from = 0;
    std::uint64_t epoch = 0;
    Task task;
  };

  Rank& at(std::int32_t rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  std::uint32_t& flag(std::int32_t rank, std::uint32_t number, std::uint64_t epoch) {
    return at(rank).flags[static_cast<std::size_t>(layout_.flag_index(number, epoch))];
  }
  bool is_met(std::int32_t rank, const Wait& wait) {
    const std::uint64_t epoch = at(rank).epoch + 1;
    for (std::uint32_t i = 0; i < wait.span; ++i) {
      if (!flag_reached(flag(rank, wait.flag + i, epoch), use_of_epoch(epoch) * wait.count)) return false;
    }
    return true;
  }
  bool is_met(std::int32_t rank, const DeviceTask& task) {
    return is_met(rank, task.waits[0]) && is_met(rank, task.waits[1]);
  }
  static Wait wait_of(const AttentionStep& step) { return {step.flag, step.count != 0 ? 1u : 0u, step.count}; }

  // Everybody has a turn, or leaves it out. False: nobody could do anything.
  bool round(double activity) {
    bool any = false;
    const auto world = static_cast<std::int32_t>(ranks_.size());
    const auto first = static_cast<std::int32_t>(random_.below(static_cast<std::uint64_t>(world)));
    for (std::int32_t i = 0; i < world && wrong_.empty(); ++i) {
      const std::int32_t r = (first + i) % world;
      if (!random_.chance(activity)) continue;  // this rank is slow now
      Rank& rank = at(r);
      if (!rank.running) {
        any = begin(r) || any;
        continue;
      }
      if (random_.chance(activity)) any = claim(r) || any;
      if (random_.chance(activity)) any = move(r) || any;
      if (random_.chance(activity)) any = send(r) || any;
      for (Cta& cta : rank.ctas) {
        if (random_.chance(activity)) any = compute(r, cta) || any;
      }
      any = leave(r) || any;
    }
    if (!writes_.empty() && random_.chance(activity)) any = deliver() || any;
    return any;
  }

  bool begin(std::int32_t r) {
    Rank& rank = at(r);
    if (rank.epoch == last_epoch_) return false;
    rank.running = true;
    rank.heads.assign(rank.table.lanes.size(), 0);
    for (std::size_t i = 0; i < rank.ctas.size(); ++i) {
      rank.ctas[i] = {};
      rank.ctas[i].next_step.resize(static_cast<std::size_t>(rank.table.tile_begin[i + 1] - rank.table.tile_begin[i]));
    }
    return true;
  }

  // --- copies and network writes ---

  bool claim(std::int32_t r) {
    Rank& rank = at(r);
    if (rank.moves.size() == kInFlight) return false;
    for (std::int32_t i = 0; i < rank.table.move_lanes; ++i) {
      const DeviceLane& lane = rank.table.lanes[static_cast<std::size_t>(i)];
      std::uint32_t& head = rank.heads[static_cast<std::size_t>(i)];
      while (head < lane.count && rank.claims[lane.first + head] == rank.epoch + 1) ++head;
      const std::uint32_t end = std::min(head + kAhead, lane.count);
      const auto skip = static_cast<std::uint32_t>(random_.below(kAhead));  // CTAs want different ones
      for (std::uint32_t j = head; j < end; ++j) {
        const std::uint32_t row = lane.first + head + (j - head + skip) % (end - head);
        if (rank.claims[row] == rank.epoch + 1 || !is_met(r, rank.table.tasks[row])) continue;
        rank.claims[row] = rank.epoch + 1;
        rank.moves.push_back({row, false});
        return true;
      }
    }
    return false;
  }

  // One half of a copy: the bytes, or the flags.
  bool move(std::int32_t r) {
    Rank& rank = at(r);
    if (rank.moves.empty()) return false;
    const std::size_t which = random_.below(rank.moves.size());
    const DeviceTask& task = rank.table.tasks[rank.moves[which].row];
    if (!std::exchange(rank.moves[which].copied, true)) {
      copy(r, task);
      return true;
    }
    rank.moves.erase(rank.moves.begin() + static_cast<std::ptrdiff_t>(which));
    const std::int32_t own = plan_.topo().gpu_of(r);
    for (const DeviceSignal& signal : task.signals) {
      for (std::int32_t gpu = signal.gpu_begin; gpu < signal.gpu_end; ++gpu) {
        if (signal.local == 0 && task.dst_reach == Reach::kPeers && gpu == own) continue;
        ++flag(peer(r, gpu), signal.flag, rank.epoch + 1);
      }
    }
    return true;
  }
  std::int32_t peer(std::int32_t r, std::int32_t gpu) const {
    return plan_.topo().rank_of(plan_.topo().node_of(r), gpu);
  }
  void copy(std::int32_t r, const DeviceTask& task) {
    const std::int64_t dim = plan_.spec().attention.dim;
    const std::uint64_t epoch = at(r).epoch + 1;
    const bool peers = task.dst_reach == Reach::kPeers;
    const std::int32_t own = plan_.topo().gpu_of(r);
    for (std::int64_t i = 0; i < task.rows; ++i) {
      const std::uint64_t word = task.src == Buffer::kKv
                                     ? at(r).kv[epoch & 1][static_cast<std::size_t>(task.src_offset / dim + i)]
                                     : tag(epoch, task.src == Buffer::kV, task.col, k_split_.position(r, task.row + i));
      for (std::int32_t gpu = 0; gpu < plan_.topo().gpus; ++gpu) {
        if ((gpu == own) == peers) continue;
        at(peer(r, gpu)).kv[epoch & 1][static_cast<std::size_t>(task.dst_offset / dim + i)] = word;
      }
    }
  }

  bool send(std::int32_t r) {
    Rank& rank = at(r);
    bool any = false;
    for (std::int32_t i = 0; i < rank.table.send_lanes; ++i) {
      const auto lane_index = static_cast<std::size_t>(rank.table.move_lanes + i);
      const DeviceLane& lane = rank.table.lanes[lane_index];
      std::uint32_t& next = rank.heads[lane_index];
      while (next < lane.count && is_met(r, rank.table.tasks[lane.first + next])) {
        const DeviceTask& row = rank.table.tasks[lane.first + next++];
        const SendId id = send_of(plan_, row.row);  // as the proxy reads the record
        const Task task = source_.task(r, Role::kSend, id.lane, id.index);
        if (plan_.topo().node_of(task.peer) != row.col) wrong_ = "a record lies in the ring of another destination";
        writes_.push_back({r, rank.epoch + 1, task});
        any = true;
      }
    }
    return any;
  }
  // The bytes are read now, so late that the sender may be a call further on.
  bool deliver() {
    const std::size_t which = random_.below(writes_.size());
    const Write write = writes_[which];
    writes_.erase(writes_.begin() + static_cast<std::ptrdiff_t>(which));
    const std::int64_t dim = plan_.spec().attention.dim;
    const std::vector<std::uint64_t>& from = at(write.from).kv[write.epoch & 1];
    std::vector<std::uint64_t>& to = at(write.task.peer).kv[write.epoch & 1];
    std::copy_n(from.begin() + write.task.src_offset / dim, write.task.length / dim,
                to.begin() + write.task.dst_offset / dim);
    flag(write.task.peer, write.task.signals[0].flag, write.epoch) = use_of_epoch(write.epoch);
    return true;
  }

  // --- folding ---

  const AttentionTile& tile_of(std::int32_t r, const Cta& cta, std::int32_t number) {
    const Rank& rank = at(r);
    const std::int32_t first = rank.table.tile_begin[static_cast<std::size_t>(&cta - rank.ctas.data())];
    return rank.table.tiles[static_cast<std::size_t>(first + number)];
  }
  std::int32_t steps(std::int32_t r) { return static_cast<std::int32_t>(at(r).table.steps.size()); }
  // The first step from `from` on whose keys the tile sees.
  std::int32_t next_step(std::int32_t r, const AttentionTile& tile, std::int32_t from) {
    for (; from < steps(r); ++from) {
      const AttentionStep& step = at(r).table.steps[static_cast<std::size_t>(from)];
      if (plan_.spec().attention.meet(tile.position, tile.rows, step.position, step.keys)) break;
    }
    return from;
  }
  bool advance(std::int32_t r, Cta& cta) {
    const std::int32_t before = cta.ready;
    while (cta.ready < steps(r) && is_met(r, wait_of(at(r).table.steps[static_cast<std::size_t>(cta.ready)])))
      ++cta.ready;
    return cta.ready > before;
  }
  static std::int32_t find_runnable(const Cta& cta, std::int32_t from) {
    const auto count = static_cast<std::int32_t>(cta.next_step.size());
    for (std::int32_t j = 0; j < count; ++j) {
      const std::int32_t i = (from + j) % count;
      if (i == cta.opened || (i < cta.opened && cta.next_step[static_cast<std::size_t>(i)] < cta.ready)) return i;
    }
    return -1;
  }

  // One step of a tile, or the choice of a tile. False: the CTA waits, or has done all.
  bool compute(std::int32_t r, Cta& cta) {
    const auto count = static_cast<std::int32_t>(cta.next_step.size());
    if (cta.finished == count) return false;
    if (cta.current < 0) {
      const bool grown = advance(r, cta);
      const std::int32_t next = find_runnable(cta, cta.at);
      if (next < 0) return grown;
      cta.at = (next + 1) % count;
      std::int32_t& step = cta.next_step[static_cast<std::size_t>(next)];
      if (next == cta.opened) {
        ++cta.opened;
        step = next_step(r, tile_of(r, cta, next), 0);
        if (step == steps(r)) {
          ++cta.finished;
          return true;
        }
      }
      if (step < cta.ready) cta.current = next;
      return true;
    }
    std::int32_t& step = cta.next_step[static_cast<std::size_t>(cta.current)];
    if (step >= cta.ready) return advance(r, cta);  // waits with the tile in its registers
    const AttentionTile& tile = tile_of(r, cta, cta.current);
    fold(r, tile, at(r).table.steps[static_cast<std::size_t>(step)]);
    step = next_step(r, tile, step + 1);
    if (step == steps(r)) {
      cta.current = -1;
      ++cta.finished;
    } else if (step >= cta.ready && shall_park(r, cta, step)) {
      cta.current = -1;
      ++parked_;
    }
    return true;
  }
  bool shall_park(std::int32_t r, Cta& cta, std::int32_t next) {
    advance(r, cta);
    if (next < cta.ready) return false;
    const auto count = static_cast<std::int32_t>(cta.next_step.size());
    if (find_runnable(cta, (cta.current + 1) % count) >= 0) return true;
    return std::any_of(cta.next_step.begin(), cta.next_step.begin() + cta.opened,
                       [&](std::int32_t step) { return step < next; });
  }

  void fold(std::int32_t r, const AttentionTile& tile, const AttentionStep& step) {
    if (step.own != 0) return;
    const AttentionSpec& a = plan_.spec().attention;
    const std::uint64_t epoch = at(r).epoch + 1;
    const std::int64_t head = std::int64_t{tile.batch} * a.kv_heads + tile.kv_head;
    const std::vector<std::uint64_t>& kv = at(r).kv[epoch & 1];
    for (std::int64_t i = 0; i < 2 * step.keys; ++i) {
      const bool values = i >= step.keys;
      const std::int64_t position = step.position + (values ? i - step.keys : i);
      const std::uint64_t got = kv[static_cast<std::size_t>(step.row + 2 * head * step.keys + i)];
      if (got == tag(epoch, values, head, position)) continue;
      wrong_ = fmt::format("rank {}, epoch {}, tile {}: key {} (values: {}) is the word {:x}", r, epoch, tile.number,
                           position, values, got);
      return;
    }
  }

  // --- the end ---

  bool leave(std::int32_t r) {
    Rank& rank = at(r);
    if (!rank.moves.empty()) return false;
    for (std::size_t i = 0; i < rank.table.lanes.size(); ++i) {
      const DeviceLane& lane = rank.table.lanes[i];
      if (static_cast<std::int32_t>(i) >= rank.table.move_lanes) {
        if (rank.heads[i] < lane.count) return false;
        continue;
      }
      for (std::uint32_t row = lane.first; row < lane.first + lane.count; ++row) {
        if (rank.claims[row] != rank.epoch + 1) return false;
      }
    }
    for (const Cta& cta : rank.ctas) {
      if (cta.finished != static_cast<std::int32_t>(cta.next_step.size())) return false;
    }
    for (const AttentionStep& step : rank.table.steps) {
      if (!is_met(r, wait_of(step))) return false;
    }
    ++rank.epoch;
    rank.running = false;
    return true;
  }

  std::string stall(std::int32_t r) {
    Rank& rank = at(r);
    for (const DeviceTask& task : rank.table.tasks) {
      for (const Wait& wait : task.waits) {
        if (!is_met(r, wait)) return late(r, wait);
      }
    }
    for (const AttentionStep& step : rank.table.steps) {
      if (!is_met(r, wait_of(step))) return late(r, wait_of(step));
    }
    return fmt::format("rank {} stands still in epoch {} and waits for nothing", r, rank.epoch + 1);
  }
  std::string late(std::int32_t r, const Wait& wait) {
    const std::uint64_t epoch = at(r).epoch + 1;
    return fmt::format("rank {} waits for flag {} ({}) in epoch {}: {} of {}", r, wait.flag,
                       plan_.flag_name(r, wait.flag).what, epoch,
                       flag(r, wait.flag, epoch) - (use_of_epoch(epoch) - 1) * wait.count, wait.count);
  }
  // A flag that was raised too often would let the next use begin too early.
  std::string surplus() {
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(ranks_.size()); ++r) {
      const Rank& rank = at(r);
      std::vector<Wait> waits;
      for (const DeviceTask& task : rank.table.tasks) waits.insert(waits.end(), task.waits, task.waits + 2);
      for (const AttentionStep& step : rank.table.steps) waits.push_back(wait_of(step));
      for (const Wait& wait : waits) {
        for (const std::uint64_t epoch : {last_epoch_, last_epoch_ - 1}) {
          for (std::uint32_t i = 0; i < wait.span; ++i) {
            if (flag(r, wait.flag + i, epoch) == use_of_epoch(epoch) * wait.count) continue;
            return fmt::format("rank {}: flag {} was raised too often", r, wait.flag + i);
          }
        }
      }
    }
    return "";
  }

  const PlanSource source_;
  const Plan& plan_;
  const HeapLayout layout_;
  const SequenceSplit k_split_;
  Random random_;
  const std::uint64_t start_epoch_;
  const std::int64_t kv_rows_;
  std::uint64_t last_epoch_ = 0;
  std::vector<Rank> ranks_;
  std::vector<Write> writes_;  // records that the network has not delivered
  std::string wrong_;
  int parked_ = 0;
};

constexpr Topology kWorlds[] = {{1, 1}, {1, 2}, {1, 3}, {1, 8}, {2, 1}, {2, 2}, {2, 4}, {3, 1}, {3, 2}, {4, 2}, {8, 1}};

AttentionOptions options_of(std::int64_t tokens, int kind) {
  AttentionOptions options;
  options.batch = 1 + kind % 2;
  options.heads = 4;
  options.kv_heads = 2;
  options.dim = 64;
  options.seq_q = tokens;
  options.seq_k = kind == 3 ? tokens / 2 : tokens;
  options.causal = kind > 0 && kind < 4;
  options.zigzag = kind == 2;
  options.window_left = kind == 3 ? 100 : -1;
  options.packed = kind == 4;
  options.chunk_rows = kind % 2 == 0 ? 0 : 50;
  return options;
}

TEST(AttentionReplay, EveryWorldGetsThroughSeveralCallsInAnyOrder) {
  std::uint64_t seed = 0;
  int parked = 0;
  for (const Topology& topo : kWorlds) {
    for (const std::int64_t tokens : {0, 1, 7, 749, 1536}) {
      for (int kind = 0; kind < 5; ++kind) {
        const PlanSpec spec = make_gpu_attention_spec(topo, options_of(tokens, kind)).value();
        for (int order = 0; order < 5; ++order) {
          Replay replay(spec, ++seed, 0, kind == 1 ? 1 : kCtas);
          EXPECT_EQ(replay.run(4), "") << topo.nodes << "x" << topo.gpus << ", " << tokens << " tokens, kind " << kind;
          parked += replay.parked();
        }
      }
    }
  }
  EXPECT_GT(parked, 1000);  // else this says little about tiles that make way for others
}

TEST(AttentionReplay, UsesOfFlagsMayWrap) {
  for (const Topology& topo : {Topology{1, 2}, Topology{2, 2}}) {
    const PlanSpec spec = make_gpu_attention_spec(topo, options_of(300, 1)).value();
    Replay replay(spec, 1, (std::uint64_t{1} << 33) - 3, kCtas);
    EXPECT_EQ(replay.run(6), "") << topo.nodes << "x" << topo.gpus;
  }
}

}  // namespace
}  // namespace mkernel
