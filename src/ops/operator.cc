// The public Operator: validates, plans, and hands over to one of the executors.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "exec/sim/simulator.h"
#include "mkernel/mkernel.h"
#include "ops/attention_spec.h"
#include "ops/check_arguments.h"
#include "ops/check_attention_arguments.h"
#include "ops/gemm_spec.h"
#include "plan/print.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

// What one core does at least: fp32 arithmetic with vectors of 128 bits or more, copies through the cache, and a
// microsecond or two to find and finish a task. Only ratios matter.
constexpr RoleCosts kHostCosts{20, 4, 2000, 10, 10};

Partition partition_for(const WorldOptions& options, const Plan& plan, const RoleCosts& costs) {
  return options.partition == Partition{} ? choose_partition(plan, options.sms, costs) : options.partition;
}

// With few SMs none may be left for communication, which then would begin when all arithmetic is done. On the host one
// SM of each rank always looks for it first; it computes as well when there is none.
Partition host_partition_for(const WorldOptions& options, const Plan& plan) {
  Partition partition = partition_for(options, plan, kHostCosts);
  if (options.partition != Partition{} || partition.intra + partition.recv > 0) return partition;
  --partition.compute;
  ++(plan.lanes(Role::kIntra) > 0 ? partition.intra : partition.recv);
  return partition;
}

std::int64_t bytes_bound(const Plan& plan) {
  std::int64_t bytes = 0;
  for (std::int32_t rank = 0; rank < plan.topo().world(); ++rank) bytes += plan.network_bytes(rank);
  return bytes;
}

// Floats that one SM computes in.
std::int64_t scratch_floats(const Plan& plan) {
  const Tiling& tiling = plan.spec().tiling;
  if (plan.spec().op == Op::kRingAttention) {
    const std::int64_t dim = plan.spec().attention.dim;
    return tiling.bm * (3 * dim + kAttendKeys + 2) + kAttendKeys * dim;
  }
  if (plan.spec().op == Op::kRingAttentionBackward) {
    return BackwardScratch::floats(tiling.bm, tiling.bn, plan.spec().attention.dim);
  }
  const std::int64_t panels = 2 * std::int64_t{tiling.bm} * tiling.bn;
  return panels + (std::int64_t{tiling.bm} + tiling.bn) * std::min(plan.gemm_k(0), kGemmPanelK);
}

// Bytes that creating the operator on the host takes: every rank's workspace and every SM's scratch.
std::int64_t host_bytes(const Plan& plan, int sms) {
  const std::int64_t scratch = 4 * scratch_floats(plan) * sms;
  return (HeapLayout(plan).bytes() + scratch) * plan.topo().world();
}

// The cost model of a simulated world: H200 nodes, with the caller's link where one is given.
CostModel cost_model(const WorldOptions& options) {
  CostModel cost = find_preset("h200x8-ib").value();
  if (options.link.gigabytes_per_s > 0) cost.net_bytes_per_ns = options.link.gigabytes_per_s;
  if (options.link.latency_us > 0) cost.net_ns = static_cast<Nanos>(options.link.latency_us * 1e3);
  cost.unordered = cost.unordered || options.link.unordered;
  return cost;
}

// All that must be the same on every rank.
std::string describe(const GemmOptions& o) {
  return fmt::format(
      "{} of {} x {} x {} in {}{}{} (tiles {} x {}, band {}, chunks of {} tiles and {} rows, copies of {} rows)",
      op_name(o.op), o.m, o.n, o.k, dtype_name(o.dtype), o.fp32_partials ? " with fp32 partials" : "",
      o.fused ? "" : " unfused", o.bm, o.bn, o.band, o.chunk_tiles, o.chunk_rows, o.copy_rows);
}

std::string describe(const AttentionOptions& o) {
  return fmt::format(
      "ring_attention of {} x {} and {} tokens, {} and {} heads of {} in {}{}{}{}{}, window {} and {}, scale {} (tiles "
      "of {}, chunks of {}, {} slots)",
      o.batch, o.seq_q, o.seq_k, o.heads, o.kv_heads, o.dim, dtype_name(o.dtype), o.causal ? ", causal" : "",
      o.zigzag ? ", zigzag" : "", o.packed ? ", packed" : "", o.fused ? "" : ", unfused", o.window_left, o.window_right,
      o.scale, o.bm, o.chunk_rows, o.slot_rounds);
}

