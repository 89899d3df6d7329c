// One plan of any operator: plain data, copied to the device as it is. Every method is O(1) unless it says otherwise.
#pragma once
#include "plan/all_gather_gemm.h"
#include "plan/gemm_all_reduce.h"
#include "plan/gemm_reduce_scatter.h"
#include "plan/ring_attention.h"
#include "plan/ring_attention_backward.h"

namespace mkernel {

class Plan {
  // Calls f with the plan of the operator; stands first because its return type is deduced.
  template <class F>
  MK_HD constexpr auto visit(F f) const {
    switch (spec_.op) {
      case Op::kAllGatherGemm: return f(all_gather_gemm_);
      case Op::kGemmReduceScatter: return f(gemm_reduce_scatter_);
      case Op::kRingAttention: return f(ring_attention_);
      case Op::kRingAttentionBackward: return f(backward_);
      case Op::kGemmAllReduce: break;
    }
    return f(gemm_all_reduce_);
  }

 public:
  constexpr Plan() = default;
  MK_HD explicit constexpr Plan(const PlanSpec& spec) : spec_(spec) {
    switch (spec.op) {
      case Op::kAllGatherGemm: all_gather_gemm_ = AllGatherGemmPlan::make(spec); break;
      case Op::kGemmReduceScatter: gemm_reduce_scatter_ = GemmReduceScatterPlan::make(spec); break;
      case Op::kGemmAllReduce: gemm_all_reduce_ = GemmAllReducePlan::make(spec); break;
      case Op::kRingAttention: ring_attention_ = RingAttentionPlan::make(spec); break;
      case Op::kRingAttentionBackward: backward_ = RingAttentionBackwardPlan::make(spec); break;
    }
  }

  MK_HD constexpr const PlanSpec& spec() const { return spec_; }
  MK_HD constexpr const Topology& topo() const { return spec_.topo; }

  // Flags per rank and parity.
  MK_HD constexpr std::uint32_t flag_count() const {
    return visit([](const auto& p) { return p.flag_count(); });
  }
  // Elements of a workspace buffer, per rank and parity; 0 for the caller's and for buffers that this plan does not
  // use.
  MK_HD constexpr std::int64_t buffer_elements(Buffer buffer) const {
    return visit([=](const auto& p) { return p.buffer_elements(buffer); });
  }
  MK_HD constexpr Dtype buffer_dtype(Buffer buffer) const {
    if (buffer == Buffer::kState || buffer == Buffer::kKeyState || buffer == Buffer::kLse) return Dtype::kFp32;
    const bool partial = buffer == Buffer::kPartial || buffer == Buffer::kNodePartial || buffer == Buffer::kArrival;
    return partial ? spec_.partial : spec_.dtype;
  }
  // When a lane begins in a call that is not fused: phase by phase, each on all ranks when the one before has ended on
  // all. Keys and rows of A come before all arithmetic, sums leave after it.
  MK_HD constexpr int phase(Role role, std::int32_t lane) const {
    if (spec_.op == Op::kRingAttentionBackward) return backward_.phase(role, lane);
    const bool gathers = spec_.op == Op::kAllGatherGemm || spec_.op == Op::kRingAttention;
    return gathers == (role == Role::kCompute) ? 1 : 0;
  }
  // Whether a sum over the node or the rail takes in what `node` has.
  MK_HD constexpr bool adds(std::int32_t rank, const Task& task, std::int32_t node) const {
    return spec_.op != Op::kRingAttentionBackward || backward_.adds(rank, task, node);
  }
  MK_HD constexpr bool is_attention() const { return attends(spec_.op); }
  const RingAttentionPlan& ring_attention() const { return ring_attention_; }
  const RingAttentionBackwardPlan& backward() const { return backward_; }
  // Elements from one row of kGather to the next.
  MK_HD constexpr std::int64_t gather_pitch() const { return all_gather_gemm_.pitch; }

  MK_HD constexpr std::int32_t lanes(Role role) const {
    return visit([=](const auto& p) { return p.lanes(role); });
  }
  // Tasks of a lane. Within a lane tasks are taken in index order.
  MK_HD constexpr std::int64_t count(std::int32_t rank, Role role, std::int32_t lane) const {
    return visit([=](const auto& p) { return p.count(rank, role, lane); });
  }
  MK_HD constexpr Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    return visit([=](const auto& p) { return p.task(rank, role, lane, index); });
  }
  // What must have happened, besides all own tasks, before the call is complete.
  MK_HD constexpr Wait completion(std::int32_t rank) const {
    return visit([=](const auto& p) { return p.completion(rank); });
  }
  MK_HD constexpr FlagName flag_name(std::int32_t rank, std::uint32_t flag) const {
    return visit([=](const auto& p) { return p.flag_name(rank, flag); });
  }
  // The lower bound of the bytes that `rank` sends over the network. O(chunks).
  MK_HD constexpr std::int64_t network_bytes(std::int32_t rank) const {
    return visit([=](const auto& p) { return p.network_bytes(rank); });
  }

