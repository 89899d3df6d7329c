// Slots and states are written many times in a call. The tasks are gone through in one order in which they can run.
// Each access is checked against those before it that it must not overtake: a read against the last write, a write
// against the reads since the last write (or against that write where there were none). If a chain of signals orders
// every such pair, every other order in which the tasks can run has the same conflicts in the same order, so every read
// sees the same write in all of them: what holds in ours holds in all.
//
// Along the way each element of a chunk is followed back to the element of K or V that it is a copy of, and each state
// to the keys that it holds.
#include "verify/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "mkernel/attention.h"
#include "plan/print.h"

namespace mkernel {
namespace {

// An element of a caller's K or V.
struct Origin {
  std::int32_t rank = 0;
  Buffer buffer = Buffer::kK;
  std::int64_t element = 0;
};

// A range of a rank's kKv that one task has written, and who has read it since.
struct Cell {
  std::int64_t end = 0;
  TaskId writer = kNoTask;
  Origin origin;  // of its first element; the others follow
  std::vector<TaskId> readers;
};
using Cells = std::map<std::int64_t, Cell>;

struct State {
  std::int64_t end = 0;
  TaskId writer = kNoTask;
  Block block;
  std::vector<SequencePart> keys;  // in the order in which they were folded in
};

class Sweep {
 public:
  Sweep(const Enumeration& all, const Knowledge& knowledge, Findings& findings)
      : all_(all),
        plan_(all.plan()),
        spec_(all.plan().spec().attention),
        knowledge_(knowledge),
        findings_(findings),
        before_(all),
        chunks_(static_cast<std::size_t>(all.world())),
        states_(chunks_.size()),
        users_(chunks_.size()),
        writers_(chunks_.size()) {}

  void run(TaskId id);
  void check_reuse();

 private:
  std::int32_t rank_of(TaskId id) const { return all_.rank_of(id); }
  bool before(TaskId first, TaskId second) { return before_(first, rank_of(first), second, rank_of(second)); }
  template <class Message>
  void add(ViolationKind kind, TaskId id, Message&& message) {
    findings_.add(kind, all_.place(id), [&] { return fmt::format("{} {}", all_.name(id), message()); });
  }

  void read_chunk(TaskId id, const Access& access, std::vector<std::pair<std::int64_t, Cell>>& found);
  void write_chunk(TaskId id, const Access& access, const std::vector<std::pair<std::int64_t, Cell>>& content);
  static Cells::iterator split_at(Cells& cells, std::int64_t at);
  void move(TaskId id, std::int32_t rank, const Task& task);

  void attend(TaskId id, std::int32_t rank, const Task& task);
  void check_origin(TaskId id, const Task& task, const Origin& origin, std::int64_t count, std::int64_t skipped,
                    Buffer wanted);
  State resume(TaskId id, std::int32_t rank, const Task& task);
  void park(TaskId id, std::int32_t rank, const Task& task, State state);
  void finish(TaskId id, std::int32_t rank, const Task& task, State state);
  bool sees_any(std::int32_t rank, const Block& block, std::int64_t key, std::int64_t end) const;

