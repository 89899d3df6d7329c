// A project of its own that uses an installed mKernel: C = A * B over 2 nodes of 2 ranks, all in this process.
//
// gemm_all_reduce divides the inner dimension K: rank r has some columns of A and the same rows of B, and every rank
// gets all of C. The matrices are fp32 and hold small integers, so the result can be checked exactly.
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "mkernel/mkernel.h"

namespace {

constexpr std::int64_t kRows = 96;
constexpr std::int64_t kCols = 80;
constexpr std::int64_t kInner = 64;

float a_value(std::int64_t i, std::int64_t p) { return static_cast<float>((i + 2 * p) % 5 - 2); }
float b_value(std::int64_t p, std::int64_t j) { return static_cast<float>((3 * p + j) % 5 - 2); }

struct RankData {
  std::vector<float> a, b, c;
};

// Parts of A and B for each rank: `k_begin` moves on by the width of the part that the operator asks for.
std::vector<RankData> make_data(const mkernel::Operator& gemm, int world) {
  std::vector<RankData> ranks(static_cast<std::size_t>(world));
  std::int64_t k_begin = 0;
  for (int rank = 0; rank < world; ++rank) {
    RankData& data = ranks[static_cast<std::size_t>(rank)];
    const std::int64_t k_size = gemm.a_shape(rank).cols;
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t p = 0; p < k_size; ++p) data.a.push_back(a_value(i, k_begin + p));
    }
    for (std::int64_t p = 0; p < k_size; ++p) {
      for (std::int64_t j = 0; j < kCols; ++j) data.b.push_back(b_value(k_begin + p, j));
    }
    data.c.assign(static_cast<std::size_t>(kRows * kCols), -1.0f);
    k_begin += k_size;
  }
  return ranks;
}

bool is_product(const std::vector<float>& c) {
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t j = 0; j < kCols; ++j) {
      float want = 0;
      for (std::int64_t p = 0; p < kInner; ++p) want += a_value(i, p) * b_value(p, j);
      if (c[static_cast<std::size_t>(i * kCols + j)] != want) return false;
    }
  }
  return true;
}

int fail(const mkernel::Error& error) {
  std::fprintf(stderr, "%s\n", error.message.c_str());
  return 1;
}

}  // namespace

int main() {
  using mkernel::Matrix;
  mkernel::WorldOptions world_options;
  world_options.nodes = 2;
  world_options.gpus = 2;
  world_options.link = {.gigabytes_per_s = 10, .latency_us = 5};
  mkernel::Result<mkernel::World> world = mkernel::World::create(world_options);
  if (!world.ok()) return fail(world.error());

  mkernel::GemmOptions options;
  options.op = mkernel::Op::kGemmAllReduce;
  options.m = kRows;
  options.n = kCols;
  options.k = kInner;
  options.dtype = mkernel::Dtype::kFp32;
  mkernel::Result<mkernel::Operator> gemm = mkernel::Operator::create(*world, options);
  if (!gemm.ok()) return fail(gemm.error());

  std::vector<RankData> data = make_data(*gemm, world->size());
  std::vector<mkernel::GemmArguments> arguments;
  for (int rank = 0; rank < world->size(); ++rank) {
    RankData& own = data[static_cast<std::size_t>(rank)];
    const std::int64_t k_size = gemm->a_shape(rank).cols;
    arguments.push_back({Matrix::row_major(own.a.data(), kRows, k_size), Matrix::row_major(own.b.data(), k_size, kCols),
                         Matrix::row_major(own.c.data(), kRows, kCols)});
  }
  const mkernel::Result<mkernel::RunReport> report = gemm->run(arguments);
  if (!report.ok()) return fail(report.error());

  for (const RankData& own : data) {
    if (is_product(own.c)) continue;
    std::fprintf(stderr, "a rank has a wrong result\n");
    return 1;
  }
  std::printf("%lld tasks in %.0f us, %lld bytes over the network (at least %lld are needed): all ranks are right\n",
              static_cast<long long>(report->tasks), report->time_us, static_cast<long long>(report->network_bytes),
              static_cast<long long>(report->network_bytes_bound));

  // Errors are values: what cannot work is refused before anything starts, in one sentence.
  arguments[1].a.rows = 7;
  const mkernel::Result<mkernel::RunReport> refused = gemm->run(arguments);
  if (refused.ok() || refused.error().kind != mkernel::ErrorKind::kBadArgument) return 1;
  std::printf("refused as it should be: %s\n", refused.error().message.c_str());
  return 0;
}
