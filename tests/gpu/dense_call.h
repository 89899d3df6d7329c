// For tests: the dense matrices of one call in the memory of GPUs, with any elements.
#pragma once
#include <array>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/half.h"
#include "tests/gpu/gpu_problem.h"

namespace mkernel {

inline constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};

using Elements = std::vector<std::uint16_t>;

inline Elements random_elements(const MatrixShape& shape, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Elements elements(static_cast<std::size_t>(shape.rows * shape.cols));
  for (std::uint16_t& e : elements) e = float_to_bf16(normal(random));
  return elements;
}

// The dense matrices of one call on all ranks, in memory of `world`.
class DenseCall {
 public:
  DenseCall(World& world, const Operator& op) : world_(world) {
    for (int rank = 0; rank < world.size(); ++rank) {
      shapes_.push_back({op.a_shape(rank), op.b_shape(rank), op.c_shape(rank)});
      GemmArguments& arguments = arguments_.emplace_back();
      Matrix* const matrices[] = {&arguments.a, &arguments.b, &arguments.c};
      for (std::size_t i = 0; i < 3; ++i) {
        const MatrixShape& shape = shapes_.back()[i];
        *matrices[i] = Matrix::row_major(world.allocate(rank, bytes(shape)).value(), shape.rows, shape.cols);
      }
    }
  }
  ~DenseCall() {
    for (int rank = 0; rank < world_.size(); ++rank) {
      const GemmArguments& arguments = of(rank);
      for (const Matrix* m : {&arguments.a, &arguments.b, &arguments.c}) world_.release(rank, m->data);
    }
  }
  DenseCall(const DenseCall&) = delete;
  DenseCall& operator=(const DenseCall&) = delete;

  static std::int64_t bytes(const MatrixShape& shape) { return shape.rows * shape.cols * 2; }
  const std::vector<GemmArguments>& arguments() const { return arguments_; }
  const GemmArguments& of(int rank) const { return arguments_[static_cast<std::size_t>(rank)]; }
  const MatrixShape& a_shape(int rank) const { return shapes_[static_cast<std::size_t>(rank)][0]; }
  const MatrixShape& b_shape(int rank) const { return shapes_[static_cast<std::size_t>(rank)][1]; }
  const MatrixShape& c_shape(int rank) const { return shapes_[static_cast<std::size_t>(rank)][2]; }

  // Fills some of a matrix' rows with a NaN that no product gives.
  void poison_rows(int rank, const Matrix& m, std::int64_t first, std::int64_t count) {
    const Elements bad(static_cast<std::size_t>(count * m.cols), 0xffff);
    auto* const data = static_cast<std::uint16_t*>(m.data) + first * m.row_stride;
    ASSERT_TRUE(world_.copy(rank, data, bad.data(), static_cast<std::int64_t>(bad.size()) * 2).ok());
  }
  void write(int rank, const Matrix& to, const Elements& from) {
    ASSERT_TRUE(world_.copy(rank, to.data, from.data(), static_cast<std::int64_t>(from.size()) * 2).ok());
  }
  Elements read_rows(int rank, const Matrix& from, std::int64_t first, std::int64_t count) {
    Elements rows(static_cast<std::size_t>(count * from.cols));
    const auto* data = static_cast<const std::uint16_t*>(from.data) + first * from.row_stride;
    EXPECT_TRUE(world_.copy(rank, rows.data(), data, static_cast<std::int64_t>(rows.size()) * 2).ok());
    return rows;
  }
  Elements c(int rank) { return read_rows(rank, of(rank).c, 0, of(rank).c.rows); }

 private:
  World& world_;
  std::vector<std::array<MatrixShape, 3>> shapes_;
  std::vector<GemmArguments> arguments_;
};

inline World make_world(const WorldOptions& options) {
  Result<World> world = World::create(options);
  if (!world.ok()) throw std::runtime_error(world.error().message);
  return std::move(*world);
}
inline Operator make_operator(World& world, const GemmOptions& options) {
  Result<Operator> op = Operator::create(world, options);
  if (!op.ok()) throw std::runtime_error(op.error().message);
  return std::move(*op);
}

// Runs that take minutes are asked for with MKERNEL_LONG in the environment.
inline bool is_long_run() { return std::getenv("MKERNEL_LONG") != nullptr; }

}  // namespace mkernel
