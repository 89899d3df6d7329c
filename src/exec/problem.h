// One call's inputs and outputs for all ranks, made from a seed, with the exact result that any executor must give:
// inputs are small integers, so every sum is exact and every rounding is known.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "exec/arguments.h"
#include "exec/tile_math.h"
#include "plan/plan.h"

namespace mkernel {

class Problem {
 public:
  // `padding` elements stand between the rows of every matrix; those of C are checked to stay as they are.
  Problem(const Plan& plan, std::uint64_t seed, std::int64_t padding = 0);

  std::vector<Arguments> arguments();
  std::vector<GemmArguments> matrices();  // the same
  GemmArguments arguments(std::int32_t rank);
  // Nothing when every element of every C has exactly the right bits and no byte beside them has changed; else a
  // sentence about the first that has not.
  std::optional<std::string> mismatch();
  // All bytes of all C, to compare runs.
  const std::vector<std::vector<std::byte>>& outputs() const { return c_; }

 private:
  Matrix view(std::vector<std::byte>& bytes, Plan::Extent extent, std::int64_t row, std::int64_t col,
              std::int64_t stride);
  void expect_row(std::int64_t row, float* expected) const;

  Plan plan_;
  std::int64_t padding_;
  std::int64_t a_stride_;
  std::int64_t b_stride_;
  std::vector<std::byte> a_;  // (M, K), the ranks' parts are views of it
  std::vector<std::byte> b_;  // (K, N)
  std::vector<float> a_values_;
  std::vector<float> b_values_;
  std::vector<float> expected_;            // (M, N), made when first asked for
  std::vector<std::vector<std::byte>> c_;  // by rank
};

}  // namespace mkernel
