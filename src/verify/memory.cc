#include "verify/memory.h"

#include <fmt/format.h>

#include <algorithm>

namespace mkernel {
namespace {

bool raises_flag_of_wait(const Topology& topo, const Task& first, std::int32_t first_rank, const Task& second,
                         std::int32_t second_rank) {
  for (const Signal& signal : first.signals) {
    for (const Wait& wait : second.waits) {
      if (signal.flag - wait.flag >= wait.span) continue;  // unsigned, so also false for flags below the first
      bool reaches = false;
      for_each_rank(topo, first_rank, signal, first.peer,
                    [&](std::int32_t rank) { reaches = reaches || rank == second_rank; });
      if (reaches) return true;
    }
  }
  return false;
}

}  // namespace

WriteIndex::WriteIndex(const Enumeration& all, Findings& findings)
    : first_(static_cast<std::size_t>(all.world()) * kBufferCount + 1) {
  const auto for_each_piece = [&](auto&& f) {
    for_each_task(all, [&](const Lane& lane, TaskId id, const Task& task) {
      for_each_write(all.plan(), lane.rank, task, [&](const Access& access) {
        if (access.workspace() && !access.empty()) f(access, Piece{access.begin, access.end, id, lane.rank});
      });
    });
  };
  // Counted first, so that each buffer's writes stand together without moving.
  for_each_piece([&](const Access& access, const Piece&) { ++first_[key(access.rank, access.buffer) + 1]; });
  for (std::size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
  pieces_.resize(first_.back());
  std::vector<std::size_t> next(first_.begin(), first_.end() - 1);
  for_each_piece(
      [&](const Access& access, const Piece& piece) { pieces_[next[key(access.rank, access.buffer)]++] = piece; });

  const auto by_begin = [](const Piece& a, const Piece& b) { return a.begin < b.begin; };
  for (std::size_t i = 0; i + 1 < first_.size(); ++i) {
    Piece* const begin = pieces_.data() + first_[i];
    Piece* const end = pieces_.data() + first_[i + 1];
    if (!std::is_sorted(begin, end, by_begin)) std::sort(begin, end, by_begin);
    for (const Piece* piece = begin; piece < end && piece + 1 < end; ++piece) {
      if (piece[0].end <= piece[1].begin) continue;
      const Piece& later = piece[0].task < piece[1].task ? piece[1] : piece[0];
      const Piece& earlier = piece[0].task < piece[1].task ? piece[0] : piece[1];
      findings.add(ViolationKind::kWrittenTwice, all.place(later.task), [&] {
        return fmt::format("{} writes workspace of rank {} that {} also writes", all.name(later.task), i / kBufferCount,
                           all.name(earlier.task));
      });
    }
  }
}

WriteIndex::Range WriteIndex::from(std::int32_t rank, Buffer buffer, std::int64_t element) const {
  const Piece* const first = pieces_.data() + first_[key(rank, buffer)];
  const Piece* const last = pieces_.data() + first_[key(rank, buffer) + 1];
  if (first == last || element < first->begin) return {first, first};
  // Tiles have nearly equal sizes, so a guess by proportion is nearly always within a few steps of the right one.
  const std::int64_t count = last - first;
  const double share = static_cast<double>(element - first->begin) / static_cast<double>(last[-1].end - first->begin);
  const Piece* at =
      first + std::clamp(static_cast<std::int64_t>(share * static_cast<double>(count)), std::int64_t{0}, count - 1);
  constexpr int kSteps = 8;
  for (int step = 0; step < kSteps; ++step) {
    if (at->begin > element) {
      --at;  // not below the first, which begins at or before the element
    } else if (at + 1 < last && at[1].begin <= element) {
      ++at;
    } else {
      return {at, last};
    }
  }
  at = std::upper_bound(first, last, element, [](std::int64_t e, const Piece& piece) { return e < piece.begin; });
  return {at - 1, last};
}

const Piece* WriteIndex::holding(std::int32_t rank, Buffer buffer, std::int64_t begin, std::int64_t end) const {
  const Range range = from(rank, buffer, begin);
  return range.first != range.last && range.first->end >= end ? range.first : nullptr;
}

bool HappensBefore::direct(TaskId first, std::int32_t first_rank, TaskId second, std::int32_t second_rank) const {
  return raises_flag_of_wait(all_.topo(), all_.tasks()[first], first_rank, all_.tasks()[second], second_rank);
}

bool HappensBefore::operator()(TaskId first, std::int32_t first_rank, TaskId second, std::int32_t second_rank) {
  return direct(first, first_rank, second, second_rank) || search(first, second);
}

// Breadth first from `second` backwards over waits and the tasks that raise their flags.
bool HappensBefore::search(TaskId first, TaskId second) {
  if (signalers_begin_.empty()) index_signalers();
  ++searches_;
  std::vector<TaskId> queue{second};
  for (std::size_t next = 0; next < queue.size(); ++next) {
    const std::int32_t rank = all_.rank_of(queue[next]);
    for (const Wait& wait : all_.tasks()[queue[next]].waits) {
      if (wait.span == 0) continue;
      const std::size_t flag = all_.flag_id(rank, wait.flag);
      for (std::size_t i = signalers_begin_[flag]; i < signalers_begin_[flag + wait.span]; ++i) {
        const TaskId signaler = signalers_[i];
        if (signaler == first) return true;
        if (seen_[signaler] == searches_) continue;
        seen_[signaler] = searches_;
        queue.push_back(signaler);
      }
    }
  }
  return false;
}

void HappensBefore::index_signalers() {
  const auto for_each_signal = [&](auto&& f) {
    for_each_task(all_, [&](const Lane& lane, TaskId id, const Task& task) {
      for (const Signal& signal : task.signals) {
        for_each_rank(all_.topo(), lane.rank, signal, task.peer,
                      [&](std::int32_t rank) { f(all_.flag_id(rank, signal.flag), id); });
      }
    });
  };
  signalers_begin_.assign(all_.flag_ids() + 1, 0);
  for_each_signal([&](std::size_t flag, TaskId) { ++signalers_begin_[flag + 1]; });
  for (std::size_t i = 1; i < signalers_begin_.size(); ++i) signalers_begin_[i] += signalers_begin_[i - 1];
  signalers_.resize(signalers_begin_.back());
  std::vector<std::size_t> next(signalers_begin_.begin(), signalers_begin_.end() - 1);
  for_each_signal([&](std::size_t flag, TaskId id) { signalers_[next[flag]++] = id; });
  seen_.assign(all_.tasks().size(), 0);
}

}  // namespace mkernel
