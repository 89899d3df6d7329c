#include "exec/host/host_operator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "plan/flag_init.h"

namespace mkernel {
namespace {

constexpr std::size_t kHeapAlign = 256;

// Fills a rank's zeroed heap with what it holds before the first call.
void init_heap(const HostOperatorConfig& config, std::int32_t rank, std::byte* data) {
  const Plan& plan = config.source->plan();
  if (config.workspace_fill) {
    const auto flag_bytes = static_cast<std::size_t>(2 * std::int64_t{plan.flag_count()} * 4);
    std::memset(data, *config.workspace_fill, static_cast<std::size_t>(HeapLayout(plan).bytes()));
    std::memset(data, 0, flag_bytes);
  }
  init_flags(*config.source, rank, config.start_epoch, reinterpret_cast<std::uint32_t*>(data));
}

std::vector<HeapBlock> make_heaps(const HostOperatorConfig& config) {
  if (config.own_rank >= 0) {
    init_heap(config, config.own_rank, config.heaps[config.own_rank]);
    return {};
  }
  const HeapLayout layout(config.source->plan());
  const std::int32_t world = config.source->plan().topo().world();
  std::vector<HeapBlock> heaps;
  heaps.reserve(world);
  for (std::int32_t rank = 0; rank < world; ++rank) {
    heaps.emplace_back(layout.bytes());
    init_heap(config, rank, heaps.back().data());
  }
  return heaps;
}

std::vector<std::byte*> pointers(const HostOperatorConfig& config, const std::vector<HeapBlock>& heaps) {
  if (config.own_rank >= 0) return config.heaps;
  std::vector<std::byte*> result;
  for (const HeapBlock& heap : heaps) result.push_back(heap.data());
  return result;
}

std::int64_t window_offset(const Plan& plan) { return HeapLayout(plan).bytes(); }

}  // namespace

std::int64_t host_heap_bytes(const Plan& plan) {
  const PlanSpec& spec = plan.spec();
  const bool window = spec.op == Op::kGemmAllReduce && spec.topo.gpus > 1;
  const std::int64_t bytes = window_offset(plan) + (window ? spec.m * spec.n * dtype_bytes(spec.dtype) : 0);
  return std::max<std::int64_t>(bytes, 1);
}

HeapBlock::HeapBlock(std::int64_t bytes)
    // calloc takes large blocks from the kernel, zeroed and not yet resident: what is never used costs nothing.
    : block_(static_cast<std::byte*>(std::calloc(static_cast<std::size_t>(bytes) + kHeapAlign, 1))) {
  if (!block_) throw std::bad_alloc();
  void* at = block_.get();
  std::size_t space = static_cast<std::size_t>(bytes) + kHeapAlign;
  data_ = static_cast<std::byte*>(std::align(kHeapAlign, static_cast<std::size_t>(bytes), at, space));
  MK_CHECK(data_ != nullptr);
}

void HeapBlock::Free::operator()(std::byte* block) const { std::free(block); }

HostOperator::HostOperator(std::uint32_t number, const HostOperatorConfig& config)
    : number_(number),
      config_(config),
      servers_(config.partition, config.source->plan()),
      heaps_(make_heaps(config)),
      memory_(config.source->plan(), pointers(config, heaps_)),
      windows_(config.own_rank >= 0 && plan().spec().op == Op::kGemmAllReduce && plan().topo().gpus > 1) {
  for (int r = 0; r < kRoleCount; ++r) {
    role_begin_[r] = lanes_per_rank_;
    lanes_per_rank_ += static_cast<std::size_t>(plan().lanes(static_cast<Role>(r)));
  }
  const std::int32_t world = plan().topo().world();
  lanes_ = std::make_unique<Lane[]>(lanes_per_rank_ * world);
  progress_ = std::make_unique<Progress[]>(world);
  scratch_.reserve(static_cast<std::size_t>(world) * config_.sms);
  for (std::int32_t rank = 0; rank < world; ++rank) {
    for (int r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      for (std::int32_t l = 0; l < plan().lanes(role); ++l) lane(rank, role, l).count = source().count(rank, role, l);
    }
    const bool here = config_.own_rank < 0 || config_.own_rank == rank;
    for (int sm = 0; here && sm < config_.sms; ++sm) scratch_.push_back(make_scratch(plan()));
    for (std::uint64_t parity = 0; windows_ && parity < 2; ++parity) {
      if (memory_.heap(rank) != nullptr) memory_.bind(rank, parity, GemmArguments{{}, {}, window(rank)});
    }
  }
}

Matrix HostOperator::window(std::int32_t rank) const {
  const PlanSpec& spec = plan().spec();
  return Matrix::row_major(memory_.heap(rank) + window_offset(plan()), spec.m, spec.n);
}

void HostOperator::bind(std::int32_t rank, std::uint64_t epoch, const Arguments& arguments) {
  if (!windows_) return memory_.bind(rank, epoch, arguments);
  const auto& gemm = std::get<GemmArguments>(arguments);
  memory_.bind(rank, epoch, GemmArguments{gemm.a, gemm.b, window(rank)});
}

void HostOperator::deliver(std::int32_t rank, const Arguments& arguments) const {
  const Dtype dtype = plan().spec().dtype;
  const Matrix from = window(rank);
  const Matrix& to = std::get<GemmArguments>(arguments).c;
  const OutMatrix out{static_cast<std::byte*>(to.data), dtype, to.rows, to.cols, to.row_stride, to.col_stride};
  if (to.rows == 0 || to.cols == 0) return;
  copy_tile({static_cast<const std::byte*>(from.data), dtype, from.rows, from.cols, from.row_stride, 1}, &out, 1);
}

bool HostOperator::met(std::int32_t rank, const Wait& wait, std::uint64_t epoch) const {
  const std::uint32_t target = use_of_epoch(epoch) * wait.count;
  for (std::uint32_t i = 0; i < wait.span; ++i) {
    // order: the bytes that the flag vouches for; pairs with Sm::signal() and HostLanding::stamp().
    const std::uint32_t value = flag(rank, layout().flag_index(wait.flag + i, epoch)).load(std::memory_order_acquire);
    if (!flag_reached(value, target)) return false;
  }
  return true;
}

void HostOperator::start(std::int32_t rank, std::uint64_t ticket) {
  std::int64_t tasks = 0;
  std::int64_t first_phase = 0;
  for (int r = 0; r < kRoleCount; ++r) {
    const auto role = static_cast<Role>(r);
    for (std::int32_t l = 0; l < plan().lanes(role); ++l) {
      tasks += lane(rank, role, l).count;
      if (in_first_phase(role)) first_phase += lane(rank, role, l).count;
    }
  }
  progress_[rank].unfinished.store(tasks, std::memory_order_relaxed);
  progress_[rank].first_phase.store(first_phase, std::memory_order_relaxed);
  for (std::size_t i = 0; i < lanes_per_rank_; ++i) {
    // order: whoever takes a task of this call sees the counts above; pairs with Sm::take_from().
    lanes_[lane_begin(rank, Role::kCompute) + i].head.store(ticket << 32, std::memory_order_release);
  }
}

bool HostOperator::gate_open(std::uint64_t turn) const {
  const std::uint64_t target = (turn / 2 + 1) * static_cast<std::uint64_t>(plan().topo().world());
  // order: what the first phase of all ranks has written; pairs with open_gate().
  return gates_[turn & 1].load(std::memory_order_acquire) >= target;
}

bool HostOperator::gate_reached(std::uint64_t turn) const {
  const std::uint64_t before = turn / 2 * static_cast<std::uint64_t>(plan().topo().world());
  return gates_[turn & 1].load(std::memory_order_acquire) > before;  // order: pairs with open_gate()
}

bool HostOperator::open_gate(std::uint64_t turn, std::int32_t ranks) {
  const auto more = static_cast<std::uint64_t>(ranks);
  const std::uint64_t target = (turn / 2 + 1) * static_cast<std::uint64_t>(plan().topo().world());
  // order: our rank's first phase, which we have acquired through its counters; pairs with gate_open().
  return gates_[turn & 1].fetch_add(more, std::memory_order_acq_rel) + more >= target;
}

void HostOperator::set_trace(std::shared_ptr<RunLog> log) {
  std::lock_guard<std::mutex> lock(trace_mutex_);
  trace_ = std::move(log);
  tracing_.store(trace_ != nullptr, std::memory_order_relaxed);
}

std::shared_ptr<RunLog> HostOperator::trace() const {
  // order: none. A trace is set before its call is launched, and whoever works on that call has acquired the launch.
  if (!tracing_.load(std::memory_order_relaxed)) return nullptr;
  std::lock_guard<std::mutex> lock(trace_mutex_);
  return trace_;
}

}  // namespace mkernel
