// The backward's sums. Of a tile of queries: as in the forward, every key that it sees is added once. Of a tile of
// keys: every own query that sees any of it is added once, so that what goes into kPartial is the rank's part. Sums
// over nodes and rails take parts of the same gradients, from all ranks that must add, in order.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "plan/print.h"
#include "verify/attention.h"
#include "verify/attention_sums.h"
#include "verify/network.h"
#include "verify/reused_memory.h"

namespace mkernel {
namespace {

// Sums of a tile of keys between its tasks.
struct KeyState {
  std::int64_t end = 0;
  TaskId writer = kNoTask;
  std::int64_t position = 0;  // of the first key
  std::int64_t rows = 0;
  std::int64_t head = -1;    // of the keys; -1: no queries have been seen
  std::vector<Block> added;  // rows of Q, in order
};

class BackwardSweep {
 public:
  BackwardSweep(const Enumeration& all, const Knowledge& knowledge, Findings& findings)
      : all_(all),
        plan_(all.plan()),
        spec_(all.plan().spec()),
        a_(all.plan().spec().attention),
        memory_(all, knowledge, findings),
        queries_(all, memory_),
        keys_(static_cast<std::size_t>(all.world())),
        ended_(keys_.size()) {}

  void run(TaskId id) {
    const Task& task = all_.tasks()[id];
    const std::int32_t rank = all_.rank_of(id);
    if (task.source == Source::kNone || task.dst_reach == Reach::kNobody) return;
    if (task.action == Action::kAttendBackward) return meet(id, rank, task);
    if (task.action == Action::kReduce) return reduce(id, rank, task);
    memory_.move(id, rank, task);
  }
  void check_reuse() { memory_.check_reuse(); }

 private:
  template <class Message>
  void wrong_data(TaskId id, Message&& message) {
    memory_.add(ViolationKind::kWrongData, id, std::forward<Message>(message));
  }

  void meet(TaskId id, std::int32_t rank, const Task& task);
  KeyState resume_keys(TaskId id, std::int32_t rank, const Task& task);
  void park_keys(TaskId id, std::int32_t rank, const Task& task, KeyState state);
  void finish_keys(TaskId id, std::int32_t rank, const Task& task, KeyState state);
  bool all_added(std::int32_t rank, const KeyState& state, std::int64_t& missing) const;
  std::optional<Content> gradient(const KeyState& state, bool value) const;

  void reduce(TaskId id, std::int32_t rank, const Task& task);
  void check_adders(TaskId id, std::int32_t rank, const Task& task, const std::vector<ReusedMemory::Cells>& sources);
  std::vector<std::int32_t> nodes_that_see(std::int32_t owner, std::int64_t token) const;

