// How results are proved right. A tile of C is the sum, over the ranks in order, of the ranks' products. Each kind of
// task makes the sum of a known run of ranks: a product that of its own rank, a sum over the node that of the node, a
// sum over the rail that of the world. So it is enough to check of every task by itself that its sources hold, in
// order, the runs that make up its own, each for the same block of C, and that each buffer receives the run which its
// readers count on. Copies and puts only move: a reader looks through them to the task that computed the bytes.
// For all_gather_gemm the place of a row in the gather buffer is its number in A: every move must keep it.
#include "verify/dataflow.h"

#include <fmt/format.h>

#include <optional>

#include "plan/print.h"

namespace mkernel {
namespace {

constexpr int kMaxMoves = 16;  // copies and puts between a product or sum and its reader; plans have two at most

// The products of ranks first..last-1, added in this order.
struct Ranks {
  std::int32_t first = 0;
  std::int32_t last = 0;
  bool operator==(const Ranks&) const = default;
};

class Dataflow {
 public:
  Dataflow(const Enumeration& all, const WriteIndex& writes, const Knowledge& knowledge, bool reuse, Findings& findings)
      : all_(all),
        plan_(all.plan()),
        topo_(all.topo()),
        writes_(writes),
        knowledge_(knowledge),
        reuse_(reuse),
        findings_(findings),
        before_(all) {}

  void check(std::int32_t rank, TaskId id, const Task& task);

 private:
  struct Reader {
    std::int32_t rank = 0;
    TaskId id = kNoTask;
    const Task& task;
  };

  void check_read(const Reader& reader, const Access& access);
  void check_piece(const Reader& reader, const Access& access, const Piece& piece);
  void check_product(const Reader& reader);
  void check_rows(const Reader& reader);
  void check_destination(const Reader& reader);
  void check_sources(const Reader& reader, Ranks wanted);
  // What a range of a buffer holds: whole rows of a tile, and the task that computed it.
  struct Origin {
    const Task* task = nullptr;
    TaskId id = kNoTask;
    std::int32_t rank = 0;
    Block block;
  };
  std::optional<Origin> origin(std::int32_t rank, Buffer buffer, std::int64_t begin, std::int64_t end) const;

  Ranks node_ranks(std::int32_t rank) const {
    const std::int32_t first = topo_.rank_of(topo_.node_of(rank), 0);
    return {first, first + topo_.gpus};
  }
  Ranks made_by(std::int32_t rank, const Task& task) const;
  Block global_block(std::int32_t rank, const Task& task) const;

  template <class Message>
  void wrong_data(const Reader& reader, Message&& message) {
    findings_.add(ViolationKind::kWrongData, all_.place(reader.id),
                  [&] { return fmt::format("{} {}", all_.name(reader.id), message()); });
  }

