#include "exec/sim/races.h"

#include <algorithm>

namespace mkernel {
namespace {

void join(Clock& into, const Clock& from) {
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

}  // namespace

RaceDetector::RaceDetector(std::size_t processes) : clocks_(processes, Clock(processes, 0)) {
  // A process knows its own present; nobody else does before it releases.
  for (std::size_t p = 0; p < processes; ++p) clocks_[p][p] = 1;
}

void RaceDetector::acquire(std::size_t process, std::uint64_t key) {
  const auto found = known_.find(key);
  if (found != known_.end()) join(clocks_[process], found->second);
}

void RaceDetector::release(std::size_t process, std::uint64_t key) {
  Clock& known = known_[key];
  if (known.empty()) known.assign(clocks_.size(), 0);
  join(known, clocks_[process]);
  ++clocks_[process][process];
}

void RaceDetector::restart(std::size_t process, std::uint64_t key) {
  const std::uint32_t own = clocks_[process][process];
  std::fill(clocks_[process].begin(), clocks_[process].end(), 0);
  acquire(process, key);
  clocks_[process][process] = own;
}

RaceDetector::Cells::iterator RaceDetector::split_at(std::uintptr_t at) {
  auto next = cells_.lower_bound(at);
  if (next != cells_.end() && next->first == at) return next;
  if (next == cells_.begin()) return next;
  auto before = std::prev(next);
  if (before->second.end <= at) return next;
  Cell right = before->second;
  before->second.end = at;
  return cells_.emplace_hint(next, at, std::move(right));
}

RaceDetector::Cells::iterator RaceDetector::cover(std::uintptr_t begin, std::uintptr_t end) {
  split_at(end);
  split_at(begin);
  std::uintptr_t at = begin;
  auto it = cells_.lower_bound(begin);
  while (at < end) {
    if (it == cells_.end() || it->first > at) {
      Cell fresh;
      fresh.end = it == cells_.end() ? end : std::min(end, it->first);
      it = cells_.emplace_hint(it, at, std::move(fresh));
    }
    at = it->second.end;
    ++it;
  }
  return cells_.find(begin);
}

RaceDetector::Mark RaceDetector::mark(std::size_t process, std::uint64_t label) const {
  return {static_cast<std::uint32_t>(process), clocks_[process][process], label};
}

std::string RaceDetector::race(const char* kind, const char* earlier, const Mark& mark) {
  other_label_ = mark.label;
  return std::string(kind) + " is not ordered after an earlier " + earlier;
}

std::string RaceDetector::read(std::size_t process, std::uintptr_t begin, std::uintptr_t end, std::uint64_t label) {
  if (begin >= end) return {};
  const Mark now = mark(process, label);
  for (auto it = cover(begin, end); it != cells_.end() && it->first < end; ++it) {
    Cell& cell = it->second;
    if (cell.written && !ordered(process, cell.write)) return race("read", "write", cell.write);
    const auto same =
        std::find_if(cell.reads.begin(), cell.reads.end(), [&](const Mark& m) { return m.process == now.process; });
    if (same == cell.reads.end()) {
      cell.reads.push_back(now);
    } else {
      *same = now;
    }
  }
  return {};
}

std::string RaceDetector::write(std::size_t process, std::uintptr_t begin, std::uintptr_t end, std::uint64_t label) {
  if (begin >= end) return {};
  const Mark now = mark(process, label);
  for (auto it = cover(begin, end); it != cells_.end() && it->first < end; ++it) {
    Cell& cell = it->second;
    if (cell.written && !ordered(process, cell.write)) return race("write", "write", cell.write);
    for (const Mark& read : cell.reads) {
      if (!ordered(process, read)) return race("write", "read", read);
    }
    cell.written = true;
    cell.write = now;
    cell.reads.clear();
  }
  return {};
}

}  // namespace mkernel