std::string describe(const AttentionBackwardOptions& o) {
  return fmt::format("backward of {}{}, {} keys per tile", describe(static_cast<const AttentionOptions&>(o)),
                     o.fp32_partials ? " with fp32 partials" : "", o.bn);
}

std::vector<TraceEvent> to_trace(const RunLog& log, const Plan& plan, int sms) {
  Nanos first = kNever;
  for (const auto& sm : log.events) {
    if (!sm.empty()) first = std::min(first, sm.front().begin_ns);
  }
  const auto micros = [&](Nanos t) { return static_cast<double>(t - first) * 1e-3; };
  std::vector<TraceEvent> trace;
  for (std::size_t i = 0; i < log.events.size(); ++i) {
    const auto rank = static_cast<std::int32_t>(i / static_cast<std::size_t>(sms));
    const int sm = static_cast<int>(i % static_cast<std::size_t>(sms));
    for (const RunLog::Event& event : log.events[i]) {
      const Task task = plan.task(rank, event.role, event.lane, event.index);
      trace.push_back({describe_task(plan, rank, event.role, event.lane, event.index, task), rank, sm,
                       micros(event.begin_ns), micros(event.end_ns)});
    }
  }
  for (const RunLog::PutEvent& put : log.puts()) {
    const Task task = plan.task(put.rank, Role::kSend, put.id.lane, put.id.index);
    trace.push_back({describe_task(plan, put.rank, Role::kSend, put.id.lane, put.id.index, task), put.rank,
                     1000 + put.node, micros(put.begin_ns), micros(put.end_ns)});
  }
  return trace;
}

// The operators that take a kind of arguments, and what to call it.
template <class Given>
struct Kind {
  static constexpr std::string_view name = "GemmArguments";
  static constexpr std::string_view what = "matrices";
};
template <>
struct Kind<AttentionArguments> {
  static constexpr std::string_view name = "AttentionArguments";
  static constexpr std::string_view what = "tensors of the forward";
};
template <>
struct Kind<AttentionBackwardArguments> {
  static constexpr std::string_view name = "AttentionBackwardArguments";
  static constexpr std::string_view what = "tensors of the backward";
};
std::string_view wanted_arguments(Op op) {
  if (op == Op::kRingAttention) return Kind<AttentionArguments>::name;
  return op == Op::kRingAttentionBackward ? Kind<AttentionBackwardArguments>::name : Kind<GemmArguments>::name;
}

// Refuses arguments of another operator.
template <class Given>
Status check_kind(const Plan& plan) {
  const std::string_view wanted = wanted_arguments(plan.spec().op);
  if (Kind<Given>::name == wanted) return Ok{};
  return bad_argument(fmt::format("arguments are {}: {} takes {}", Kind<Given>::what, op_name(plan.spec().op), wanted));
}

}  // namespace

