// Cases that users of such systems have reported, and guarantees that other tests only touch, on a GPU.
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "base/half.h"
#include "tests/gpu/dense_call.h"

namespace mkernel {
namespace {

// The same inputs for every world of this shape.
void fill_random(DenseCall& call, int size, std::uint32_t seed) {
  std::mt19937 random(seed);
  for (int rank = 0; rank < size; ++rank) {
    call.write(rank, call.of(rank).a, random_elements(call.a_shape(rank), random));
    call.write(rank, call.of(rank).b, random_elements(call.b_shape(rank), random));
  }
}

// Random data, so that another order of sums would show: 5 runs on each of 10 partitions, and the host executor, which
// adds up K in another order, within the rounding of bf16.
TEST(GpuCases, FiftyRunsOnTenPartitionsGiveTheSameBitsAndWhatTheHostGives) {
  SKIP_WITHOUT_GPU();
  for (const Op kind : kOps) {
    const GemmOptions options = gemm(kind, 520, 640, 768);
    WorldOptions host_options;
    host_options.nodes = 2;
    host_options.gpus = 2;
    World host = make_world(host_options);
    Operator host_op = make_operator(host, options);
    DenseCall want(host, host_op);
    fill_random(want, 4, 11);
    ASSERT_TRUE(host_op.run(want.arguments()).ok());

    std::vector<Elements> first;
    for (const Partition& partition : {Partition{16, 0, 0},
                                       {15, 1, 0},
                                       {15, 0, 1},
                                       {14, 1, 1},
                                       {12, 2, 2},
                                       {8, 4, 4},
                                       {4, 6, 6},
                                       {2, 7, 7},
                                       {1, 8, 7},
                                       {0, 8, 8}}) {
      WorldOptions world_options = gpu_options(2, 2);
      world_options.sms = 16;
      world_options.partition = partition;
      World world = make_world(world_options);
      Operator op = make_operator(world, options);
      DenseCall got(world, op);
      fill_random(got, 4, 11);
      for (int run = 0; run < 5; ++run) {
        const Result<RunReport> report = op.run(got.arguments());
        ASSERT_TRUE(report.ok()) << report.error().message;
        for (int rank = 0; rank < 4; ++rank) {
          const Elements bits = got.c(rank);
          if (first.size() <= static_cast<std::size_t>(rank)) first.push_back(bits);
          ASSERT_TRUE(bits == first[static_cast<std::size_t>(rank)])
              << op_name(kind) << ", rank " << rank << ", run " << run << ", partition " << partition.compute << ","
              << partition.intra << "," << partition.recv;
        }
      }
    }
    // Every partial sum and the result are rounded to bf16 once: 5 roundings of 2^-9 of values below `largest`.
    double largest = 0;
    double worst = 0;
    for (int rank = 0; rank < 4; ++rank) {
      const Elements a = want.c(rank);
      const Elements& b = first[static_cast<std::size_t>(rank)];
      ASSERT_EQ(a.size(), b.size());
      for (std::size_t i = 0; i < a.size(); ++i) {
        largest = std::max(largest, std::abs(double{bf16_to_float(a[i])}));
        worst = std::max(worst, std::abs(double{bf16_to_float(a[i])} - double{bf16_to_float(b[i])}));
      }
    }
    EXPECT_LE(worst, 5 * largest / 512) << op_name(kind);
    EXPECT_GT(largest, 50) << op_name(kind);
  }
}

// C has more than 2^31 elements on every rank. Its elements are products of a row's and a column's number.
TEST(GpuCases, MoreThanTwoToThe31Elements) {
  SKIP_WITHOUT_GPU();
  constexpr std::int64_t kK = 64;
  const auto row_value = [](std::int64_t row) { return static_cast<float>(row % 13 - 6); };
  const auto col_value = [](std::int64_t col) { return static_cast<float>(col % 11 - 5); };
  for (const Op kind : kOps) {
    World world = make_world(gpu_options(1, 2));
    const bool gathers = kind == Op::kAllGatherGemm;
    const bool scatters = kind == Op::kGemmReduceScatter;
    const GemmOptions options = gemm(kind, scatters ? 66'000 : 33'000, gathers ? 131'200 : 65'600, kK);
    Operator op = make_operator(world, options);
    DenseCall call(world, op);
    for (int rank = 0; rank < 2; ++rank) {
      // Only the first of the rank's K counts. gather: its rows of A, and its columns of B; else all of both.
      const MatrixShape a_shape = call.a_shape(rank);
      const MatrixShape b_shape = call.b_shape(rank);
      Elements a(static_cast<std::size_t>(a_shape.rows * a_shape.cols));
      Elements b(static_cast<std::size_t>(b_shape.rows * b_shape.cols));
      for (std::int64_t i = 0; i < a_shape.rows; ++i) {
        a[static_cast<std::size_t>(i * a_shape.cols)] = float_to_bf16(row_value(gathers ? rank * 16'500 + i : i));
      }
      for (std::int64_t j = 0; j < b_shape.cols; ++j) {
        b[static_cast<std::size_t>(j)] = float_to_bf16(col_value(gathers ? rank * 65'600 + j : j));
      }
      call.write(rank, call.of(rank).a, a);
      call.write(rank, call.of(rank).b, b);
      ASSERT_GT(call.c_shape(rank).rows * call.c_shape(rank).cols, std::int64_t{1} << 31) << op_name(kind);
    }
    constexpr std::int64_t kRows = 64;  // that are compared, at each of these places
    const auto places = [&](const MatrixShape& c) {
      const std::int64_t middle = (std::int64_t{1} << 31) / c.cols - 8;
      return std::array<std::int64_t, 4>{0, c.rows / 3, middle, c.rows - kRows};
    };
    // The memory may have been another operator's, with the same numbers at the same places.
    for (int rank = 0; rank < 2; ++rank) {
      for (const std::int64_t begin : places(call.c_shape(rank))) {
        call.poison_rows(rank, call.of(rank).c, begin, kRows);
      }
    }
    const Result<RunReport> report = op.run(call.arguments());
    ASSERT_TRUE(report.ok()) << report.error().message;
    for (int rank = 0; rank < 2; ++rank) {
      const MatrixShape c = call.c_shape(rank);
      const std::int64_t row0 = scatters ? rank * c.rows : 0;
      const std::int64_t col0 = gathers ? rank * c.cols : 0;
      for (const std::int64_t begin : places(c)) {
        const Elements rows = call.read_rows(rank, call.of(rank).c, begin, kRows);
        for (std::int64_t i = 0; i < kRows; ++i) {
          const float times = (gathers ? 1.0f : 2.0f) * row_value(row0 + begin + i);
          for (std::int64_t j = 0; j < c.cols; ++j) {
            const float got = bf16_to_float(rows[static_cast<std::size_t>(i * c.cols + j)]);
            ASSERT_EQ(got, times * col_value(col0 + j))
                << op_name(kind) << ", rank " << rank << ", row " << begin + i << ", column " << j;
          }
        }
      }
    }
  }
}

// A NaN in one row of one rank's A: that row of C is NaN everywhere, and no other element.
TEST(GpuCases, ANanStaysInItsRow) {
  SKIP_WITHOUT_GPU();
  constexpr std::int64_t kRow = 37;
  for (const Op kind : kOps) {
    World world = make_world(gpu_options(2, 2));
    Operator op = make_operator(world, gemm(kind, 128, 256, 256));
    DenseCall call(world, op);
    fill_random(call, 4, 5);
    const int sick = kind == Op::kAllGatherGemm ? 1 : 2;  // gather: rank 1 has rows 32 to 63
    const std::int64_t local = kind == Op::kAllGatherGemm ? kRow - 32 : kRow;
    const std::uint16_t nan = 0x7fc1;
    auto* const at = static_cast<std::uint16_t*>(call.of(sick).a.data) + local * call.of(sick).a.row_stride + 3;
    ASSERT_TRUE(world.copy(sick, at, &nan, 2).ok());
    ASSERT_TRUE(op.run(call.arguments()).ok());
    for (int rank = 0; rank < 4; ++rank) {
      const MatrixShape shape = call.c_shape(rank);
      const std::int64_t row0 = kind == Op::kGemmReduceScatter ? rank * shape.rows : 0;
      const Elements c = call.c(rank);
      for (std::int64_t i = 0; i < shape.rows; ++i) {
        for (std::int64_t j = 0; j < shape.cols; ++j) {
          ASSERT_EQ(std::isnan(bf16_to_float(c[static_cast<std::size_t>(i * shape.cols + j)])), row0 + i == kRow)
              << op_name(kind) << ", rank " << rank << ", row " << row0 + i << ", column " << j;
        }
      }
    }
  }
}

// Big, small, big on one world, with guards around every C.
TEST(GpuCases, ShapesTakeTurnsOnOneWorld) {
  SKIP_WITHOUT_GPU();
  World world = make_world(gpu_options(2, 2));
  for (const Op kind : kOps) {
    const GemmOptions shapes[] = {gemm(kind, 1000, 1032, 520), gemm(kind, 9, 24, 16), gemm(kind, 640, 2048, 328)};
    std::vector<Operator> ops;
    for (GemmOptions options : shapes) {
      options.any_layout = true;
      ops.push_back(make_operator(world, options));
    }
    for (int round = 0; round < 30; ++round) {
      const auto i = static_cast<std::size_t>(round) % 3;
      GpuProblem problem(world, shapes[i], static_cast<std::uint64_t>(round), 3);
      const Result<RunReport> report = ops[i].run(problem.arguments());
      ASSERT_TRUE(report.ok()) << report.error().message;
      ASSERT_EQ(problem.mismatch(), std::nullopt) << op_name(kind) << ", round " << round;
    }
  }
}

TEST(GpuCases, OddSizesInEveryCombination) {
  SKIP_WITHOUT_GPU();
  int made = 0;
  std::optional<World> world;
  constexpr int kSizes[] = {1, 7, 127, 129, 255, 4095};
  for (const int m : kSizes) {
    for (const int n : kSizes) {
      for (const int k : kSizes) {
        if (made % 60 == 0) {  // a world makes at most 63 operators
          world.reset();
          world.emplace(make_world(gpu_options(made % 120 == 0 ? 2 : 3, made % 120 == 0 ? 3 : 1)));
        }
        // The reference is made on the host: not too much of it.
        if (std::int64_t{m} * n * k > std::int64_t{200} << 20) continue;
        EXPECT_EQ(run_once(*world, gemm(kOps[made++ % 3], m, n, k)), "") << m << " x " << n << " x " << k;
      }
    }
  }
}

// A rank that is late but alive is waited for: 3 s, or 60 s of the 600 s that waits have by default. The others are
// reported as late once each, which is no error.
TEST(GpuCases, ALateRankIsWaitedFor) {
  SKIP_WITHOUT_GPU();
  WorldOptions options = gpu_options(2, 2);
  options.deadline_s = 600;
  options.warn_s = is_long_run() ? 30 : 1;
  std::mutex mutex;
  std::vector<std::string> warnings;
  options.on_warning = [&](const std::string& warning) {
    std::lock_guard<std::mutex> lock(mutex);
    warnings.push_back(warning);
  };
  World world = make_world(options);
  for (const Op kind : kOps) {
    const GemmOptions shape = gemm(kind, 256, 512, 128);
    Operator op = make_operator(world, shape);
    GpuProblem problem(world, shape, 3);
    for (const int rank : {0, 1, 3}) {
      ASSERT_TRUE(op.launch(rank, problem.arguments()[static_cast<std::size_t>(rank)]).ok());
    }
    std::this_thread::sleep_for(std::chrono::seconds(is_long_run() ? 60 : 3));
    ASSERT_TRUE(op.launch(2, problem.arguments()[2]).ok());
    for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(op.wait(rank).ok());
    EXPECT_EQ(problem.mismatch(), std::nullopt) << op_name(kind);
    std::lock_guard<std::mutex> lock(mutex);
    ASSERT_EQ(warnings.size(), 3u) << op_name(kind);
    for (const std::string& warning : warnings) EXPECT_NE(warning.find("it fails after 600.0 s"), std::string::npos);
    warnings.clear();
  }
}

// After a failure a new world works, and nothing of the old one stays in memory. 16 MiB per rank are tolerated, which
// the driver takes and gives back as it likes: over the 1000 cycles of a long run, 16 KiB per cycle.
TEST(GpuCases, WorldsFailAndNewOnesWorkOverAndOver) {
  SKIP_WITHOUT_GPU();
  std::int64_t free_at_first = 0;
  const int cycles = is_long_run() ? 1000 : 50;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    World world = make_world(gpu_options(2, 2));
    const Op kind = kOps[cycle % 3];
    const GemmOptions shape = gemm(kind, 512, 512, 256);
    ASSERT_EQ(run_once(world, shape), "");
    const std::int64_t free = world.impl()->cuda->free_memory();
    if (cycle == 5) free_at_first = free;
    if (cycle > 5) {
      EXPECT_NEAR(static_cast<double>(free), static_cast<double>(free_at_first), 16 << 20);
    }
    Operator op = make_operator(world, shape);
    GpuProblem problem(world, shape, 3);
    for (const int rank : {0, 1, 2}) {
      ASSERT_TRUE(op.launch(rank, problem.arguments()[static_cast<std::size_t>(rank)]).ok());
    }
    world.abort("the test says so");
    const auto begin = std::chrono::steady_clock::now();
    for (const int rank : {0, 1, 2}) EXPECT_FALSE(op.wait(rank).ok());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  }
}

}  // namespace
}  // namespace mkernel
