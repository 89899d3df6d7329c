#include <fmt/format.h>

#include <algorithm>

#include "plan/print.h"
#include "verify/dataflow.h"

namespace mkernel {
namespace {

// The writes of one C as cells of the grid that all their edges make: in a good plan one cell per tile.
class OutputCells {
 public:
  explicit OutputCells(const Plan::Extent& extent) : rows_{0, extent.rows}, cols_{0, extent.cols} {}

  void add_edges(const Block& block) {
    insert(rows_, block.row);
    insert(rows_, block.row + block.rows);
    insert(cols_, block.col);
    insert(cols_, block.col + block.cols);
  }
  void make_cells() { writer_.assign((rows_.size() - 1) * (cols_.size() - 1), kNoTask); }

  // Returns a task that has written part of the block before, and kNoTask when there is none.
  TaskId write(const Block& block, TaskId task) {
    TaskId before = kNoTask;
    const std::size_t last_row = find(rows_, block.row + block.rows);
    const std::size_t last_col = find(cols_, block.col + block.cols);
    const std::size_t first_col = find(cols_, block.col);
    for (std::size_t i = find(rows_, block.row); i < last_row; ++i) {
      for (std::size_t j = first_col; j < last_col; ++j) {
        TaskId& cell = writer_[i * (cols_.size() - 1) + j];
        if (cell != kNoTask) before = cell;
        cell = task;
      }
    }
    return before;
  }

  template <class F>
  void for_each_hole(F&& f) const {
    for (std::size_t c = 0; c < writer_.size(); ++c) {
      if (writer_[c] != kNoTask) continue;
      const std::size_t i = c / (cols_.size() - 1);
      const std::size_t j = c % (cols_.size() - 1);
      const Block hole{rows_[i], cols_[j], rows_[i + 1] - rows_[i], cols_[j + 1] - cols_[j]};
      if (!hole.empty()) f(hole);
    }
  }

 private:
  // Edges are few and mostly known, so a sorted vector is the fastest set.
  static void insert(std::vector<std::int64_t>& edges, std::int64_t edge) {
    const auto at = std::lower_bound(edges.begin(), edges.end(), edge);
    if (at == edges.end() || *at != edge) edges.insert(at, edge);
  }
  static std::size_t find(const std::vector<std::int64_t>& edges, std::int64_t edge) {
    return static_cast<std::size_t>(std::lower_bound(edges.begin(), edges.end(), edge) - edges.begin());
  }

  std::vector<std::int64_t> rows_;
  std::vector<std::int64_t> cols_;
  std::vector<TaskId> writer_;
};

struct OutputWrite {
  TaskId task = kNoTask;
  std::int32_t writer = 0;
  Block block;
};

// A write into the C of another rank must be known to that rank's completion: then one of its tasks, or the completion
// itself, waits for a flag that the writer raises, directly or through others.
class Covered {
 public:
  Covered(const Enumeration& all, const FlagTable& flags) : all_(all), flags_(flags) {}

  bool operator()(const OutputWrite& write, std::int32_t rank) {
    const Task& task = all_.tasks()[write.task];
    bool direct = false;
    for (const Signal& signal : task.signals) {
      for_each_rank(all_.topo(), write.writer, signal, task.peer, [&](std::int32_t reached) {
        direct = direct || (reached == rank && flags_.is_awaited(all_.flag_id(rank, signal.flag)));
      });
    }
    return direct || heard(write, rank);
  }

 private:
  // Forwards from the writer: who waits for a flag that it raises, who waits for theirs, until one is of `rank`.
  // Rare (plans so far signal directly), so that reading all tasks for each step is good enough.
  bool heard(const OutputWrite& write, std::int32_t rank) const {
    std::vector<bool> raised(all_.flag_ids());
    const auto raise = [&](std::int32_t by, const Task& task) {
      bool news = false;
      for (const Signal& signal : task.signals) {
        for_each_rank(all_.topo(), by, signal, task.peer, [&](std::int32_t reached) {
          auto flag = raised[all_.flag_id(reached, signal.flag)];
          news = news || !flag;
          flag = true;
        });
      }
      return news;
    };
    const auto waits = [&](std::int32_t by, const Wait& wait) {
      for (std::uint32_t i = 0; i < wait.span; ++i) {
        if (raised[all_.flag_id(by, wait.flag + i)]) return true;
      }
      return false;
    };
    for (bool news = raise(write.writer, all_.tasks()[write.task]); news;) {
      news = false;
      bool reached = waits(rank, all_.completion(rank));
      for_each_task(all_, [&](const Lane& lane, TaskId, const Task& task) {
        if (!waits(lane.rank, task.waits[0]) && !waits(lane.rank, task.waits[1])) return;
        reached = reached || lane.rank == rank;
        news = raise(lane.rank, task) || news;
      });
      if (reached) return true;
    }
    return false;
  }