  const Enumeration& all_;
  const Plan& plan_;
  const AttentionSpec& spec_;
  const Knowledge& knowledge_;
  Findings& findings_;
  HappensBefore before_;
  std::vector<Cells> chunks_;                          // by rank
  std::vector<std::map<std::int64_t, State>> states_;  // by rank and place
  std::vector<std::map<std::int32_t, TaskId>> users_;  // of a rank's chunks: who may still read them, and a task of it
  std::vector<std::map<std::int32_t, TaskId>> writers_;
};

void Sweep::run(TaskId id) {
  const Task& task = all_.tasks()[id];
  const std::int32_t rank = rank_of(id);
  if (task.action == Action::kAttend) return attend(id, rank, task);
  if (task.source != Source::kNone || task.dst_reach != Reach::kNobody) move(id, rank, task);
}

Cells::iterator Sweep::split_at(Cells& cells, std::int64_t at) {
  auto next = cells.lower_bound(at);
  if (next == cells.begin() || (next != cells.end() && next->first == at)) return next;
  const auto previous = std::prev(next);
  if (previous->second.end <= at) return next;
  Cell right = previous->second;
  right.origin.element += at - previous->first;
  previous->second.end = at;
  return cells.emplace_hint(next, at, std::move(right));
}

void Sweep::read_chunk(TaskId id, const Access& access, std::vector<std::pair<std::int64_t, Cell>>& found) {
  Cells& cells = chunks_[static_cast<std::size_t>(access.rank)];
  const Task& task = all_.tasks()[id];
  split_at(cells, access.end);
  auto at = split_at(cells, access.begin);
  std::int64_t next = access.begin;
  for (; at != cells.end() && at->first == next && next < access.end; ++at) {
    Cell& cell = at->second;
    if (!findings_.full(ViolationKind::kUnordered) && !before(cell.writer, id)) {
      add(ViolationKind::kUnordered, id, [&] {
        return fmt::format("reads chunks of rank {} that {} writes, and no chain of signals makes it wait for that",
                           access.rank, all_.name(cell.writer));
      });
    }
    cell.readers.push_back(id);
    found.emplace_back(at->first, cell);
    next = cell.end;
  }
  if (next < access.end) {
    add(ViolationKind::kNeverWritten, id, [&] {
      return fmt::format("reads elements {}:{} of chunks of rank {}, and nobody has written the one at {}",
                         access.begin, access.end, access.rank, next);
    });
  }
  // What a put reads is known to be read only where its stamp has arrived.
  const std::int32_t user = task.action == Action::kPut ? task.peer : rank_of(id);
  users_[static_cast<std::size_t>(access.rank)].try_emplace(user, id);
}

void Sweep::write_chunk(TaskId id, const Access& access, const std::vector<std::pair<std::int64_t, Cell>>& content) {
  if (access.empty()) return;
  Cells& cells = chunks_[static_cast<std::size_t>(access.rank)];
  const auto last = split_at(cells, access.end);
  const auto first = split_at(cells, access.begin);
  for (auto at = first; at != last; ++at) {
    const Cell& cell = at->second;
    const auto check = [&](TaskId other, const char* does) {
      if (other == id || findings_.full(ViolationKind::kOverwrite) || before(other, id)) return;
      add(ViolationKind::kOverwrite, id, [&] {
        return fmt::format("may overwrite chunks of rank {} while {} still {} them", access.rank, all_.name(other),
                           does);
      });
    };
    if (cell.readers.empty()) check(cell.writer, "writes");
    for (const TaskId reader : cell.readers) check(reader, "reads");
  }
  cells.erase(first, last);
  for (const auto& [begin, cell] : content) {
    cells[access.begin + begin] = {access.begin + cell.end, id, cell.origin, {}};
  }
  writers_[static_cast<std::size_t>(access.rank)].try_emplace(rank_of(id), id);
}

// A copy or a put: the destination gets what the source holds. Contents count from the first element.
void Sweep::move(TaskId id, std::int32_t rank, const Task& task) {
  std::vector<std::pair<std::int64_t, Cell>> content;
  if (is_workspace(task.src)) {
    for_each_read(plan_, rank, task, [&](const Access& access) {
      if (!access.empty()) read_chunk(id, access, content);
    });
    for (auto& [begin, cell] : content) {
      begin -= task.src_offset;
      cell.end -= task.src_offset;
    }
  } else if (task.length > 0) {
    if (task.length != task.block.elements()) {
      add(ViolationKind::kWrongData, id, [&] {
        return fmt::format("moves {} elements, {} rows of {} are {}", task.length, task.block.rows, task.block.cols,
                           task.block.elements());
      });
    }
    content.push_back({0, {task.length, id, {rank, task.src, task.src_offset * spec_.dim}, {}}});
  }
  for_each_write(plan_, rank, task, [&](const Access& access) { write_chunk(id, access, content); });
}

// `count` elements from `origin` on are the keys (or values) from the `skipped`-th element on that `task` wants.
void Sweep::check_origin(TaskId id, const Task& task, const Origin& origin, std::int64_t count, std::int64_t skipped,
                         Buffer wanted) {
  const Topology& topo = plan_.topo();
  const SequenceSplit q = spec_.q_split(topo);
  const SequenceSplit k = spec_.k_split(topo);
  const std::int64_t tokens = k.tokens(origin.rank);
  const std::int64_t row = origin.element / spec_.dim;
  const std::int64_t last = (origin.element + count - 1) / spec_.dim;
  const std::int64_t head = task.block.row / q.tokens(rank_of(id));
  const std::int64_t kv_head = head / spec_.heads * spec_.kv_heads + head % spec_.heads * spec_.kv_heads / spec_.heads;
  const bool right = origin.buffer == wanted && origin.element % spec_.dim == skipped % spec_.dim &&
                     row / tokens == kv_head && last / tokens == kv_head &&
                     k.position(origin.rank, row % tokens) == task.kv_position + skipped / spec_.dim &&
                     k.position(origin.rank, last % tokens) - k.position(origin.rank, row % tokens) == last - row;
  if (right) return;
  add(ViolationKind::kWrongData, id, [&] {
    return fmt::format("takes as {} from {} on, head {}, what stands in row {} of {} of rank {}", buffer_name(wanted),
                       task.kv_position, kv_head, row, buffer_name(origin.buffer), origin.rank);
  });
}

void Sweep::attend(TaskId id, std::int32_t rank, const Task& task) {
  if (task.block.empty() || task.dst_reach == Reach::kNobody) return;
  int source = 0;
  for_each_read(plan_, rank, task, [&](const Access& access) {
    const Buffer wanted = source++ == 1 ? Buffer::kK : Buffer::kV;
    if (access.buffer == Buffer::kQ || access.buffer == Buffer::kState) return;
    if (!access.workspace()) {
      return check_origin(id, task, {rank, access.buffer, access.block.row * spec_.dim}, task.length, 0, wanted);
    }
    std::vector<std::pair<std::int64_t, Cell>> found;
    read_chunk(id, access, found);
    for (const auto& [begin, cell] : found) {
      check_origin(id, task, cell.origin, cell.end - begin, begin - access.begin, wanted);
    }
  });
  State state;
  if (task.resume) state = resume(id, rank, task);
  state.block = task.block;
  if (task.length > 0) state.keys.push_back({task.kv_position, task.length / spec_.dim});
  if (task.park) {
    park(id, rank, task, std::move(state));
  } else {
    finish(id, rank, task, std::move(state));
  }
}

State Sweep::resume(TaskId id, std::int32_t rank, const Task& task) {
  auto& states = states_[static_cast<std::size_t>(rank)];
  const auto found = states.find(task.dst_offset);
  if (found == states.end()) {
    add(ViolationKind::kNeverWritten, id, [] { return "goes on from a state that nobody has left"; });
    return {};
  }
  State state = std::move(found->second);
  states.erase(found);
  if (state.block != task.block) {
    add(ViolationKind::kWrongData, id, [&] {
      return fmt::format("goes on from the state of other queries, which {} has left", all_.name(state.writer));
    });
  }
  if (!before(state.writer, id)) {
    add(ViolationKind::kUnordered, id, [&] {
      return fmt::format("goes on from the state that {} leaves, and no chain of signals makes it wait for that",
                         all_.name(state.writer));
    });
  }
  return state;
}

void Sweep::park(TaskId id, std::int32_t rank, const Task& task, State state) {
  auto& states = states_[static_cast<std::size_t>(rank)];
  const Access place = state_access(plan_, rank, task);
  state.writer = id;
  state.end = place.end;
  // Of those that are wanted still none may lie here.
  auto at = states.lower_bound(place.end);
  if (at != states.begin() && std::prev(at)->second.end > place.begin) {
    const TaskId other = std::prev(at)->second.writer;
    add(ViolationKind::kWrittenTwice, id,
        [&] { return fmt::format("leaves its state where that of {} is still wanted", all_.name(other)); });
  }
  states[place.begin] = std::move(state);
}

bool Sweep::sees_any(std::int32_t rank, const Block& block, std::int64_t key, std::int64_t end) const {
  if (spec_.packed) return key < end;
  const SequenceSplit split = spec_.q_split(plan_.topo());
  for (std::int64_t row = block.row; row < block.row + block.rows; ++row) {
    const std::int64_t query = split.position(rank, row % split.tokens(rank));
    const KeyRange seen = spec_.mask.sees(query, 1, spec_.seq_q, spec_.seq_k);
    if (max_of(seen.begin, key) < min_of(seen.end, end)) return true;
  }
  return false;
}

// All keys that the queries see are in, and none twice.
void Sweep::finish(TaskId id, std::int32_t rank, const Task& task, State state) {
  std::sort(state.keys.begin(), state.keys.end(),
            [](const SequencePart& a, const SequencePart& b) { return a.begin < b.begin; });
  std::int64_t next = 0;
  state.keys.push_back({spec_.seq_k, 0});
  for (const SequencePart& keys : state.keys) {
    if (keys.begin < next) {
      add(ViolationKind::kWrongData, id,
          [&] { return fmt::format("ends a tile that has taken in the key {} twice", keys.begin); });
    }
    if (keys.begin > next && sees_any(rank, task.block, next, keys.begin)) {
      add(ViolationKind::kWrongData, id, [&] {
        return fmt::format("ends a tile that has not taken in the keys {}:{}, which it sees", next, keys.begin);
      });
    }
    next = max_of(next, keys.begin + keys.count);
  }
}

// Whoever writes a rank's chunks in a call has heard from all that read them in the call before: two calls of the same
// parity then cannot meet. Asked of all that ever write and read there, whichever slot it is.
void Sweep::check_reuse() {
  for (std::int32_t rank = 0; rank < all_.world(); ++rank) {
    for (const auto& [writer, write] : writers_[static_cast<std::size_t>(rank)]) {
      for (const auto& [user, read] : users_[static_cast<std::size_t>(rank)]) {
        if (user == writer || knowledge_.complete_knows(writer, user) ||
            knowledge_.task_knows(all_, writer, all_.tasks()[write], user)) {
          continue;
        }
        add(ViolationKind::kOverwrite, write, [&, w = writer, u = user, r = read] {
          return fmt::format(
              "may overwrite chunks of rank {} two epochs later while {} still reads them: rank {} has "
              "no sign of rank {} in the epoch between",
              rank, all_.name(r), w, u);
        });
      }
    }
  }
}

}  // namespace

void check_attention(const Enumeration& all, const std::vector<TaskId>& order, const Knowledge& knowledge, bool reuse,
                     Findings& findings) {
  Sweep sweep(all, knowledge, findings);
  for (const TaskId id : order) sweep.run(id);
  if (reuse) sweep.check_reuse();
}

}  // namespace mkernel