  // Shapes of the caller's matrices on a rank.
  struct Extent {
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    bool operator==(const Extent&) const = default;
  };
  MK_HD constexpr Extent a_extent(std::int32_t rank) const {
    if (spec_.op == Op::kAllGatherGemm) return {spec_.row_split().size(rank), spec_.k};
    return {spec_.m, spec_.k_split().size(rank)};
  }
  MK_HD constexpr Extent b_extent(std::int32_t rank) const {
    if (spec_.op == Op::kAllGatherGemm) return {spec_.k, spec_.col_split().size(rank)};
    return {spec_.k_split().size(rank), spec_.n};
  }
  MK_HD constexpr Extent c_extent(std::int32_t rank) const {
    if (spec_.op == Op::kAllGatherGemm) return {spec_.m, spec_.col_split().size(rank)};
    if (spec_.op == Op::kGemmReduceScatter) return {spec_.row_split().size(rank), spec_.n};
    return {spec_.m, spec_.n};
  }
  // The caller's buffer of that name, as the matrix that Blocks count in.
  MK_HD constexpr Extent extent(Buffer buffer, std::int32_t rank) const {
    const AttentionSpec& a = spec_.attention;
    const std::int64_t q_rows = a.batch * a.heads * a.q_split(spec_.topo).tokens(rank);
    switch (buffer) {
      case Buffer::kA: return a_extent(rank);
      case Buffer::kB: return b_extent(rank);
      case Buffer::kQ:
      case Buffer::kO:
      case Buffer::kDo:
      case Buffer::kDq: return {q_rows, a.dim};
      case Buffer::kK:
      case Buffer::kV:
      case Buffer::kDk:
      case Buffer::kDv: return {a.batch * a.kv_heads * a.k_split(spec_.topo).tokens(rank), a.dim};
      case Buffer::kLse: return {q_rows, 1};
      default: return c_extent(rank);
    }
  }
  // The buffers that results go into are one, or three: `i` from 0 on.
  MK_HD constexpr int outputs() const { return spec_.op == Op::kRingAttentionBackward ? 3 : 1; }
  MK_HD constexpr Buffer output(int i = 0) const {
    if (spec_.op == Op::kRingAttention) return Buffer::kO;
    if (spec_.op != Op::kRingAttentionBackward) return Buffer::kC;
    return i == 0 ? Buffer::kDq : i == 1 ? Buffer::kDk : Buffer::kDv;
  }
  // The inner dimension of a rank's GEMM.
  MK_HD constexpr std::int64_t gemm_k(std::int32_t rank) const { return a_extent(rank).cols; }

 private:
  PlanSpec spec_;
  AllGatherGemmPlan all_gather_gemm_;
  GemmReduceScatterPlan gemm_reduce_scatter_;
  GemmAllReducePlan gemm_all_reduce_;
  RingAttentionPlan ring_attention_;
  RingAttentionBackwardPlan backward_;
};

// A send task's number in its command record, and back: lanes are interleaved, so both ways are one division.
struct SendId {
  std::int32_t lane = 0;
  std::int64_t index = 0;
};
MK_HD constexpr std::int64_t send_id(const Plan& plan, SendId id) {
  return id.index * plan.lanes(Role::kSend) + id.lane;
}
MK_HD constexpr SendId send_of(const Plan& plan, std::int64_t id) {
  const std::int32_t lanes = plan.lanes(Role::kSend);
  return {static_cast<std::int32_t>(id % lanes), id / lanes};
}

// How often the parity of `epoch` (counted from 1) has been used, this time included, modulo 2^32 like the flags that
// are compared with it. Epochs have 64 bits: with 32 the use would jump when the epoch wraps.
MK_HD constexpr std::uint32_t use_of_epoch(std::uint64_t epoch) {
  return static_cast<std::uint32_t>((epoch >> 1) + (epoch & 1));
}
// Whether a flag has reached its target; both may have wrapped.
MK_HD constexpr bool flag_reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// The plan as executors and the verifier see it. A test can stand between to damage tasks.
class PlanSource {
 public:
  explicit PlanSource(const Plan& plan) : plan_(plan) {}
  virtual ~PlanSource() = default;
  const Plan& plan() const { return plan_; }
  virtual std::int64_t count(std::int32_t rank, Role role, std::int32_t lane) const {
    return plan_.count(rank, role, lane);
  }
  virtual Task task(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index) const {
    return plan_.task(rank, role, lane, index);
  }
  virtual Wait completion(std::int32_t rank) const { return plan_.completion(rank); }

 private:
  Plan plan_;
};

}  // namespace mkernel
