// The matrices of all ranks of a virtual cluster, for fused operators and for cuBLAS, and what C must be. .cu files
// only.
#pragma once
#include <string>
#include <vector>

#include "bench/cluster_session.h"
#include "bench/virtual_cluster.h"
#include "plan/plan.h"

namespace mkernel::bench {

// Rows of the whole C, and where a contestant has put them.
struct CPiece {
  std::int32_t rank = 0;
  std::int64_t c_row = 0;  // in the rank's C
  std::int64_t row = 0;    // in the whole C (all_gather_gemm: in the rank's columns of it)
  std::int64_t rows = 0;
};

class ClusterData {
 public:
  // Takes all memory and makes random inputs. `plan` outlives this.
  static Result<std::unique_ptr<ClusterData>> create(ClusterSession& session, const Plan& plan);

  // A rank's arguments for the whole call, and for rows [first, first + rows) of C over all ranks as an operator of its
  // own, whose plan is `part`; its C starts at `c_row` of the rank's.
  GemmArguments arguments(std::int32_t rank) const;
  GemmArguments part_arguments(const Plan& part, std::int32_t rank, std::int64_t first, std::int64_t c_row) const;

  // cuBLAS' share of the work on a rank: rows [first, first + rows) of its partial C, or of its columns of C.
  Status cublas(std::int32_t rank, std::int64_t first, std::int64_t rows);

  // Computes what cuBLAS makes of all of it; later calls of cublas() write the same values.
  Status make_reference();
  // Fills every C with NaN.
  void poison();
  // ||C - reference|| / ||reference||, the largest over the pieces; NaN when one is.
  Result<double> error(const std::vector<CPiece>& pieces);
  // Where the whole operator leaves C.
  std::vector<CPiece> whole() const;
  // Whether all ranks have the same bits; only where all have all of C.
  Result<bool> equal_bits();

 private:
  struct Rank {
    DeviceBuffer a;        // as the operator gets it
    DeviceBuffer a_whole;  // all_gather_gemm: all rows, for cuBLAS
    DeviceBuffer b;
    DeviceBuffer c;
    DeviceBuffer cublas_c;  // a partial C, or the rank's columns of C
  };

  ClusterData(ClusterSession& session, const Plan& plan) : session_(session), plan_(plan) {}
  Status take_memory();
  Status fill();
  bool gathers() const { return plan_.spec().op == Op::kAllGatherGemm; }
  std::int64_t c_elements(std::int32_t rank) const;
  Dtype dtype() const { return plan_.spec().dtype; }

  ClusterSession& session_;
  const Plan& plan_;
  std::vector<Rank> ranks_;
};

}  // namespace mkernel::bench
