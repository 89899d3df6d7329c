#include "verify/attention_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "plan/print.h"

namespace mkernel {
namespace {

// `count` elements of `content` are the keys (or values) from the `skipped`-th element on that `task` wants.
void check_origin(const Plan& plan, ReusedMemory& memory, TaskId id, std::int32_t rank, const Content& content,
                  const Task& task, std::int64_t count, std::int64_t skipped, Buffer wanted) {
  const AttentionSpec& spec = plan.spec().attention;
  const SequenceSplit k = spec.k_split(plan.topo());
  const std::int64_t tokens = k.tokens(content.rank);
  const std::int64_t row = content.element / spec.dim;
  const std::int64_t last = (content.element + count - 1) / spec.dim;
  const std::int64_t kv_head = key_head_of(plan, rank, task.block.row);
  const bool right = content.buffer == wanted && content.element % spec.dim == skipped % spec.dim &&
                     row / tokens == kv_head && last / tokens == kv_head &&
                     k.position(content.rank, row % tokens) == task.kv_position + skipped / spec.dim &&
                     k.position(content.rank, last % tokens) - k.position(content.rank, row % tokens) == last - row;
  if (right) return;
  memory.add(ViolationKind::kWrongData, id, [&] {
    return fmt::format("takes as {} from {} on, head {}, what stands in row {} of {} of rank {}", buffer_name(wanted),
                       task.kv_position, kv_head, row, buffer_name(content.buffer), content.rank);
  });
}

}  // namespace

std::int64_t key_head_of(const Plan& plan, std::int32_t rank, std::int64_t row) {
  const AttentionSpec& spec = plan.spec().attention;
  const std::int64_t head = row / spec.q_split(plan.topo()).tokens(rank);
  return head / spec.heads * spec.kv_heads + head % spec.heads * spec.kv_heads / spec.heads;
}

bool rows_see(const Plan& plan, std::int32_t rank, const Block& block, std::int64_t key, std::int64_t end) {
  const AttentionSpec& spec = plan.spec().attention;
  if (spec.packed) return key < end && block.rows > 0;
  const SequenceSplit split = spec.q_split(plan.topo());
  for (std::int64_t row = block.row; row < block.row + block.rows; ++row) {
    const std::int64_t query = split.position(rank, row % split.tokens(rank));
    const KeyRange seen = spec.mask.sees(query, 1, spec.seq_q, spec.seq_k);
    if (max_of(seen.begin, key) < min_of(seen.end, end)) return true;
  }
  return false;
}

void check_keys(const Plan& plan, ReusedMemory& memory, TaskId id, std::int32_t rank, const Task& task) {
  int source = 0;
  for_each_read(plan, rank, task, [&](const Access& access) {
    if (access.buffer != Buffer::kK && access.buffer != Buffer::kV && access.buffer != Buffer::kKv) return;
    const Buffer wanted = source++ == 0 ? Buffer::kK : Buffer::kV;
    if (!access.workspace()) {
      const Content own{rank, access.buffer, access.block.row * plan.spec().attention.dim, 0, 0, false};
      return check_origin(plan, memory, id, rank, own, task, task.length, 0, wanted);
    }
    ReusedMemory::Cells found;
    memory.read(id, access, found);
    for (const auto& [begin, cell] : found) {
      check_origin(plan, memory, id, rank, cell.content, task, cell.end - begin, begin - access.begin, wanted);
    }
  });
}

void QuerySums::add(TaskId id, std::int32_t rank, const Task& task, const Access& place) {
  State state;
  if (task.resume) state = resume(id, rank, task);
  state.block = task.block;
  if (task.length > 0) state.keys.push_back({task.kv_position, task.length / plan_.spec().attention.dim});
  if (task.park) {
    park(id, rank, place, std::move(state));
  } else {
    finish(id, rank, task, std::move(state));
  }
}

QuerySums::State QuerySums::resume(TaskId id, std::int32_t rank, const Task& task) {
  auto& states = states_[static_cast<std::size_t>(rank)];
  const auto found = states.find(task.dst_offset);
  if (found == states.end()) {
    memory_.add(ViolationKind::kNeverWritten, id, [] { return "goes on from a state that nobody has left"; });
    return {};
  }
  State state = std::move(found->second);
  states.erase(found);
  if (state.block != task.block) {
    memory_.add(ViolationKind::kWrongData, id, [&] {
      return fmt::format("goes on from the state of other queries, which {} has left", all_.name(state.writer));
    });
  }
  if (!memory_.before(state.writer, id)) {
    memory_.add(ViolationKind::kUnordered, id, [&] {
      return fmt::format("goes on from the state that {} leaves, and no chain of signals makes it wait for that",
                         all_.name(state.writer));
    });
  }
  return state;
}

void QuerySums::park(TaskId id, std::int32_t rank, const Access& place, State state) {
  auto& states = states_[static_cast<std::size_t>(rank)];
  state.writer = id;
  state.end = place.end;
  // Of those that are wanted still none may lie here.
  auto at = states.lower_bound(place.end);
  if (at != states.begin() && std::prev(at)->second.end > place.begin) {
    const TaskId other = std::prev(at)->second.writer;
    memory_.add(ViolationKind::kWrittenTwice, id,
                [&] { return fmt::format("leaves its state where that of {} is still wanted", all_.name(other)); });
  }
  states[place.begin] = std::move(state);
}

// All keys that the queries see are in, and none twice.
void QuerySums::finish(TaskId id, std::int32_t rank, const Task& task, State state) {
  std::sort(state.keys.begin(), state.keys.end(),
            [](const SequencePart& a, const SequencePart& b) { return a.begin < b.begin; });
  std::int64_t next = 0;
  state.keys.push_back({plan_.spec().attention.seq_k, 0});
  for (const SequencePart& keys : state.keys) {
    if (keys.begin < next) {
      memory_.add(ViolationKind::kWrongData, id,
                  [&] { return fmt::format("ends a tile that has taken in the key {} twice", keys.begin); });
    }
    if (keys.begin > next && rows_see(plan_, rank, task.block, next, keys.begin)) {
      memory_.add(ViolationKind::kWrongData, id, [&] {
        return fmt::format("ends a tile that has not taken in the keys {}:{}, which it sees", next, keys.begin);
      });
    }
    next = max_of(next, keys.begin + keys.count);
  }
}

}  // namespace mkernel
