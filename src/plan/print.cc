#include "plan/print.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "plan/tiling.h"

namespace mkernel {
namespace {

// "512 B", "20.0 KiB", "1.5 MiB".
std::string bytes_text(std::int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, units[unit]);
}

std::string range_text(std::int64_t begin, std::int64_t size) { return fmt::format("{}:{}", begin, begin + size); }

std::string block_text(const Block& block) {
  return fmt::format("[{}, {}]", range_text(block.row, block.rows), range_text(block.col, block.cols));
}

// Whom an effect reaches; empty for the acting rank itself, where nothing need be said.
std::string reach_text(const Topology& topo, std::int32_t rank, Reach reach, std::int32_t peer) {
  const std::int32_t first = topo.rank_of(topo.node_of(rank), 0);
  switch (reach) {
    case Reach::kNobody: return "nobody";
    case Reach::kSelf: return "";
    case Reach::kRank: return peer == rank ? "" : fmt::format("rank {}", peer);
    case Reach::kPeers: return topo.gpus == 1 ? "nobody" : fmt::format("the other GPUs of node {}", topo.node_of(rank));
    case Reach::kNode: break;
  }
  return topo.gpus == 1 ? "" : fmt::format("ranks {}..{}", first, first + topo.gpus - 1);
}

std::string on_text(const Topology& topo, std::int32_t rank, Reach reach, std::int32_t peer) {
  const std::string who = reach_text(topo, rank, reach, peer);
  return who.empty() ? "" : " on " + who;
}

std::string on_text(const Topology& topo, std::int32_t rank, const Signal& signal, std::int32_t peer) {
  if (signal.reach != Reach::kRank || signal.ranks == 1) return on_text(topo, rank, signal.reach, peer);
  return fmt::format(" on ranks {}..{}", peer, peer + signal.ranks - 1);
}

bool has_flag(const Plan& plan, std::int32_t rank, std::uint32_t flag) {
  return rank >= 0 && rank < plan.topo().world() && flag < plan.flag_count();
}

// "arrival, chunk/node 5/1".
std::string meaning_text(const FlagName& name) { return fmt::format("{} {}/{}", name.what, name.a, name.b); }

std::string flag_meaning(const Plan& plan, std::int32_t rank, std::uint32_t flag) {
  return has_flag(plan, rank, flag) ? meaning_text(plan.flag_name(rank, flag)) : "there is none";
}

std::string destination_text(const Plan& plan, std::int32_t rank, const Task& task) {
  std::string text = fmt::format("{}{}{}", buffer_name(task.dst), block_text(task.block),
                                 on_text(plan.topo(), rank, task.dst_reach, task.peer));
  if (task.keep_result) text += " and own result";
  return text;
}

// "fold keys 64:128 (chunk at 4096) into state at 0 of O[0:16, :]".
std::string attend_text(const Task& task) {
  const std::string rows = fmt::format("{}[{}, :]", buffer_name(task.dst), range_text(task.block.row, task.block.rows));
  const std::int64_t keys = task.block.cols > 0 ? task.length / task.block.cols : 0;
  std::string text = keys > 0 ? fmt::format("fold keys {} ({} at {})", range_text(task.kv_position, keys),
                                            buffer_name(task.src), task.src_offset)
                              : fmt::format("fold none of the keys from {} on", task.kv_position);
  if (task.resume) text += fmt::format(" after state at {}", task.dst_offset);
  return text + (task.park ? fmt::format(" into state at {} of {}", task.dst_offset, rows) : " into " + rows);
}

// "queries 0:16 of head row 0 meet keys 64:128 (chunk at 4096)...".
std::string backward_text(const Plan& plan, const Task& task) {
  const std::string rows = range_text(task.block.row, task.block.rows);
  const std::string keys = range_text(task.kv_position, task.key_rows);
  std::string text = fmt::format("Q[{}, :] and keys {} ({} at {}) {}", rows, keys, buffer_name(task.src),
                                 task.src_offset, task.length > 0 ? "meet" : "see none of each other");
  text += fmt::format(": {}{}", buffer_name(Buffer::kDq), task.resume ? " goes on" : " begins");
  if (!task.park) text += fmt::format(" and ends in {}[{}, :]", buffer_name(Buffer::kDq), rows);
  text += task.resume_keys ? ", dK and dV go on" : ", dK and dV begin";
  if (task.park_keys) return text;
  if (plan.topo().world() == 1) return text + " and end there";
  return text + fmt::format(" and end in {} at {}", buffer_name(Buffer::kPartial), task.key_place);
}

// A piece of a chunk of keys or values.
std::string piece_text(const Plan& plan, std::int32_t rank, const Task& task) {
  return fmt::format("copy {}{} at {} to {} at {}{}: tokens {}", is_workspace(task.src) ? "" : "own ",
                     buffer_name(task.src), task.src_offset, buffer_name(task.dst), task.dst_offset,
                     on_text(plan.topo(), rank, task.dst_reach, task.peer),
                     range_text(task.block.row, task.block.rows));
}

std::string copy_text(const Plan& plan, std::int32_t rank, const Task& task) {
  if (task.dst == Buffer::kKv) return piece_text(plan, rank, task);
  if (task.dst != Buffer::kGather) {
    return fmt::format("{} = {} at {}", destination_text(plan, rank, task), buffer_name(task.src), task.src_offset);
  }
  // Rows of A keep their numbers on the way, except that a shard counts from its own first row.
  const std::int64_t from = task.src == Buffer::kA ? task.src_offset : task.block.row;
  return fmt::format("copy {}{}[{}, :] to {}[{}, :]{}", task.src == Buffer::kA ? "own " : "", buffer_name(task.src),
                     range_text(from, task.block.rows), buffer_name(task.dst),
                     range_text(task.block.row, task.block.rows),
                     on_text(plan.topo(), rank, task.dst_reach, task.peer));
}

std::string gemm_text(const Plan& plan, std::int32_t rank, const Task& task) {
  std::int64_t row = task.src_offset;
  if (task.src != Buffer::kA && plan.gather_pitch() > 0) row /= plan.gather_pitch();
  return fmt::format("{} = {}[{}, :] * B[:, {}]", destination_text(plan, rank, task), buffer_name(task.src),
                     range_text(row, task.block.rows), range_text(task.block.col, task.block.cols));
}

std::string reduce_text(const Plan& plan, std::int32_t rank, const Task& task) {
  const Topology& topo = plan.topo();
  const std::string destination = destination_text(plan, rank, task);
  if (task.source == Source::kRail) return fmt::format("{} = sum of node sums 0..{}", destination, topo.nodes - 1);
  const std::int32_t first = topo.rank_of(topo.node_of(rank), 0);
  return fmt::format("{} = sum of the {}s of ranks {}..{}", destination, buffer_name(task.src), first,
                     first + topo.gpus - 1);
}

std::string put_text(const Plan& plan, const Task& task) {
  return fmt::format("send {} at {} to {} at {} of rank {}: {} elements, {}", buffer_name(task.src), task.src_offset,
                     buffer_name(task.dst), task.dst_offset, task.peer, task.length,
                     bytes_text(task.length * dtype_bytes(plan.buffer_dtype(task.src))));
}

std::string wait_text(const Plan& plan, std::int32_t rank, const Wait& wait) {
  std::string text = fmt::format("flag {} ({})", wait.flag, flag_meaning(plan, rank, wait.flag));
  if (wait.span > 1) {
    const std::uint32_t last = wait.flag + wait.span - 1;
    text = fmt::format("flags {}..{} ({} to {})", wait.flag, last, flag_meaning(plan, rank, wait.flag),
                       flag_meaning(plan, rank, last));
  }
  if (wait.count != 1) text += fmt::format(" x {}", wait.count);
  return text;
}

std::string waits_text(const Plan& plan, std::int32_t rank, const Task& task) {
  std::string text;
  for (const Wait& wait : task.waits) {
    if (wait.span == 0) continue;
    text += text.empty() ? "after " : " and ";
    text += wait_text(plan, rank, wait);
  }
  return text;
}

std::string signals_text(const Plan& plan, std::int32_t rank, const Task& task) {
  const Topology& topo = plan.topo();
  std::string text;
  for (const Signal& signal : task.signals) {
    if (signal.reach == Reach::kNobody) continue;
    // A flag is named as its reader knows it: meanings of numbers may differ from rank to rank.
    std::int32_t reader = rank;
    if (signal.reach == Reach::kRank) reader = task.peer;
    if (signal.reach == Reach::kPeers) reader = topo.rank_of(topo.node_of(rank), topo.gpu_of(rank) == 0 ? 1 : 0);
    text += text.empty() ? "; then " : " and ";
    text += fmt::format("{} flag {} ({}){}", signal.stamp ? "stamp" : "raise", signal.flag,
                        flag_meaning(plan, reader, signal.flag), on_text(topo, rank, signal, task.peer));
  }
  return text;
}

std::string work_text(const Plan& plan, std::int32_t rank, const Task& task) {
  const std::string waits = waits_text(plan, rank, task);
  return fmt::format("{}{}{}{}", waits, waits.empty() ? "" : ": ", describe_action(plan, rank, task),
                     signals_text(plan, rank, task));
}

std::string extent_text(const Plan::Extent& extent) { return fmt::format("{} x {}", extent.rows, extent.cols); }

void print_attention_shape(const Plan& plan, std::int32_t rank, std::string& out) {
  const PlanSpec& spec = plan.spec();
  const Topology& topo = plan.topo();
  const AttentionSpec& a = spec.attention;
  const bool backward = spec.op == Op::kRingAttentionBackward;
  const KvRing& ring = backward ? static_cast<const KvRing&>(plan.backward()) : plan.ring_attention();
  auto to = std::back_inserter(out);
  fmt::format_to(to, "{}, {}", op_name(spec.op), attention_text(spec));
  fmt::format_to(to, "\nrank {} of {}: node {} of {}, GPU {} of {}\n", rank, topo.world(), topo.node_of(rank),
                 topo.nodes, topo.gpu_of(rank), topo.gpus);
  fmt::format_to(to, "its tokens: {} of Q, {} of K and V\n", a.q_split(topo).tokens(rank),
                 a.k_split(topo).tokens(rank));
  fmt::format_to(to, "tiles of {} queries{}, chunks of {} tokens, slots for {} of {} rounds\n", spec.tiling.bm,
                 backward ? fmt::format(" and {} keys", spec.tiling.bn) : "", spec.tiling.chunk_rows, ring.depth,
                 ring.rounds);
}

void print_shape(const Plan& plan, std::int32_t rank, std::string& out) {
  const PlanSpec& spec = plan.spec();
  const Topology& topo = plan.topo();
  if (attends(spec.op)) return print_attention_shape(plan, rank, out);
  auto to = std::back_inserter(out);
  fmt::format_to(to, "{}, m = {}, n = {}, k = {}, {}", op_name(spec.op), spec.m, spec.n, spec.k,
                 dtype_name(spec.dtype));
  if (spec.op != Op::kAllGatherGemm) fmt::format_to(to, ", sums between GPUs in {}", dtype_name(spec.partial));
  fmt::format_to(to, "\nrank {} of {}: node {} of {}, GPU {} of {}\n", rank, topo.world(), topo.node_of(rank),
                 topo.nodes, topo.gpu_of(rank), topo.gpus);
  fmt::format_to(to, "its matrices: A {}, B {}, C {}\n", extent_text(plan.a_extent(rank)),
                 extent_text(plan.b_extent(rank)), extent_text(plan.c_extent(rank)));
  const Tiling& tiling = spec.tiling;
  fmt::format_to(to, "tiles of {} x {}{}, bands of {} tile rows, chunks of ", tiling.bm, tiling.bn,
                 tiling.grid_shards > 1 ? fmt::format(" shared by {} shards", tiling.grid_shards) : "", tiling.band);
  if (spec.op == Op::kAllGatherGemm) {
    fmt::format_to(to, "{} rows in copies of {}, row pitch {}\n", tiling.chunk_rows, tiling.copy_rows,
                   plan.gather_pitch());
  } else {
    fmt::format_to(to, "{} tiles\n", tiling.chunk_tiles);
  }
}

void print_memory(const Plan& plan, std::int32_t rank, std::string& out) {
  auto to = std::back_inserter(out);
  const std::int64_t workspace = workspace_bytes(plan.spec());
  if (workspace == 0) {
    out += "workspace: none\nnetwork: not used\n";
    return;
  }
  fmt::format_to(to, "workspace: {}, two parities of", bytes_text(workspace));
  for (int b = 0; b < kBufferCount; ++b) {
    const auto buffer = static_cast<Buffer>(b);
    const std::int64_t elements = plan.buffer_elements(buffer);
    if (elements == 0) continue;
    fmt::format_to(to, " {} {},", buffer_name(buffer), bytes_text(elements * dtype_bytes(plan.buffer_dtype(buffer))));
  }
  fmt::format_to(to, " {} flags\n", plan.flag_count());
  fmt::format_to(to, "network: {} sent by this rank\n", bytes_text(plan.network_bytes(rank)));
}

void print_lane(const PlanSource& source, std::int32_t rank, Role role, std::int32_t lane, std::int64_t max_tasks,
                std::string& out) {
  const Plan& plan = source.plan();
  const std::int64_t count = source.count(rank, role, lane);
  // Two thirds of what is shown come from the front, where the order can be seen best.
  const std::int64_t tail = count > max_tasks ? max_tasks / 3 : 0;
  const std::int64_t head = count > max_tasks ? max_tasks - tail : count;
  auto to = std::back_inserter(out);
  fmt::format_to(to, "\n{}[{}]: {} task{}\n", role_name(role), lane, count, count == 1 ? "" : "s");
  const auto print_tasks = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      fmt::format_to(to, "{:>8}  {}\n", i, work_text(plan, rank, source.task(rank, role, lane, i)));
    }
  };
  print_tasks(0, head);
  if (count > head + tail) fmt::format_to(to, "     ...  {} more\n", count - head - tail);
  print_tasks(count - tail, count);
}

}  // namespace