  const Enumeration& all_;
  const Plan& plan_;
  const PlanSpec& spec_;
  const AttentionSpec& a_;
  ReusedMemory memory_;
  QuerySums queries_;
  std::vector<std::map<std::int64_t, KeyState>> keys_;                          // by rank and place
  std::vector<std::map<std::int64_t, std::pair<std::int64_t, TaskId>>> ended_;  // places that are free again, from when
};

void BackwardSweep::meet(TaskId id, std::int32_t rank, const Task& task) {
  if (task.length != 0 && task.length != task.key_rows * a_.dim) {
    wrong_data(id, [&] { return fmt::format("takes {} elements of {} keys", task.length, task.key_rows); });
  }
  if (!task.block.empty()) {
    if (task.length > 0) check_keys(plan_, memory_, id, rank, task);
    queries_.add(id, rank, task, query_sums(plan_, rank, task));
  }
  if (task.key_rows == 0) return;
  KeyState state;
  if (task.resume_keys) {
    state = resume_keys(id, rank, task);
  } else {
    state.position = task.kv_position;
    state.rows = task.key_rows;
  }
  if (!task.block.empty()) {
    const std::int64_t head = key_head_of(plan_, rank, task.block.row);
    if (state.head >= 0 && state.head != head) {
      wrong_data(id, [&] { return fmt::format("adds queries of key head {} to keys of head {}", head, state.head); });
    }
    state.head = head;
    if (task.length > 0) state.added.push_back(task.block);
  }
  if (task.park_keys) {
    park_keys(id, rank, task, std::move(state));
  } else {
    finish_keys(id, rank, task, std::move(state));
  }
}

KeyState BackwardSweep::resume_keys(TaskId id, std::int32_t rank, const Task& task) {
  auto& states = keys_[static_cast<std::size_t>(rank)];
  const auto found = states.find(task.key_place);
  if (found == states.end()) {
    memory_.add(ViolationKind::kNeverWritten, id, [] { return "goes on from sums of keys that nobody has left"; });
    return {0, kNoTask, task.kv_position, task.key_rows, -1, {}};
  }
  KeyState state = std::move(found->second);
  states.erase(found);
  if (state.position != task.kv_position || state.rows != task.key_rows) {
    wrong_data(id, [&] {
      return fmt::format("goes on from the sums of other keys, which {} has left", all_.name(state.writer));
    });
  }
  if (!memory_.before(state.writer, id)) {
    memory_.add(ViolationKind::kUnordered, id, [&] {
      return fmt::format("goes on from the sums of keys that {} leaves, and no chain of signals makes it wait for that",
                         all_.name(state.writer));
    });
  }
  return state;
}

void BackwardSweep::park_keys(TaskId id, std::int32_t rank, const Task& task, KeyState state) {
  auto& states = keys_[static_cast<std::size_t>(rank)];
  const std::int64_t begin = task.key_place;
  state.writer = id;
  state.end = begin + task.key_rows * a_.dim;
  auto at = states.lower_bound(state.end);
  if (at != states.begin() && std::prev(at)->second.end > begin) {
    const TaskId other = std::prev(at)->second.writer;
    memory_.add(ViolationKind::kWrittenTwice, id, [&] {
      return fmt::format("leaves sums of keys where those of {} are still wanted", all_.name(other));
    });
  }
  // Whoever used the place last must be done with it.
  auto& ended = ended_[static_cast<std::size_t>(rank)];
  for (auto last = ended.lower_bound(state.end); last != ended.begin();) {
    --last;
    if (last->second.first <= begin) break;
    const TaskId other = last->second.second;
    if (!memory_.before(other, id)) {
      memory_.add(ViolationKind::kOverwrite, id, [&] {
        return fmt::format("may overwrite sums of keys while {} still reads them", all_.name(other));
      });
    }
    last = ended.erase(last);
  }
  states[begin] = std::move(state);
}

// The gradient that the sums of a tile become; nothing where its head is not known.
std::optional<Content> BackwardSweep::gradient(const KeyState& state, bool value) const {
  if (state.head < 0) return std::nullopt;
  const SequenceSplit k = a_.k_split(plan_.topo());
  for (std::int32_t rank = 0; rank < plan_.topo().world(); ++rank) {
    for (std::int32_t segment = 0; segment < k.segments(); ++segment) {
      const std::int64_t first = state.position - k.begin(rank, segment);
      if (first < 0 || first + state.rows > k.size(rank, segment)) continue;
      const std::int64_t row = state.head * k.tokens(rank) + k.local(rank, segment) + first;
      return Content{rank, value ? Buffer::kDv : Buffer::kDk, row * a_.dim, 0, 0, false};
    }
  }
  return std::nullopt;
}

// Whether own queries of all heads of the group that see any of the keys are in, and none twice.
bool BackwardSweep::all_added(std::int32_t rank, const KeyState& state, std::int64_t& missing) const {
  const std::int64_t tokens = a_.q_split(plan_.topo()).tokens(rank);
  const std::int64_t group = a_.heads / a_.kv_heads;
  std::vector<Block> added = state.added;
  std::sort(added.begin(), added.end(), [](const Block& a, const Block& b) { return a.row < b.row; });
  const std::int64_t end = (state.head + 1) * group * tokens;
  missing = state.head * group * tokens;
  added.push_back({end, 0, 0, 0});
  for (const Block& block : added) {
    if (block.row < missing) return false;
    for (; missing < block.row; ++missing) {
      if (rows_see(plan_, rank, {missing, 0, 1, a_.dim}, state.position, state.position + state.rows)) return false;
    }
    missing = block.row + block.rows;
  }
  return missing == end;
}

void BackwardSweep::finish_keys(TaskId id, std::int32_t rank, const Task& task, KeyState state) {
  ended_[static_cast<std::size_t>(rank)][task.key_place] = {task.key_place + task.key_rows * a_.dim, id};
  std::int64_t missing = 0;
  if (state.head >= 0 && !all_added(rank, state, missing)) {
    wrong_data(id, [&] {
      return fmt::format("ends the gradients of keys {}:{} without, or with twice, the queries of row {}",
                         state.position, state.position + state.rows, missing);
    });
  }
  int source = 0;
  for_each_write(plan_, rank, task, [&](const Access& access) {
    if (access.buffer != Buffer::kPartial && access.buffer != Buffer::kDk && access.buffer != Buffer::kDv) return;
    const bool value = source++ == 1;
    std::optional<Content> content = gradient(state, value);
    if (state.head >= 0 && !content) {
      wrong_data(id, [&] { return fmt::format("ends keys {}, which are of no one rank", state.position); });
    }
    if (!access.workspace()) {
      if (content && (content->rank != rank || content->buffer != access.buffer ||
                      content->element != access.block.row * a_.dim)) {
        wrong_data(id, [&] { return fmt::format("writes gradients of keys {} elsewhere", state.position); });
      }
      return;
    }
    if (!content) content = Content{};
    content->zero = state.added.empty();
    content->first_rank = rank;
    content->last_rank = rank + 1;
    memory_.write(id, access, {{0, {access.end - access.begin, id, *content, {}}}});
  });
}

// The nodes of which some query sees any of the chunk that holds this token of its owner.
std::vector<std::int32_t> BackwardSweep::nodes_that_see(std::int32_t owner, std::int64_t token) const {
  const SequenceSplit k = a_.k_split(plan_.topo());
  const std::int32_t segment = token < k.size(owner, 0) ? 0 : 1;
  const std::int64_t chunk = (token - k.local(owner, segment)) / spec_.tiling.chunk_rows * spec_.tiling.chunk_rows;
  const std::int64_t size = min_of(spec_.tiling.chunk_rows, k.size(owner, segment) - chunk);
  std::vector<std::int32_t> nodes;
  for (std::int32_t node = 0; node < plan_.topo().nodes; ++node) {
    if (node_sees(spec_, node, k.begin(owner, segment) + chunk, size)) nodes.push_back(node);
  }
  return nodes;
}

// A sum of the node's parts, or of the nodes' sums.
void BackwardSweep::reduce(TaskId id, std::int32_t rank, const Task& task) {
  if (task.block.empty()) return;
  std::vector<ReusedMemory::Cells> sources;
  for_each_read(plan_, rank, task, [&](const Access& access) {
    ReusedMemory::Cells& found = sources.emplace_back();
    memory_.read(id, access, found);
    for (auto& [begin, cell] : found) {
      begin -= access.begin;
      cell.end -= access.begin;
    }
  });
  check_adders(id, rank, task, sources);
  // All of one gradient, element by element; zeros fit anywhere.
  const bool output = !is_workspace(task.dst);
  std::optional<Content> sum;
  if (output) sum = Content{rank, task.dst, task.block.row * a_.dim, 0, 0, false};
  for (const ReusedMemory::Cells& source : sources) {
    for (const auto& [begin, cell] : source) {
      if (cell.content.zero) continue;
      Content content = cell.content;
      content.element -= begin;
      if (!sum) sum = content;
      if (content.rank == sum->rank && content.buffer == sum->buffer && content.element == sum->element) continue;
      wrong_data(id, [&] {
        return fmt::format("adds {} of rank {} from element {} on, where {} of rank {} from {} on is due",
                           buffer_name(content.buffer), content.rank, content.element + begin, buffer_name(sum->buffer),
                           sum->rank, sum->element + begin);
      });
    }
  }
  if (output) return;
  Content content = sum.value_or(Content{});
  content.zero = !sum;
  content.first_rank = plan_.topo().rank_of(plan_.topo().node_of(rank), 0);
  content.last_rank = content.first_rank + plan_.topo().gpus;
  for_each_write(plan_, rank, task, [&](const Access& access) {
    memory_.write(id, access, {{0, {access.end - access.begin, id, content, {}}}});
  });
}

// Own node's GPUs in order; or, where the sum is the caller's, the ranks of all nodes that see any of the chunk.
void BackwardSweep::check_adders(TaskId id, std::int32_t rank, const Task& task,
                                 const std::vector<ReusedMemory::Cells>& sources) {
  const Topology& topo = plan_.topo();
  const bool output = !is_workspace(task.dst);
  std::vector<std::int32_t> nodes{topo.node_of(rank)};
  if (output) {
    const std::int64_t tokens = a_.k_split(topo).tokens(rank);
    nodes = nodes_that_see(rank, task.block.row % tokens);
  }
  std::vector<std::int32_t> wanted;
  for (const std::int32_t node : nodes) {
    for (std::int32_t gpu = 0; gpu < topo.gpus; ++gpu) wanted.push_back(topo.rank_of(node, gpu));
  }
  std::vector<std::int32_t> added;
  for (const ReusedMemory::Cells& source : sources) {
    for (std::size_t i = 0; i < source.size(); ++i) {
      const Content& content = source[i].second.content;
      if (i > 0 && content.first_rank == source[0].second.content.first_rank &&
          content.last_rank == source[0].second.content.last_rank) {
        continue;
      }
      for (std::int32_t r = content.first_rank; r < content.last_rank; ++r) added.push_back(r);
    }
  }
  if (added == wanted) return;
  wrong_data(id, [&] {
    return fmt::format("adds what {} ranks give, the first {}, where {} must, the first {}", added.size(),
                       added.empty() ? -1 : added.front(), wanted.size(), wanted.empty() ? -1 : wanted.front());
  });
}

}  // namespace

void check_attention_backward(const Enumeration& all, const std::vector<TaskId>& order, const Knowledge& knowledge,
                              bool reuse, Findings& findings) {
  BackwardSweep sweep(all, knowledge, findings);
  for (const TaskId id : order) sweep.run(id);
  if (reuse) sweep.check_reuse();
}

}  // namespace mkernel