  const Enumeration& all_;
  const FlagTable& flags_;
};

// The writes into one of every rank's outputs, rank by rank.
struct OutputIndex {
  OutputIndex(const Enumeration& all, Buffer output) : first(static_cast<std::size_t>(all.world()) + 1) {
    const auto for_each_output = [&](auto&& f) {
      for_each_task(all, [&](const Lane& lane, TaskId id, const Task& task) {
        for_each_write(all.plan(), lane.rank, task, [&](const Access& access) {
          if (access.buffer == output && !access.empty()) f(access, lane.rank, id);
        });
      });
    };
    for_each_output([&](const Access& access, std::int32_t, TaskId) { ++first[index(access) + 1]; });
    for (std::size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
    writes.resize(first.back());
    std::vector<std::size_t> next(first.begin(), first.end() - 1);
    for_each_output([&](const Access& access, std::int32_t by, TaskId id) {
      writes[next[index(access)]++] = {id, by, access.block};
    });
  }
  static std::size_t index(const Access& access) { return static_cast<std::size_t>(access.rank); }

  std::vector<OutputWrite> writes;
  std::vector<std::size_t> first;
};

void check_output(const Enumeration& all, Buffer output, const FlagTable& flags, const Knowledge& knowledge,
                  Findings& findings) {
  const OutputIndex index(all, output);
  Covered covered(all, flags);
  for (std::int32_t rank = 0; rank < all.world(); ++rank) {
    const OutputWrite* const begin = index.writes.data() + index.first[static_cast<std::size_t>(rank)];
    const OutputWrite* const end = index.writes.data() + index.first[static_cast<std::size_t>(rank) + 1];
    OutputCells cells(all.plan().extent(output, rank));
    for (const OutputWrite* write = begin; write != end; ++write) cells.add_edges(write->block);
    cells.make_cells();
    for (const OutputWrite* write = begin; write != end; ++write) {
      const Task& task = all.tasks()[write->task];
      const TaskId before = cells.write(write->block, write->task);
      if (before != kNoTask) {
        findings.add(ViolationKind::kWrittenTwice, all.place(write->task), [&] {
          return fmt::format("{} writes part of {} of rank {} that {} also writes", all.name(write->task),
                             buffer_name(output), rank, all.name(before));
        });
      }
      if (write->writer == rank) continue;
      if (!findings.full(ViolationKind::kUnordered) && !covered(*write, rank)) {
        findings.add(ViolationKind::kUnordered, all.place(write->task), [&] {
          return fmt::format("{} writes C of rank {}, whose completion does not wait for that", all.name(write->task),
                             rank);
        });
      }
      if (!knowledge.task_knows(all, write->writer, task, rank)) {
        findings.add(ViolationKind::kOverwrite, all.place(write->task), [&] {
          return fmt::format("{} writes C of rank {} without a sign that rank {} has started this call",
                             all.name(write->task), rank, rank);
        });
      }
    }
    cells.for_each_hole([&](const Block& hole) {
      findings.add(ViolationKind::kNeverWritten, {rank}, [&] {
        return fmt::format("nobody writes {}[{}:{}, {}:{}] of rank {}", buffer_name(output), hole.row,
                           hole.row + hole.rows, hole.col, hole.col + hole.cols, rank);
      });
    });
  }
}

}  // namespace

void check_outputs(const Enumeration& all, const FlagTable& flags, const Knowledge& knowledge, Findings& findings) {
  for (int i = 0; i < all.plan().outputs(); ++i) check_output(all, all.plan().output(i), flags, knowledge, findings);
}

}  // namespace mkernel
