#include "bench/cluster_ways.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "bench/compute_only.h"
#include "exec/cuda/cuda_operator.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/cuda/support_kernels.h"
#include "ops/gemm_spec.h"

namespace mkernel::bench {
namespace {

// A stream takes about a thousand commands ahead; beyond it launching waits for the GPU.
constexpr int kMostCalls = 60;
constexpr int kMostChunkedCalls = 16;        // each has some 28 commands
constexpr int kMoversBesideGemm[] = {2, 4};  // CTAs of communication under the GEMM of another chunk

// What the executor has no parameter for: fewer CTAs than the rank has SMs, or another partition.
struct DirectLaunch {
  std::uint32_t parts = kAllParts;
  int ctas = 0;
  int compute_ctas = 0;
};
Status launch_direct(CudaOperator* op, std::int32_t rank, const GemmArguments& arguments, cudaStream_t stream,
                     const DirectLaunch& how) {
  auto& impl = static_cast<CudaOperatorImpl&>(*op);
  Result<CudaOperatorImpl::Launch> launch = impl.prepare(rank, arguments, how.parts);
  if (!launch.ok()) return launch.error();
  cudaError_t status = launch_repack(launch->copy_a, launch->copy_b, stream, Overlap::kNone);
  launch->call.compute_ctas = how.compute_ctas;
  launch->kernel.kernel<<<static_cast<unsigned>(how.ctas), kThreads,
                          static_cast<std::size_t>(launch->kernel.shared_bytes), stream>>>(launch->call);
  if (status == cudaSuccess) status = cudaGetLastError();
  if (status != cudaSuccess) return cuda_error(status, fmt::format("launching a part of a call on rank {}", rank));
  return Ok{};
}

Status record(const TimedEvent& event, cudaStream_t stream) {
  const cudaError_t status = cudaEventRecord(event.get(), stream);
  if (status != cudaSuccess) return cuda_error(status, "recording an event of a benchmark");
  return Ok{};
}
Status await(const TimedEvent& event, cudaStream_t stream) {
  const cudaError_t status = cudaStreamWaitEvent(stream, event.get(), 0);
  if (status != cudaSuccess) return cuda_error(status, "ordering two streams of a benchmark");
  return Ok{};
}

// Calls each step until one fails.
template <class... Steps>
Status in_turn(Steps... steps) {
  std::optional<Error> error;
  const auto call = [&](auto& step) {
    if (error) return;
    if (Status status = step(); !status.ok()) error = status.error();
  };
  (call(steps), ...);
  if (error) return *error;
  return Ok{};
}

}  // namespace

ClusterWays::~ClusterWays() {
  const Status status = session_.settle("the end of a benchmark");  // direct launches are unknown to the executor
  (void)status;                                                     // there is nobody left to tell
  for (CudaOperator* op : operators_) executor_.remove_operator(op);
}

Status ClusterWays::on_all_ranks(const std::function<Status(std::int32_t)>& f) {
  for (std::int32_t r = 0; r < world(); ++r) {
    if (Status status = f(r); !status.ok()) return status;
  }
  return Ok{};
}

// --- operators ---

Result<CudaOperator*> ClusterWays::add_operator(std::shared_ptr<const PlanSource> source, const Partition& partition) {
  CudaOperatorConfig config;
  config.source = std::move(source);
  config.partition = partition;
  Result<CudaOperator*> op = executor_.add_operator(config);
  if (!op.ok()) return op.error();
  ++session_.operators_made;
  operators_.push_back(*op);
  return *op;
}

Status ClusterWays::call_twice(CudaOperator* op, const std::function<GemmArguments(std::int32_t)>& arguments,
                               const char* what) {
  for (int parity = 0; parity < 2; ++parity) {
    Status launched =
        on_all_ranks([&](std::int32_t r) { return executor_.launch(op, r, arguments(r), at(r).stream, kAllParts); });
    if (!launched.ok()) return launched;
    if (Status status = session_.settle(what); !status.ok()) return status;
  }
  return Ok{};
}

Status ClusterWays::make_fused(const Partition& partition) {
  Result<CudaOperator*> op = add_operator(source_, partition);
  if (!op.ok()) return op.error();
  fused_ = *op;
  return call_twice(
      fused_, [&](std::int32_t r) { return data_.arguments(r); }, "the first calls of the fused operator");
}

Status ClusterWays::remake_fused(const Partition& partition) {
  if (Status status = session_.settle("another partition"); !status.ok()) return status;
  executor_.remove_operator(fused_);
  operators_.erase(std::find(operators_.begin(), operators_.end(), fused_));
  return make_fused(partition);
}

Status ClusterWays::prepare() {
  if (Status status = make_fused(problem_.partition); !status.ok()) return status;
  Result<CudaOperator*> alone =
      add_operator(std::make_shared<ComputeOnlySource>(source_->plan()), Partition{sms(), 0, 0});
  if (!alone.ok()) return alone.error();
  compute_only_ = *alone;
  Status called = call_twice(
      compute_only_, [&](std::int32_t r) { return data_.arguments(r); }, "the first calls of our GEMM alone");
  if (!called.ok()) return called;
  return make_chunks();
}

Status ClusterWays::make_chunks() {
  const Split split{problem_.gemm.m, kChunks};
  std::vector<std::int64_t> c_rows(static_cast<std::size_t>(world()), 0);
  for (int j = 0; j < kChunks && split.size(j) > 0; ++j) {
    Chunk chunk;
    chunk.first = split.begin(j);
    chunk.rows = split.size(j);
    GemmOptions gemm = problem_.gemm;
    gemm.m = chunk.rows;
    Result<PlanSpec> spec = make_gpu_gemm_spec(problem_.topo, gemm, sms());
    if (!spec.ok()) return spec.error();
    chunk.source = std::make_shared<PlanSource>(Plan(*spec));
    chunk.c_rows = c_rows;
    for (std::int32_t r = 0; r < world(); ++r) {
      c_rows[static_cast<std::size_t>(r)] += chunk.source->plan().c_extent(r).rows;
    }
    Result<CudaOperator*> op = add_operator(chunk.source, Partition{});
    if (!op.ok()) return op.error();
    chunk.op = *op;
    chunks_.push_back(std::move(chunk));
    const Chunk& added = chunks_.back();
    Status called = call_twice(
        added.op, [&](std::int32_t r) { return chunk_arguments(added, r); }, "the first calls of a chunk");
    if (!called.ok()) return called;
  }
  return Ok{};
}

GemmArguments ClusterWays::chunk_arguments(const Chunk& chunk, std::int32_t rank) const {
  return data_.part_arguments(chunk.source->plan(), rank, chunk.first, chunk.c_rows[static_cast<std::size_t>(rank)]);
}

std::vector<CPiece> ClusterWays::chunk_pieces() const {
  std::vector<CPiece> pieces;
  for (const Chunk& chunk : chunks_) {
    const Plan& plan = chunk.source->plan();
    for (std::int32_t r = 0; r < world(); ++r) {
      const bool scattered = problem_.gemm.op == Op::kGemmReduceScatter;
      const std::int64_t row = chunk.first + (scattered ? plan.spec().row_split().begin(r) : 0);
      pieces.push_back({r, chunk.c_rows[static_cast<std::size_t>(r)], row, plan.c_extent(r).rows});
    }
  }
  return pieces;
}

// --- parts of calls ---

Status ClusterWays::launch_fused(std::int32_t rank, std::uint32_t parts) {
  return executor_.launch(fused_, rank, data_.arguments(rank), at(rank).stream, parts);
}

Status ClusterWays::call_fused_with(int movers) {
  return on_all_ranks([&](std::int32_t r) {
    return launch_direct(fused_, r, data_.arguments(r), at(r).stream, {kAllParts, sms(), sms() - movers});
  });
}

// What is left of a call when somebody else has done the GEMM.
Status ClusterWays::communicate(std::int32_t rank) {
  if (!gathers()) {
    Status raised = executor_.launch_signals(fused_, rank, data_.arguments(rank), at(rank).stream);
    if (!raised.ok()) return raised;
  }
  return launch_fused(rank, kPartMoves | kPartLast);
}

Status ClusterWays::communicate_chunk(const Chunk& chunk, std::int32_t rank, int ctas) {
  const GemmArguments arguments = chunk_arguments(chunk, rank);
  if (!gathers()) {
    if (Status raised = executor_.launch_signals(chunk.op, rank, arguments, at(rank).urgent); !raised.ok()) {
      return raised;
    }
  }
  return launch_direct(chunk.op, rank, arguments, at(rank).urgent, {kPartMoves | kPartLast, ctas, 0});
}

// cuBLAS on the ranks' own streams; behind each chunk its communication on the urgent ones, on few SMs while more
// chunks follow. The next call begins when all of this one is complete, as one after the other does.
Status ClusterWays::call_chunked(int movers) {
  Status computed = on_all_ranks([&](std::int32_t r) {
    if (Status status = await(at(r).call_done, at(r).stream); !status.ok()) return status;
    for (std::size_t j = 0; j < chunks_.size(); ++j) {
      Status status = in_turn([&] { return data_.cublas(r, chunks_[j].first, chunks_[j].rows); },
                              [&] { return record(at(r).chunk_done[j], at(r).stream); });
      if (!status.ok()) return status;
    }
    return Status(Ok{});
  });
  if (!computed.ok()) return computed;
  for (std::size_t j = 0; j < chunks_.size(); ++j) {
    const bool last = j + 1 == chunks_.size();
    Status moved = on_all_ranks([&](std::int32_t r) {
      return in_turn([&] { return await(at(r).chunk_done[j], at(r).urgent); },
                     [&] { return communicate_chunk(chunks_[j], r, last ? sms() : movers); });
    });
    if (!moved.ok()) return moved;
  }
  return on_all_ranks([&](std::int32_t r) { return record(at(r).call_done, at(r).urgent); });
}

// The other way round: the first chunk's communication has all SMs.
Status ClusterWays::call_chunked_gather(int movers) {
  Status begun = on_all_ranks([&](std::int32_t r) { return await(at(r).call_done, at(r).urgent); });
  if (!begun.ok()) return begun;
  for (std::size_t j = 0; j < chunks_.size(); ++j) {
    Status moved = on_all_ranks([&](std::int32_t r) {
      return in_turn([&] { return communicate_chunk(chunks_[j], r, j == 0 ? sms() : movers); },
                     [&] { return record(at(r).chunk_done[j], at(r).urgent); });
    });
    if (!moved.ok()) return moved;
  }
  return on_all_ranks([&](std::int32_t r) {
    for (std::size_t j = 0; j < chunks_.size(); ++j) {
      Status status = in_turn([&] { return await(at(r).chunk_done[j], at(r).stream); },
                              [&] { return data_.cublas(r, chunks_[j].first, chunks_[j].rows); });
      if (!status.ok()) return status;
    }
    return record(at(r).call_done, at(r).stream);
  });
}

// --- the list ---

std::vector<Contestant> ClusterWays::contestants() {
  std::vector<Contestant> list;
  const auto add = [&](const std::string& name, std::function<Status(std::int32_t)> on_rank) -> Contestant& {
    Contestant c;
    c.name = name;
    c.call = [this, on_rank = std::move(on_rank)] { return on_all_ranks(on_rank); };
    c.most_calls = kMostCalls;
    list.push_back(std::move(c));
    return list.back();
  };
  add(kOurGemm, [this](std::int32_t r) {
    return executor_.launch(compute_only_, r, data_.arguments(r), at(r).stream, kPartCompute | kPartLast);
  });
  add(kCublasGemm, [this](std::int32_t r) { return cublas(r); });
  Contestant& moves = add(kCommunication, [this](std::int32_t r) { return communicate(r); });
  if (!gathers()) moves.pieces = data_.whole();

  Contestant& sequential = add(kSequential, [this](std::int32_t r) {
    if (gathers()) return in_turn([&] { return communicate(r); }, [&] { return cublas(r); });
    return in_turn([&] { return cublas(r); }, [&] { return communicate(r); });
  });
  if (!gathers()) sequential.pieces = data_.whole();

  Contestant& ours = add(kOurSequential, [this](std::int32_t r) {
    const std::uint32_t first = gathers() ? kPartMoves : kPartCompute;
    return in_turn([&] { return launch_fused(r, first); },
                   [&] { return launch_fused(r, (kPartCompute | kPartMoves) ^ first | kPartLast); });
  });
  ours.pieces = data_.whole();

  for (const int movers : kMoversBesideGemm) {
    if (chunks_.size() < 2) break;  // with one row there is nothing to overlap
    Contestant c;
    c.name = fmt::format("chunked overlap, {} SMs move", movers);
    c.call = [this, movers] { return gathers() ? call_chunked_gather(movers) : call_chunked(movers); };
    c.start = [this] { return on_all_ranks([&](std::int32_t r) { return record(at(r).call_done, at(r).stream); }); };
    c.ends_urgent = !gathers();
    c.most_calls = kMostChunkedCalls;
    if (!gathers()) c.pieces = chunk_pieces();
    list.push_back(std::move(c));
  }
  Contestant& fused = add(kFused, [this](std::int32_t r) { return launch_fused(r, kAllParts); });
  fused.pieces = data_.whole();
  fused.must_be_right = true;
  return list;
}

}  // namespace mkernel::bench
