#include "verify/reused_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "plan/print.h"

namespace mkernel {
namespace {

// Readers that are looked at for a short cut: in good plans it is the last one.
constexpr std::size_t kReadersTried = 4;

std::string memory_text(const Access& access) {
  return fmt::format("{}s of rank {}", buffer_name(access.buffer), access.rank);
}

}  // namespace

std::map<std::int64_t, Cell>::iterator ReusedMemory::split_at(std::map<std::int64_t, Cell>& cells, std::int64_t at) {
  auto next = cells.lower_bound(at);
  if (next == cells.begin() || (next != cells.end() && next->first == at)) return next;
  const auto previous = std::prev(next);
  if (previous->second.end <= at) return next;
  Cell right = previous->second;
  right.content.element += at - previous->first;
  previous->second.end = at;
  return cells.emplace_hint(next, at, std::move(right));
}

bool ReusedMemory::direct(TaskId first, TaskId second) const {
  return before_.direct(first, all_.rank_of(first), second, all_.rank_of(second));
}

// Directly, or through a reader before it, which is in time itself or has been reported, or by any chain.
bool ReusedMemory::read_in_time(const Cell& cell, TaskId id) {
  if (findings_.full(ViolationKind::kUnordered) || direct(cell.writer, id)) return true;
  const std::size_t tried = std::min(kReadersTried, cell.readers.size());
  for (auto reader = cell.readers.rbegin(); reader != cell.readers.rbegin() + static_cast<std::ptrdiff_t>(tried);
       ++reader) {
    if (direct(*reader, id)) return true;
  }
  return before(cell.writer, id);
}

void ReusedMemory::read(TaskId id, const Access& access, Cells& found) {
  if (access.empty()) return;
  Place& place = places_[key(access.rank, access.buffer)];
  const Task& task = all_.tasks()[id];
  split_at(place.cells, access.end);
  auto at = split_at(place.cells, access.begin);
  std::int64_t next = access.begin;
  for (; at != place.cells.end() && at->first == next && next < access.end; ++at) {
    Cell& cell = at->second;
    if (!read_in_time(cell, id)) {
      add(ViolationKind::kUnordered, id, [&] {
        return fmt::format("reads {} that {} writes, and no chain of signals makes it wait for that",
                           memory_text(access), all_.name(cell.writer));
      });
    }
    // What comes after this reader comes after those that it waits for.
    const auto first = cell.readers.end() - static_cast<std::ptrdiff_t>(std::min(kReadersTried, cell.readers.size()));
    cell.readers.erase(
        std::remove_if(first, cell.readers.end(), [&](TaskId reader) { return reader == id || direct(reader, id); }),
        cell.readers.end());
    cell.readers.push_back(id);
    found.emplace_back(at->first, cell);
    next = cell.end;
  }
  if (next < access.end) {
    add(ViolationKind::kNeverWritten, id, [&] {
      return fmt::format("reads elements {}:{} of {}, and nobody has written the one at {}", access.begin, access.end,
                         memory_text(access), next);
    });
  }
  // What a put reads is known to be read only where its stamp has arrived.
  const std::int32_t user = task.action == Action::kPut ? task.peer : all_.rank_of(id);
  place.users.try_emplace(user, id);
}

void ReusedMemory::write(TaskId id, const Access& access, const Cells& content) {
  if (access.empty()) return;
  Place& place = places_[key(access.rank, access.buffer)];
  const auto last = split_at(place.cells, access.end);
  const auto first = split_at(place.cells, access.begin);
  for (auto at = first; at != last; ++at) {
    const Cell& cell = at->second;
    const auto check = [&](TaskId other, const char* does) {
      if (other == id || findings_.full(ViolationKind::kOverwrite) || before(other, id)) return;
      add(ViolationKind::kOverwrite, id, [&] {
        return fmt::format("may overwrite {} while {} still {} them", memory_text(access), all_.name(other), does);
      });
    };
    if (cell.readers.empty()) check(cell.writer, "writes");
    for (const TaskId reader : cell.readers) check(reader, "reads");
  }
  place.cells.erase(first, last);
  for (const auto& [begin, cell] : content) {
    place.cells[access.begin + begin] = {access.begin + cell.end, id, cell.content, {}};
  }
  place.writers.try_emplace(all_.rank_of(id), id);
}

void ReusedMemory::move(TaskId id, std::int32_t rank, const Task& task) {
  const Plan& plan = all_.plan();
  Cells content;
  if (is_workspace(task.src)) {
    for_each_read(plan, rank, task, [&](const Access& access) { read(id, access, content); });
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
    const Content origin{rank, task.src, task.src_offset * plan.spec().attention.dim, 0, 0, false};
    content.push_back({0, {task.length, id, origin, {}}});
  }
  for_each_write(plan, rank, task, [&](const Access& access) { write(id, access, content); });
}

void ReusedMemory::check_reuse() {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const auto rank = static_cast<std::int32_t>(i / kBufferCount);
    const auto buffer = static_cast<Buffer>(i % kBufferCount);
    for (const auto& [writer, write] : places_[i].writers) {
      for (const auto& [user, read] : places_[i].users) {
        if (user == writer || knowledge_.complete_knows(writer, user) ||
            knowledge_.task_knows(all_, writer, all_.tasks()[write], user)) {
          continue;
        }
        add(ViolationKind::kOverwrite, write, [&, w = writer, u = user, r = read] {
          return fmt::format(
              "may overwrite {}s of rank {} two epochs later while {} still reads them: rank {} has no sign of rank {} "
              "in the epoch between",
              buffer_name(buffer), rank, all_.name(r), w, u);
        });
      }
    }
  }
}

}  // namespace mkernel