  const Enumeration& all_;
  const Plan& plan_;
  const Topology& topo_;
  const WriteIndex& writes_;
  const Knowledge& knowledge_;
  const bool reuse_;
  Findings& findings_;
  HappensBefore before_;
};

void Dataflow::check(std::int32_t rank, TaskId id, const Task& task) {
  if (task.source == Source::kNone) return;
  const Reader reader{rank, id, task};
  for_each_read(plan_, rank, task, [&](const Access& access) {
    if (access.workspace() && !access.empty()) check_read(reader, access);
  });
  const bool moves = task.action == Action::kCopy || task.action == Action::kPut;
  if (moves && plan_.buffer_dtype(task.src) != plan_.buffer_dtype(task.dst)) {
    wrong_data(reader, [] { return "moves elements into a buffer of another type"; });
  }
  if (task.action == Action::kGemm) check_product(reader);
  if (moves && (task.src == Buffer::kA || task.src == Buffer::kGather || task.dst == Buffer::kGather)) {
    check_rows(reader);
  }
  if (task.block.empty()) return;
  if (plan_.spec().op != Op::kAllGatherGemm && !moves) check_destination(reader);
  if (task.action == Action::kReduce) check_sources(reader, made_by(rank, task));
  if (task.action == Action::kCopy && task.dst == Buffer::kC) check_sources(reader, {0, all_.world()});
}

// All of the range is written in this epoch, by tasks that come before.
void Dataflow::check_read(const Reader& reader, const Access& access) {
  std::int64_t at = access.begin;
  const WriteIndex::Range range = writes_.from(access.rank, access.buffer, access.begin);
  for (const Piece* piece = range.first; piece != range.last && piece->begin <= at && at < access.end; ++piece) {
    if (piece->end <= at) continue;
    check_piece(reader, access, *piece);
    at = piece->end;
  }
  if (at >= access.end) return;
  findings_.add(ViolationKind::kNeverWritten, all_.place(reader.id), [&] {
    return fmt::format("{} reads elements {}:{} of {} of rank {}, and nobody writes the one at {}",
                       all_.name(reader.id), access.begin, access.end, buffer_name(access.buffer), access.rank, at);
  });
}

void Dataflow::check_piece(const Reader& reader, const Access& access, const Piece& piece) {
  if (!findings_.full(ViolationKind::kUnordered) && !before_(piece.task, piece.writer, reader.id, reader.rank)) {
    findings_.add(ViolationKind::kUnordered, all_.place(reader.id), [&] {
      return fmt::format("{} reads {} of rank {} that {} writes, and no chain of signals makes it wait for that",
                         all_.name(reader.id), buffer_name(access.buffer), access.rank, all_.name(piece.task));
    });
  }
  if (!reuse_) return;
  // What a put reads is known to be read only where its stamp has arrived.
  const std::int32_t user = reader.task.action == Action::kPut ? reader.task.peer : reader.rank;
  if (user == piece.writer || knowledge_.complete_knows(piece.writer, user)) return;
  if (knowledge_.task_knows(all_, piece.writer, all_.tasks()[piece.task], user)) return;
  findings_.add(ViolationKind::kOverwrite, all_.place(piece.task), [&] {
    return fmt::format(
        "{} may overwrite {} of rank {} two epochs later while {} still reads it: rank {} has no sign of "
        "rank {} in the epoch between",
        all_.name(piece.task), buffer_name(access.buffer), access.rank, all_.name(reader.id), piece.writer, user);
  });
}

// A product takes the rows of A that its block names.
void Dataflow::check_product(const Reader& reader) {
  const Task& task = reader.task;
  if (task.block.empty() || plan_.gemm_k(reader.rank) == 0) return;
  const PlanSpec& spec = plan_.spec();
  std::int64_t row = task.src_offset;
  std::int64_t wanted = task.block.row;
  if (spec.op != Op::kAllGatherGemm) {
    if (task.src != Buffer::kA) wrong_data(reader, [] { return "takes A from a gather buffer that nobody fills"; });
  } else if (task.src == Buffer::kA) {
    row += spec.row_split().begin(reader.rank);
  } else {
    wanted *= plan_.gather_pitch();
  }
  if (row != wanted) {
    wrong_data(reader, [&] {
      return fmt::format("takes rows of A from {} on, its block needs those from {} on", row, wanted);
    });
  }
  if (spec.op == Op::kAllGatherGemm) {
    for_each_write(plan_, reader.rank, task, [&](const Access& access) {
      if (access.buffer == Buffer::kC && access.rank == reader.rank) return;
      wrong_data(reader, [&] { return fmt::format("multiplies columns of own B for rank {}", access.rank); });
    });
  }
}

// Rows of A keep their place in the gather buffer, and come whole.
void Dataflow::check_rows(const Reader& reader) {
  const Task& task = reader.task;
  if (task.length == 0) return;
  const std::int64_t pitch = plan_.gather_pitch();
  std::int64_t place = task.src_offset;
  if (task.src == Buffer::kA) {
    place = (plan_.spec().row_split().begin(reader.rank) + task.src_offset) * pitch;
    if (task.block.cols != plan_.spec().k || task.length != task.block.rows * pitch) {
      wrong_data(reader, [&] {
        return fmt::format("moves {} elements, {} rows with pitch {} are {}", task.length, task.block.rows, pitch,
                           task.block.rows * pitch);
      });
    }
  } else if (task.src != task.dst) {
    wrong_data(reader, [] { return "moves rows of A into or out of a buffer that holds something else"; });
  }
  if (task.dst_offset != place) {
    wrong_data(reader, [&] {
      return fmt::format("puts rows of A at element {} of the gather buffer, their place is {}", task.dst_offset,
                         place);
    });
  }
}

// Every buffer receives the sum that its readers count on.
void Dataflow::check_destination(const Reader& reader) {
  const Ranks made = made_by(reader.rank, reader.task);
  for_each_write(plan_, reader.rank, reader.task, [&](const Access& access) {
    Ranks wanted{0, all_.world()};
    if (access.buffer == Buffer::kPartial) wanted = {access.rank, access.rank + 1};
    if (access.buffer == Buffer::kNodePartial) wanted = node_ranks(access.rank);
    const bool own_rows =
        access.buffer != Buffer::kC || plan_.spec().op != Op::kGemmReduceScatter || access.rank == reader.rank;
    if (made == wanted && own_rows) return;
    wrong_data(reader, [&] {
      return fmt::format(
          "writes the sum of ranks {}..{} into {} of rank {}, where {} belongs", made.first, made.last - 1,
          buffer_name(access.buffer), access.rank,
          own_rows ? fmt::format("that of ranks {}..{}", wanted.first, wanted.last - 1) : "another shard");
    });
  });
}

// The sources, in order, hold the sums of consecutive ranks from wanted.first to wanted.last, of the task's own block.
void Dataflow::check_sources(const Reader& reader, Ranks wanted) {
  const Block block = global_block(reader.rank, reader.task);
  std::int32_t next = wanted.first;
  for_each_read(plan_, reader.rank, reader.task, [&](const Access& access) {
    const std::optional<Origin> found = origin(access.rank, access.buffer, access.begin, access.end);
    if (!found) {
      wrong_data(reader, [&] {
        return fmt::format("reads elements {}:{} of {} of rank {}, which are not rows of one tile", access.begin,
                           access.end, buffer_name(access.buffer), access.rank);
      });
      return;
    }
    const Ranks made = made_by(found->rank, *found->task);
    if (found->block != block) {
      wrong_data(reader, [&] {
        return fmt::format("reads {} of rank {}, which holds another block, of {}", buffer_name(access.buffer),
                           access.rank, all_.name(found->id));
      });
    } else if (made.first != next) {
      wrong_data(reader, [&] {
        return fmt::format("adds the sum of ranks {}..{}, made by {}, where that of ranks from {} on is due",
                           made.first, made.last - 1, all_.name(found->id), next);
      });
    }
    next = made.last;
  });
  if (next != wanted.last) {
    wrong_data(reader, [&] { return fmt::format("adds up to rank {} and not to rank {}", next - 1, wanted.last - 1); });
  }
}

// Looked up through copies and puts; nothing when [begin, end) is no run of whole rows of one tile.
std::optional<Dataflow::Origin> Dataflow::origin(std::int32_t rank, Buffer buffer, std::int64_t begin,
                                                 std::int64_t end) const {
  for (int moves = 0; moves < kMaxMoves; ++moves) {
    const Piece* piece = writes_.holding(rank, buffer, begin, end);
    if (piece == nullptr) return std::nullopt;
    const Task& task = all_.tasks()[piece->task];
    if (task.action != Action::kCopy && task.action != Action::kPut) {
      Block block = global_block(piece->writer, task);
      if ((begin - piece->begin) % block.cols != 0 || (end - begin) % block.cols != 0) return std::nullopt;
      block.row += (begin - piece->begin) / block.cols;
      block.rows = (end - begin) / block.cols;
      return Origin{&task, piece->task, piece->writer, block};
    }
    if (task.src == Buffer::kA) return std::nullopt;
    begin += task.src_offset - piece->begin;
    end += task.src_offset - piece->begin;
    rank = piece->writer;
    buffer = task.src;
  }
  return std::nullopt;
}

Ranks Dataflow::made_by(std::int32_t rank, const Task& task) const {
  if (task.action == Action::kGemm) return {rank, rank + 1};
  return task.source == Source::kNode ? node_ranks(rank) : Ranks{0, all_.world()};
}

// The block of a product or sum in the coordinates of the whole C: where a C holds one shard, blocks count from it.
Block Dataflow::global_block(std::int32_t rank, const Task& task) const {
  Block block = task.block;
  if (plan_.spec().op == Op::kGemmReduceScatter && task.dst == Buffer::kC) {
    block.row += plan_.spec().row_split().begin(rank);
  }
  return block;
}

}  // namespace

void check_dataflow(const Enumeration& all, const WriteIndex& writes, const Knowledge& knowledge, bool reuse,
                    Findings& findings) {
  Dataflow flow(all, writes, knowledge, reuse, findings);
  for_each_task(all, [&](const Lane& lane, TaskId id, const Task& task) { flow.check(lane.rank, id, task); });
}

}  // namespace mkernel