std::string attention_text(const PlanSpec& spec) {
  const AttentionSpec& a = spec.attention;
  std::string text = fmt::format("{} x {} queries and {} keys of {} and {} heads of {}, {}", a.batch, a.seq_q, a.seq_k,
                                 a.heads, a.kv_heads, a.dim, dtype_name(spec.dtype));
  if (a.mask.causal) text += ", causal";
  if (a.mask.left >= 0) text += fmt::format(", {} keys to the left", a.mask.left);
  if (a.mask.right >= 0) text += fmt::format(", {} keys to the right", a.mask.right);
  if (a.zigzag) text += ", zigzag";
  if (a.packed) text += ", packed";
  if (spec.op == Op::kRingAttentionBackward && spec.partial != spec.dtype) {
    text += fmt::format(", partial gradients in {}", dtype_name(spec.partial));
  }
  return text;
}

std::string shape_text(const PlanSpec& spec) {
  return attends(spec.op) ? attention_text(spec) : fmt::format("{} x {} x {}", spec.m, spec.n, spec.k);
}

std::string_view buffer_name(Buffer buffer) {
  switch (buffer) {
    case Buffer::kA: return "A";
    case Buffer::kB: return "B";
    case Buffer::kC: return "C";
    case Buffer::kQ: return "Q";
    case Buffer::kK: return "K";
    case Buffer::kV: return "V";
    case Buffer::kO: return "O";
    case Buffer::kLse: return "log-sum-exp";
    case Buffer::kDo: return "dO";
    case Buffer::kDq: return "dQ";
    case Buffer::kDk: return "dK";
    case Buffer::kDv: return "dV";
    case Buffer::kGather: return "gathered A";
    case Buffer::kPartial: return "partial";
    case Buffer::kNodePartial: return "node sum";
    case Buffer::kArrival: return "arrival";
    case Buffer::kResult: return "result";
    case Buffer::kKv: return "chunk";
    case Buffer::kState: return "state";
    case Buffer::kKeyState: return "state of keys";
  }
  return "?";
}