class Operator::Impl {
 public:
  Impl(std::shared_ptr<World::Impl> owner, bool is_fused, const PlanSpec& spec)
      : world(std::move(owner)), fused(is_fused), source(std::make_shared<PlanSource>(Plan(spec))) {}
  ~Impl() {
    if (host != nullptr) remove_host();
    if (cuda != nullptr) remove_cuda();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  const Plan& plan() const { return source->plan(); }
  RunReport new_report() const;
  Status create_host();
  Status prepare_host();
  void remove_host();
  void confirm_destruction(std::uint32_t number);
  Status create(bool any_layout);
  template <class Given>
  Result<RunReport> run(std::span<const Given> arguments, bool trace);
  template <class Given>
  Status launch(int rank, const Given& arguments, void* stream);
  void pass_gate(const std::string& what);
  Result<RunReport> run_processes(const Arguments& arguments, const Status& good, bool trace);
  Status create_cuda(bool any_layout);
  void remove_cuda();
  Result<RunReport> run_host(std::span<const Arguments> arguments, bool trace);
  Result<RunReport> run_cuda(std::span<const Arguments> arguments, bool trace);
  Status add_cuda_trace(RunReport& report);
  Result<RunReport> run_sim(std::span<const Arguments> arguments, bool trace);
  Status check_rank(int rank) const;

  const std::shared_ptr<World::Impl> world;
  const bool fused;
  const std::shared_ptr<const PlanSource> source;
  Partition partition;
  std::vector<SharedBlock> heaps;  // by rank, in a world of several processes: ours and those of our node
  HostOperator* host = nullptr;    // owned by the executor; null but on Device::kHost
  CudaOperator* cuda = nullptr;    // the same for Device::kCuda
  std::mutex trace_mutex;          // one traced run at a time
  std::mutex sim_mutex;            // guards the epochs, and keeps simulated runs apart
  std::uint64_t sim_epochs = 0;
};

RunReport Operator::Impl::new_report() const {
  RunReport report;
  report.network_bytes_bound = bytes_bound(plan());
  report.workspace_bytes = cuda != nullptr ? cuda->workspace_bytes() : HeapLayout(plan()).bytes();
  report.partition = partition;
  return report;
}

// Refuses what cannot be, before anything is taken.
Status Operator::Impl::prepare_host() {
  partition = host_partition_for(world->options, plan());
  const std::int64_t wanted = host_bytes(plan(), world->options.sms) / (world->group ? plan().topo().world() : 1);
  const std::int64_t available = world->memory_limit();
  if (wanted > available) {
    return Error{
        ErrorKind::kOutOfMemory,
        fmt::format("{} of {} on {} ranks needs {} bytes of workspace, and {} are available", op_name(plan().spec().op),
                    shape_text(plan().spec()), plan().topo().world(), wanted, available)};
  }
  return Ok{};
}

Status Operator::Impl::create_host() {
  Status prepared = prepare_host();
  ProcessGroup* group = world->group.get();
  HostOperatorConfig config;
  const std::uint32_t number = world->executor->next_operator();
  if (group != nullptr) prepared = group->confirm(fmt::format("prepare operator {}", number), prepared);
  if (!prepared.ok()) return prepared;
  if (group != nullptr) {
    auto shared = group->share_memory(fmt::format("share operator {}", number), host_heap_bytes(plan()));
    if (!shared.ok()) return shared.error();
    heaps = std::move(shared).value();
    config.own_rank = group->rank();
    for (const SharedBlock& heap : heaps) config.heaps.push_back(heap.data());
  }
  config.source = source;
  config.partition = partition;
  config.sms = world->options.sms;
  config.fused = fused;
  config.start_epoch = world->hooks.start_epoch;
  config.workspace_fill = world->hooks.workspace_fill;
  Result<HostOperator*> added = world->executor->add_operator(config);
  if (group != nullptr) {
    const Status status = added.ok() ? Status(Ok{}) : Status(added.error());
    if (Status all = group->confirm(fmt::format("make operator {}", number), status); !all.ok()) {
      if (added.ok()) world->executor->remove_operator(*added);
      return all;
    }
  }
  if (!added.ok()) return added.error();
  host = *added;
  if (group == nullptr) return Ok{};
  return group->share_heap(number, heaps[static_cast<std::size_t>(group->rank())].data(), host_heap_bytes(plan()),
                           config.start_epoch);
}

// Other ranks may still read our memory, or write what nobody waits for. An error is one of the world's.
void Operator::Impl::confirm_destruction(std::uint32_t number) {
  static_cast<void>(world->group->confirm(fmt::format("destroy operator {}", number), Ok{}));
}

void Operator::Impl::remove_host() {
  ProcessGroup* group = world->group.get();
  if (group != nullptr && world->executor->wait(host, group->rank()).ok()) confirm_destruction(host->number());
  const std::uint32_t number = host->number();
  world->executor->remove_operator(host);
  if (group != nullptr && group->endpoint() != nullptr) group->endpoint()->remove_heap(number);
}

// Not fused: the second phase begins when all processes have ended the first. What goes wrong fails the world.
void Operator::Impl::pass_gate(const std::string& what) {
  world->executor->await_first_phase(host);
  if (world->failure().happened()) return;
  const Status all = world->group->confirm("first phase: " + what, Ok{});
  if (!all.ok()) return world->executor->fail(all.error());
  world->executor->open_gate(host);
}

// All processes' part of a run, with one rank in each.
Result<RunReport> Operator::Impl::run_processes(const Arguments& arguments, const Status& good, bool trace) {
  ProcessGroup& group = *world->group;
  const int rank = group.rank();
  const std::uint32_t number = host != nullptr ? host->number() : cuda->number();
  const std::string what = fmt::format("run operator {}", number);
  if (world->failure().happened()) return world->failure().later_error();
  // So that all begin at about the same time, and none at all when one was given nonsense.
  Status checked = good;
  if (checked.ok() && cuda != nullptr) checked = world->cuda->check(cuda, rank, arguments);
  if (Status all = group.confirm(what, checked); !all.ok()) return all.error();
  const ProcessEndpoint* endpoint = group.endpoint();
  const std::int64_t sent_before = endpoint != nullptr ? endpoint->bytes_sent(number) : 0;
  std::shared_ptr<RunLog> log;
  if (host != nullptr) log = std::make_shared<RunLog>(plan().topo().world(), world->options.sms, trace);
  const Nanos begin = steady_now();
  Status status = host != nullptr ? world->executor->launch_all(host, {&arguments, 1}, log)
                                  : world->cuda->launch(cuda, rank, arguments, nullptr, kAllParts);
  if (!fused && status.ok()) pass_gate(what);
  if (status.ok() || world->failure().happened()) {
    const Status waited = host != nullptr ? world->executor->wait(host, rank) : world->cuda->wait(cuda, rank);
    if (status.ok()) status = waited;
  }
  const Nanos end = host != nullptr ? log->end_ns[static_cast<std::size_t>(rank)] : steady_now();
  if (!status.ok()) return status.error();
  // Our call may be complete while a put of ours, which others wait for, has yet to be posted.
  if (Status ended = group.confirm("end: " + what, Ok{}); !ended.ok()) return ended.error();
  const std::int64_t sent = (endpoint != nullptr ? endpoint->bytes_sent(number) : 0) - sent_before;
  const std::int64_t tasks = host != nullptr ? log->tasks.load() : cuda->tasks(rank);
  const Result<std::vector<std::vector<std::int64_t>>> all =
      group.gather("report: " + what, {end - begin, tasks, sent});
  if (!all.ok()) return all.error();
  RunReport report = new_report();
  for (const std::vector<std::int64_t>& numbers : *all) {
    report.time_us = std::max(report.time_us, static_cast<double>(numbers[0]) * 1e-3);
    report.tasks += numbers[1];
    report.network_bytes += numbers[2];
  }
  if (!trace) return report;
  if (host != nullptr) {
    report.trace = to_trace(*log, plan(), world->options.sms);
  } else if (Status added = add_cuda_trace(report); !added.ok()) {
    return added.error();
  }
  return report;
}

Status Operator::Impl::create_cuda(bool any_layout) {
  if (!fused) return bad_argument("fused is false: Device::kCuda has no unfused run, `mkernel bench` compares there");
  CudaOperatorConfig config;
  config.source = source;
  config.partition = world->options.partition;
  config.any_layout = any_layout;
  config.start_epoch = world->hooks.start_epoch;
  config.workspace_fill = world->hooks.workspace_fill;
  ProcessGroup* const group = world->group.get();
  const std::uint32_t number = world->cuda->next_operator();
  if (group != nullptr && plan().topo().gpus > 1) {
    config.share = [group, number](const Status& made, int file, std::int64_t bytes) {
      return group->share_file(fmt::format("share the memory of operator {}", number), made, file, bytes);
    };
  }
  Result<CudaOperator*> added = world->cuda->add_operator(config);
  if (group != nullptr) {
    // Nobody's kernel may raise a flag that another rank has yet to clear.
    const Status status = added.ok() ? Status(Ok{}) : Status(added.error());
    if (Status all = group->confirm(fmt::format("make operator {}", number), status); !all.ok()) {
      if (added.ok()) world->cuda->remove_operator(*added);
      return all;
    }
  }
  if (!added.ok()) return added.error();
  cuda = *added;
  partition = cuda->partition();
  if (group == nullptr || group->endpoint() == nullptr) return Ok{};
  const HeapMemory heap = world->cuda->network_heap(cuda);
  return group->share_heap(number, heap.data, heap.bytes, config.start_epoch);
}

void Operator::Impl::remove_cuda() {
  ProcessGroup* const group = world->group.get();
  if (group != nullptr && world->cuda->wait(cuda, group->rank()).ok()) confirm_destruction(cuda->number());
  world->cuda->remove_operator(cuda);
}

Result<RunReport> Operator::Impl::run_cuda(std::span<const Arguments> arguments, bool trace) {
  if (world->failure().happened()) return world->failure().later_error();
  for (std::int32_t rank = 0; rank < plan().topo().world(); ++rank) {  // all before any starts
    if (Status status = world->cuda->check(cuda, rank, arguments[rank]); !status.ok()) return status.error();
  }
  const std::int64_t bytes_before = world->cuda->network_bytes(cuda);
  const Nanos begin = steady_now();
  Status status = Ok{};
  for (std::int32_t rank = 0; status.ok() && rank < plan().topo().world(); ++rank) {
    status = world->cuda->launch(cuda, rank, arguments[rank], nullptr, kAllParts);
  }
  const bool started = status.ok() || world->failure().happened();
  for (std::int32_t rank = 0; started && rank < plan().topo().world(); ++rank) {
    const Status waited = world->cuda->wait(cuda, rank);
    if (status.ok() && !waited.ok()) status = waited;
  }
  if (!status.ok()) return status.error();
  RunReport report = new_report();
  report.time_us = static_cast<double>(steady_now() - begin) * 1e-3;
  for (std::int32_t rank = 0; rank < plan().topo().world(); ++rank) report.tasks += cuda->tasks(rank);
  report.network_bytes = world->cuda->network_bytes(cuda) - bytes_before;
  if (trace) {
    if (Status added = add_cuda_trace(report); !added.ok()) return added.error();
  }
  return report;
}

// One bar per rank and role, from the first task that was taken to the last: kernels keep no more.
Status Operator::Impl::add_cuda_trace(RunReport& report) {
  std::vector<DeviceTimes> times(static_cast<std::size_t>(plan().topo().world()));
  std::uint64_t zero = ~std::uint64_t{0};
  for (std::int32_t rank = 0; rank < plan().topo().world(); ++rank) {
    if (!world->runs(rank)) continue;
    Result<DeviceTimes> of_rank = world->cuda->times(cuda, rank);
    if (!of_rank.ok()) return of_rank.error();
    times[static_cast<std::size_t>(rank)] = *of_rank;
    zero = std::min(zero, of_rank->start);
  }
  const auto micros = [&](std::uint64_t t) { return static_cast<double>(t - zero) * 1e-3; };
  for (std::int32_t rank = 0; rank < plan().topo().world(); ++rank) {
    if (!world->runs(rank)) continue;
    const DeviceTimes& t = times[static_cast<std::size_t>(rank)];
    report.trace.push_back({"kernel", rank, kRoleCount, micros(t.start), micros(t.end)});
    for (int role = 0; role < kRoleCount; ++role) {
      if (t.first[role] == 0) continue;
      const std::string name = std::string(role_name(static_cast<Role>(role))) + ", first to last task taken";
      report.trace.push_back({name, rank, role, micros(t.first[role]), micros(std::max(t.first[role], t.last[role]))});
    }
  }
  return Ok{};
}

Result<RunReport> Operator::Impl::run_host(std::span<const Arguments> arguments, bool trace) {
  if (world->failure().happened()) return world->failure().later_error();
  std::unique_lock<std::mutex> traced(trace_mutex, std::defer_lock);
  const std::int32_t ranks = plan().topo().world();
  auto log = std::make_shared<RunLog>(ranks, world->options.sms, trace);
  if (trace) {
    traced.lock();
    host->set_trace(log);
  }
  const std::int64_t bytes_before = host->network_bytes.load(std::memory_order_relaxed);
  const Nanos begin = steady_now();
  Status status = world->executor->launch_all(host, arguments, log);
  const bool started = status.ok() || world->failure().happened();
  for (std::int32_t rank = 0; started && rank < ranks; ++rank) {
    // Also after a failure, since other ranks' threads may still be at work on the caller's memory.
    const Status waited = world->executor->wait(host, rank);
    if (status.ok() && !waited.ok()) status = waited;
  }
  if (trace) host->set_trace(nullptr);
  if (!status.ok()) return status.error();
  RunReport report = new_report();
  report.time_us = static_cast<double>(*std::max_element(log->end_ns.begin(), log->end_ns.end()) - begin) * 1e-3;
  report.tasks = log->tasks.load(std::memory_order_relaxed);
  report.network_bytes = host->network_bytes.load(std::memory_order_relaxed) - bytes_before;
  if (trace) report.trace = to_trace(*log, plan(), world->options.sms);
  return report;
}

Result<RunReport> Operator::Impl::run_sim(std::span<const Arguments> arguments, bool trace) {
  std::lock_guard<std::mutex> lock(sim_mutex);
  if (world->failure().happened()) return world->failure().later_error();
  SimOptions options;
  options.topo = world->topo;
  options.sms = world->options.sms;
  options.cost = cost_model(world->options);
  options.partition = partition;
  options.seed = world->options.seed;
  options.fused = fused;
  options.trace = trace;
  options.ring_depth = world->options.ring_depth;
  options.deadline_s = world->options.deadline_s;
  options.warn_s = world->options.warn_s;
  options.inject.start_epoch = world->hooks.start_epoch + sim_epochs;
  const PlanSource* const operators[] = {source.get()};
  const SimCall calls[] = {{0, {arguments.begin(), arguments.end()}}};
  SimReport sim = simulate(options, operators, calls);
  ++sim_epochs;
  if (world->options.on_warning) {
    for (const std::string& warning : sim.warnings) world->options.on_warning(warning);
  }
  if (sim.error) {
    world->fail(*sim.error);
    return *sim.error;
  }
  RunReport report = new_report();
  report.time_us = static_cast<double>(sim.time_ns) * 1e-3;
  report.tasks = sim.tasks;
  report.network_bytes = sim.network_bytes;
  if (!sim.partitions.empty()) report.partition = sim.partitions[0];
  report.trace = std::move(sim.trace);
  return report;
}

Status Operator::Impl::check_rank(int rank) const {
  if (host == nullptr && cuda == nullptr) {
    return bad_argument("launch() and wait() need a world on Device::kHost or kCuda; on Device::kSim use run()");
  }
  return world->check_rank(rank);
}

// Makes ready what runs it: one of the executors.
Status Operator::Impl::create(bool any_layout) {
  if (world->executor) return create_host();
  if (world->cuda) return create_cuda(any_layout);
  if (world->sim_operators.fetch_add(1) >= kMaxOperatorsPerWorld) {
    return bad_argument(fmt::format(
        "this world has made {} operators, and no world can make more: create another world", kMaxOperatorsPerWorld));
  }
  partition = partition_for(world->options, plan(), cost_model(world->options).role_costs());
  return Ok{};
}

namespace {

// Before a spec is made: the world is sound, and all processes ask for the same.
template <class Options>
Status begin_create(World::Impl& world, const Options& options) {
  if (world.failure().happened()) return world.failure().later_error();
  if (!world.group) return Ok{};
  return world.group->agree("create an operator", describe(options));
}

}  // namespace

Result<Operator> Operator::create(World& world, const GemmOptions& options) {
  const std::shared_ptr<World::Impl>& owner = world.impl();
  if (Status status = begin_create(*owner, options); !status.ok()) return status.error();
  const Result<PlanSpec> spec =
      owner->cuda ? make_gpu_gemm_spec(owner->topo, options, owner->plan_sms) : make_gemm_spec(owner->topo, options);
  if (!spec.ok()) return spec.error();
  auto impl = std::make_shared<Impl>(owner, options.fused, *spec);
  if (Status status = impl->create(options.any_layout); !status.ok()) return status.error();
  return Operator(std::move(impl));
}

Result<Operator> Operator::create(World& world, const AttentionOptions& options) {
  const std::shared_ptr<World::Impl>& owner = world.impl();
  if (Status status = begin_create(*owner, options); !status.ok()) return status.error();
  const Result<PlanSpec> spec =
      owner->cuda ? make_gpu_attention_spec(owner->topo, options) : make_attention_spec(owner->topo, options);
  if (!spec.ok()) return spec.error();
  auto impl = std::make_shared<Impl>(owner, options.fused, *spec);
  if (Status status = impl->create(false); !status.ok()) return status.error();
  return Operator(std::move(impl));
}

Result<Operator> Operator::create(World& world, const AttentionBackwardOptions& options) {
  const std::shared_ptr<World::Impl>& owner = world.impl();
  if (Status status = begin_create(*owner, options); !status.ok()) return status.error();
  if (owner->cuda) {
    return Error{ErrorKind::kUnsupported,
                 "ring_attention_backward has no kernel for GPUs yet: take Device::kHost or Device::kSim"};
  }
  if (!options.fused) {
    return Error{ErrorKind::kUnsupported,
                 "fused is false: ring_attention_backward runs fused only; `mkernel sim` shows what that gains"};
  }
  const Result<PlanSpec> spec = make_backward_spec(owner->topo, options);
  if (!spec.ok()) return spec.error();
  auto impl = std::make_shared<Impl>(owner, true, *spec);
  if (Status status = impl->create(false); !status.ok()) return status.error();
  return Operator(std::move(impl));
}

Operator::Operator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Operator::Operator(Operator&&) noexcept = default;
Operator& Operator::operator=(Operator&&) noexcept = default;
Operator::~Operator() = default;

MatrixShape Operator::a_shape(int rank) const {
  if (rank < 0 || rank >= impl_->plan().topo().world()) return {};
  const Plan::Extent extent = impl_->plan().a_extent(rank);
  return {extent.rows, extent.cols};
}

MatrixShape Operator::b_shape(int rank) const {
  if (rank < 0 || rank >= impl_->plan().topo().world()) return {};
  const Plan::Extent extent = impl_->plan().b_extent(rank);
  return {extent.rows, extent.cols};
}

MatrixShape Operator::c_shape(int rank) const {
  if (rank < 0 || rank >= impl_->plan().topo().world()) return {};
  const Plan::Extent extent = impl_->plan().c_extent(rank);
  return {extent.rows, extent.cols};
}

std::int64_t Operator::workspace_bytes() const { return impl_->new_report().workspace_bytes; }

std::int64_t Operator::q_tokens(int rank) const {
  if (rank < 0 || rank >= impl_->plan().topo().world()) return 0;
  return impl_->plan().spec().attention.q_split(impl_->plan().topo()).tokens(rank);
}

std::int64_t Operator::kv_tokens(int rank) const {
  if (rank < 0 || rank >= impl_->plan().topo().world()) return 0;
  return impl_->plan().spec().attention.k_split(impl_->plan().topo()).tokens(rank);
}

template <class Given>
Result<RunReport> Operator::Impl::run(std::span<const Given> arguments, bool trace) {
  if (Status status = check_kind<Given>(plan()); !status.ok()) return status.error();
  if (world->group) {
    if (arguments.size() != 1) {
      return bad_argument(fmt::format(
          "{} sets of matrices are given: each process of a world gives those of its own rank", arguments.size()));
    }
    return run_processes(arguments[0], check_rank_arguments(plan(), world->group->rank(), arguments[0]), trace);
  }
  if (Status status = check_arguments(plan(), arguments); !status.ok()) return status.error();
  const std::vector<Arguments> all(arguments.begin(), arguments.end());
  if (cuda != nullptr) return run_cuda(all, trace);
  return host != nullptr ? run_host(all, trace) : run_sim(all, trace);
}

template <class Given>
Status Operator::Impl::launch(int rank, const Given& arguments, void* stream) {
  if (Status status = check_kind<Given>(plan()); !status.ok()) return status;
  if (Status status = check_rank(rank); !status.ok()) return status;
  if (Status status = check_rank_arguments(plan(), rank, arguments); !status.ok()) return status;
  if (cuda != nullptr) return world->cuda->launch(cuda, rank, arguments, stream, kAllParts);
  if (stream != nullptr) return bad_argument("stream is given: only Device::kCuda has streams");
  if (world->group && !fused) {
    return Error{ErrorKind::kUnsupported,
                 "fused is false, and the processes of a world meet between the two phases: call run(), not launch()"};
  }
  return world->executor->launch(host, rank, arguments);
}

Result<RunReport> Operator::run(std::span<const GemmArguments> arguments, bool trace) {
  return impl_->run(arguments, trace);
}
Result<RunReport> Operator::run(std::span<const AttentionArguments> arguments, bool trace) {
  return impl_->run(arguments, trace);
}
Result<RunReport> Operator::run(std::span<const AttentionBackwardArguments> arguments, bool trace) {
  return impl_->run(arguments, trace);
}
Status Operator::launch(int rank, const GemmArguments& arguments, void* stream) {
  return impl_->launch(rank, arguments, stream);
}
Status Operator::launch(int rank, const AttentionArguments& arguments, void* stream) {
  return impl_->launch(rank, arguments, stream);
}
Status Operator::launch(int rank, const AttentionBackwardArguments& arguments, void* stream) {
  return impl_->launch(rank, arguments, stream);
}

Status Operator::wait(int rank) {
  if (Status status = impl_->check_rank(rank); !status.ok()) return status;
  if (impl_->cuda != nullptr) return impl_->world->cuda->wait(impl_->cuda, rank);
  return impl_->world->executor->wait(impl_->host, rank);
}

}  // namespace mkernel
