// What a fused operator should have computed, in fp64, and how far its fp32 arithmetic may be off, element by element.
// The bound is proved in reference.cc; a result outside of it is wrong, whatever the shape and the world.
#pragma once
#include <cstdint>
#include <limits>
#include <span>

#include "exec/tile_math.h"

namespace mkernel {

// C (M, N) = A (M, K) * B (K, N) as the operators compute it. With split_k, rank r multiplies the r-th part of K (plan/
// topology.h: Split), partials are rounded to `partial`, added within a node in gpu order, rounded to `partial`, added
// in node order, and rounded to `out`. With one GPU per node the partial is the node's sum and is rounded once; with
// one node the sum of the GPUs is not rounded to `partial`. Without split_k there is one product and one rounding.
struct ReferenceSpec {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  int nodes = 1;
  int gpus = 1;
  Dtype in = Dtype::kBf16;
  Dtype partial = Dtype::kBf16;
  Dtype out = Dtype::kBf16;
  bool split_k = true;
  // A product is summed in panels of this many terms, as gemm_tile does; 0: in any order, which gives a wider bound
  // (from 2 * 10^5 terms per rank on so wide that zeros would pass for sums of random signs).
  std::int64_t panel_k = kGemmPanelK;
};

struct CheckReport {
  double max_rel_error = 0;  // ||out - ref||_F / ||ref||_F over the checked rows
  double max_abs_error = 0;
  double worst_ratio = 0;       // the largest |out - ref| / bound; at most 1 when all is well
  std::int64_t worst_row = -1;  // where; -1 when every element is exact
  std::int64_t worst_col = -1;
  std::int64_t checked_rows = 0;
  bool ok = true;        // worst_ratio <= 1
  double rel_bound = 0;  // ||bound||_F / ||ref||_F over the checked rows
};

// Compares `rows` of `out` with fp64; a row may be listed more than once. Takes 4 * N * K * |rows| operations in fp64
// and under 4 MiB of memory.
//
// Where the reference is NaN, out must be NaN; where it is infinite, out must be the same infinity; such elements are
// no part of the norms, and a mismatch counts as an infinite error. Where a sum or a result may exceed its type, the
// infinity (after a sum: also NaN) that follows is accepted, and is no part of the norms either.
CheckReport check_rows(const ReferenceSpec& spec, const ConstMatrix& a, const ConstMatrix& b, const ConstMatrix& out,
                       std::span<const std::int64_t> rows);

}  // namespace mkernel