std::string_view role_name(Role role) {
  switch (role) {
    case Role::kCompute: return "compute";
    case Role::kIntra: return "intra";
    case Role::kSend: return "send";
    case Role::kRecv: return "recv";
  }
  return "?";
}

std::string task_name(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) {
  return fmt::format("rank {} {}[{}] task {}", rank, role_name(role), lane, index);
}

std::string describe_flag(const Plan& plan, std::int32_t rank, std::uint32_t flag) {
  if (!has_flag(plan, rank, flag)) return fmt::format("flag {} (there is none)", flag);
  const FlagName name = plan.flag_name(rank, flag);
  const std::string sender = name.sender >= 0 ? fmt::format("rank {}", name.sender) : "the GPUs of the node";
  return fmt::format("flag {} ({}, from {})", flag, meaning_text(name), sender);
}

std::string describe_action(const Plan& plan, std::int32_t rank, const Task& task) {
  switch (task.action) {
    case Action::kNone: return "nothing";
    case Action::kGemm: return gemm_text(plan, rank, task);
    case Action::kCopy: return copy_text(plan, rank, task);
    case Action::kReduce: return reduce_text(plan, rank, task);
    case Action::kPut: return put_text(plan, task);
    case Action::kAttend: return attend_text(task);
    case Action::kAttendBackward: return backward_text(plan, task);
  }
  return "?";
}

std::string describe_task(const Plan& plan, std::int32_t rank, Role role, std::int32_t lane, std::int64_t index,
                          const Task& task) {
  return fmt::format("{}: {}", task_name(rank, role, lane, index), work_text(plan, rank, task));
}

std::string print_plan(const PlanSource& source, std::int32_t rank, int max_tasks_per_lane) {
  const Plan& plan = source.plan();
  MK_CHECK(rank >= 0 && rank < plan.topo().world());
  MK_CHECK_OP(max_tasks_per_lane, >=, 0);
  std::string out;
  print_shape(plan, rank, out);
  print_memory(plan, rank, out);
  for (int r = 0; r < kRoleCount; ++r) {
    const auto role = static_cast<Role>(r);
    for (std::int32_t lane = 0; lane < plan.lanes(role); ++lane) {
      print_lane(source, rank, role, lane, max_tasks_per_lane, out);
    }
  }
  const Wait completion = source.completion(rank);
  out += "\ncomplete when all of these tasks are done";
  if (completion.span > 0) out += fmt::format(", and {}", wait_text(plan, rank, completion));
  out += "\n";
  return out;
}

}  // namespace mkernel
