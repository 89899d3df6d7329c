// The ways to compute C on a virtual cluster that a benchmark compares: fused, alone, one after the other, in chunks.
// .cu files only.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/cluster_data.h"
#include "bench/cluster_session.h"
#include "bench/virtual_cluster.h"

namespace mkernel::bench {

// One way, on all ranks.
struct Contestant {
  std::string name;
  std::function<Status()> call;   // launches one call of all ranks
  std::function<Status()> start;  // before the first of several calls; may be empty
  bool ends_urgent = false;       // the last work of a call is on the urgent streams, else on the ranks' own
  int most_calls = 0;             // that may be launched ahead
  std::vector<CPiece> pieces;     // of C that it writes; empty: it leaves no C
  bool must_be_right = false;     // else a wrong C is only told
};

class ClusterWays {
 public:
  ClusterWays(ClusterSession& session, const ClusterProblem& problem, std::shared_ptr<const PlanSource> source,
              ClusterData& data)
      : session_(session), executor_(*session.executor), problem_(problem), source_(std::move(source)), data_(data) {}
  // Waits for everything and removes the operators.
  ~ClusterWays();
  ClusterWays(const ClusterWays&) = delete;
  ClusterWays& operator=(const ClusterWays&) = delete;

  // Makes the operators and calls each twice, once for each parity of its workspace. After that partial sums and
  // gathered rows lie there, so that communication alone moves real data and gives the right C.
  Status prepare();
  // In the order of ClusterResult::times.
  std::vector<Contestant> contestants();

  // The fused operator; it can be made anew with another partition.
  const CudaOperator& fused() const { return *fused_; }
  Status remake_fused(const Partition& partition);
  // One fused call on all ranks in which `movers` CTAs of each rank communicate first.
  Status call_fused_with(int movers);

  static constexpr int kMostOperators = 3 + kChunks;  // that one of these makes

 private:
  // Some rows of C, as an operator of its own.
  struct Chunk {
    std::int64_t first = 0;
    std::int64_t rows = 0;
    std::shared_ptr<const PlanSource> source;
    CudaOperator* op = nullptr;
    std::vector<std::int64_t> c_rows;  // by rank: where its C starts in the rank's
  };

  std::int32_t world() const { return problem_.topo.world(); }
  int sms() const { return executor_.sms(); }
  bool gathers() const { return problem_.gemm.op == Op::kAllGatherGemm; }
  ClusterSession::Rank& at(std::int32_t rank) { return session_.ranks[static_cast<std::size_t>(rank)]; }
  Status on_all_ranks(const std::function<Status(std::int32_t)>& f);

  Result<CudaOperator*> add_operator(std::shared_ptr<const PlanSource> source, const Partition& partition);
  Status make_fused(const Partition& partition);
  Status make_chunks();
  Status call_twice(CudaOperator* op, const std::function<GemmArguments(std::int32_t)>& arguments, const char* what);
  GemmArguments chunk_arguments(const Chunk& chunk, std::int32_t rank) const;

  Status launch_fused(std::int32_t rank, std::uint32_t parts);
  Status communicate(std::int32_t rank);
  Status communicate_chunk(const Chunk& chunk, std::int32_t rank, int ctas);
  Status cublas(std::int32_t rank) { return data_.cublas(rank, 0, problem_.gemm.m); }
  Status call_chunked(int movers);
  Status call_chunked_gather(int movers);
  std::vector<CPiece> chunk_pieces() const;

  ClusterSession& session_;
  CudaExecutor& executor_;
  const ClusterProblem& problem_;
  const std::shared_ptr<const PlanSource> source_;
  ClusterData& data_;
  std::vector<CudaOperator*> operators_;
  CudaOperator* fused_ = nullptr;
  CudaOperator* compute_only_ = nullptr;
  std::vector<Chunk> chunks_;
};

}  // namespace mkernel::bench
