// What happens around calls on a GPU: records after a failure, several worlds, chains of operators, odd payloads.
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "tests/gpu/dense_call.h"

namespace mkernel {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

bool contains(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

TEST(GpuReliability, TheFlightRecordTellsWhatARankDidBeforeAnAbort) {
  SKIP_WITHOUT_GPU();
  World world = make_world(gpu_options(2, 2));
  EXPECT_EQ(world.flight_record(0), "");
  const GemmOptions shapes[] = {gemm(Op::kAllGatherGemm, 256, 512, 128), gemm(Op::kGemmReduceScatter, 512, 256, 192)};
  Operator first = make_operator(world, shapes[0]);
  Operator second = make_operator(world, shapes[1]);
  GpuProblem a(world, shapes[0], 1);
  GpuProblem b(world, shapes[1], 2);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(first.run(a.arguments()).ok());
  ASSERT_TRUE(second.run(b.arguments()).ok());
  for (const int rank : {0, 1, 3}) {
    ASSERT_TRUE(first.launch(rank, a.arguments()[static_cast<std::size_t>(rank)]).ok());
  }
  std::this_thread::sleep_for(milliseconds(20));
  world.abort("enough");
  EXPECT_FALSE(first.wait(0).ok());
  const auto begin = Clock::now();
  const std::string record = world.flight_record(0);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(1));
  for (const char* words :
       {"0.000000 s: complete operator 0 (all_gather_gemm 256 x 512 x 128), epoch 1, took ",
        "complete operator 0 (all_gather_gemm 256 x 512 x 128), epoch 3, took ",
        "complete operator 1 (gemm_reduce_scatter 512 x 256 x 192), epoch 1, took ", " us, compute from ",
        ", send from ", "started operator 0 (all_gather_gemm 256 x 512 x 128), epoch 4, not complete",
        "failed: the world was aborted: enough\n"}) {
    EXPECT_TRUE(contains(record, words)) << words << " is missing in\n" << record;
  }
  EXPECT_FALSE(contains(world.flight_record(2), "epoch 4")) << "rank 2 has launched 3 calls of operator 0";
  EXPECT_EQ(world.flight_record(4), "");
  EXPECT_EQ(world.flight_record(-1), "");
}

TEST(GpuReliability, TheFlightRecordKeepsTheLastThousandAndTwentyFourCalls) {
  SKIP_WITHOUT_GPU();
  World world = make_world(gpu_options(1, 2));
  const GemmOptions shape = gemm(Op::kGemmAllReduce, 64, 64, 64);
  Operator op = make_operator(world, shape);
  GpuProblem problem(world, shape, 1);
  for (int i = 0; i < 1100; ++i) ASSERT_TRUE(op.run(problem.arguments()).ok());
  const auto begin = Clock::now();
  const std::string record = world.flight_record(1);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(1));
  // The place of the call under way is kept for it.
  EXPECT_EQ(std::count(record.begin(), record.end(), '\n'), 1023);
  EXPECT_TRUE(contains(record, ", epoch 78, took "));
  EXPECT_FALSE(contains(record, ", epoch 77, took "));
  EXPECT_TRUE(contains(record, ", epoch 1100, took "));
}

// Two worlds wait on a rank that does not come. They may share SMs: then the second one's kernels begin when the first
// one's have left.
TEST(GpuReliability, TwoWorldsThatWaitAreAbortedOneAfterTheOther) {
  SKIP_WITHOUT_GPU();
  WorldOptions options = gpu_options(2, 1);
  options.sms = 16;
  options.deadline_s = 60;
  World worlds[] = {make_world(options), make_world(options)};
  const GemmOptions shape = gemm(Op::kGemmAllReduce, 256, 256, 128);
  Operator ops[] = {make_operator(worlds[0], shape), make_operator(worlds[1], shape)};
  GpuProblem first(worlds[0], shape, 1);
  GpuProblem second(worlds[1], shape, 2);
  ASSERT_TRUE(ops[0].launch(0, first.arguments()[0]).ok());
  ASSERT_TRUE(ops[1].launch(0, second.arguments()[0]).ok());
  for (int i = 0; i < 2; ++i) {
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(30));
      worlds[i].abort("world " + std::to_string(i));
    });
    const auto begin = Clock::now();
    const Status status = ops[i].wait(0);
    other.join();
    EXPECT_LT(Clock::now() - begin, milliseconds(1030));
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(contains(status.error().message, "world " + std::to_string(i))) << status.error().message;
  }
  World next = make_world(options);
  EXPECT_EQ(run_once(next, shape), "");
}

// Workspaces that begin as garbage of several kinds: huge numbers, flags far ahead and far behind.
TEST(GpuReliability, WhatTheWorkspaceHeldBeforeDoesNotMatter) {
  SKIP_WITHOUT_GPU();
  for (const int fill : {0x7f, 0x80, 0x3f}) {
    for (const std::uint64_t start : {std::uint64_t{0}, (std::uint64_t{1} << 32) - 2}) {
      World world = make_world(gpu_options(2, 2));
      world.impl()->hooks.start_epoch = start;
      world.impl()->hooks.workspace_fill = fill;
      for (const Op kind : kOps) {
        const GemmOptions shape = gemm(kind, 260, 264, 128);
        Operator op = make_operator(world, shape);
        for (std::uint64_t i = 0; i < 3; ++i) {
          GpuProblem problem(world, shape, i);
          const Result<RunReport> report = op.run(problem.arguments());
          ASSERT_TRUE(report.ok()) << report.error().message;
          EXPECT_EQ(problem.mismatch(), std::nullopt) << op_name(kind) << ", filled with " << fill;
        }
      }
    }
  }
}

// --- every bit pattern as payload ---

constexpr std::uint16_t kOne = 0x3f80;
bool is_special(std::uint32_t bits) { return (bits & 0x7f80) == 0x7f80; }  // an infinity or a NaN
float value_of(std::uint32_t bits) { return bf16_to_float(static_cast<std::uint16_t>(bits)); }

// A holds every pattern, row by row; B is the identity. A row with an infinity or a NaN is NaN, all others are A.
TEST(GpuReliability, GatheredRowsMayHoldEveryBitPattern) {
  SKIP_WITHOUT_GPU();
  constexpr int kSize = 256;
  World world = make_world(gpu_options(2, 2));
  Operator op = make_operator(world, gemm(Op::kAllGatherGemm, kSize, kSize, kSize));
  DenseCall call(world, op);
  for (int rank = 0; rank < 4; ++rank) {
    Elements a(kSize / 4 * kSize);
    Elements b(kSize * kSize / 4);
    const std::size_t first = static_cast<std::size_t>(rank) * a.size();
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::uint16_t>(first + i);
    for (int j = 0; j < kSize / 4; ++j) b[static_cast<std::size_t>((rank * kSize / 4 + j) * kSize / 4 + j)] = kOne;
    call.write(rank, call.of(rank).a, a);
    call.write(rank, call.of(rank).b, b);
  }
  for (int run = 0; run < 3; ++run) {
    for (int rank = 0; rank < 4; ++rank) call.poison_rows(rank, call.of(rank).c, 0, kSize);
    ASSERT_TRUE(op.run(call.arguments()).ok());
    for (int rank = 0; rank < 4; ++rank) {
      const Elements c = call.c(rank);
      for (std::uint32_t i = 0; i < kSize; ++i) {
        for (std::uint32_t j = 0; j < kSize / 4; ++j) {
          const std::uint32_t pattern = i * kSize + static_cast<std::uint32_t>(rank) * kSize / 4 + j;
          const float got = value_of(c[i * kSize / 4 + j]);
          if (i == 0x7f || i == 0xff) {
            ASSERT_TRUE(std::isnan(got)) << "pattern " << pattern;
          } else {
            ASSERT_EQ(got, value_of(pattern)) << "pattern " << pattern;
          }
        }
      }
    }
  }
}

// The partial sums of one rank are every pattern, those of the others 0. A column with an infinity or a NaN is NaN, all
// others are the patterns.
TEST(GpuReliability, PartialSumsMayHaveEveryBitPattern) {
  SKIP_WITHOUT_GPU();
  constexpr std::uint32_t kRows = 64;  // M, and each rank's part of K
  constexpr std::uint32_t kCols = 1024;
  for (const Op kind : {Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
    World world = make_world(gpu_options(2, 2));
    Operator op = make_operator(world, gemm(kind, kRows, kCols, 4 * kRows));
    DenseCall call(world, op);
    for (int source = 0; source < 4; ++source) {
      for (int rank = 0; rank < 4; ++rank) {
        Elements a(kRows * kRows);
        Elements b(kRows * kCols);
        for (std::uint32_t i = 0; i < kRows; ++i) a[i * kRows + i] = kOne;
        for (std::uint32_t i = 0; i < b.size() && rank == source; ++i) b[i] = static_cast<std::uint16_t>(i);
        call.write(rank, call.of(rank).a, a);
        call.write(rank, call.of(rank).b, b);
        call.poison_rows(rank, call.of(rank).c, 0, call.c_shape(rank).rows);
      }
      ASSERT_TRUE(op.run(call.arguments()).ok());
      for (int rank = 0; rank < 4; ++rank) {
        const Elements c = call.c(rank);
        const std::uint32_t row0 = kind == Op::kGemmReduceScatter ? static_cast<std::uint32_t>(rank) * kRows / 4 : 0;
        for (std::uint32_t i = 0; i < c.size(); ++i) {
          const std::uint32_t pattern = row0 * kCols + i;
          const float got = value_of(c[i]);
          // Row 31 holds 0x7f80 to 0x7fff, row 63 0xff80 to 0xffff.
          if (is_special(31 * kCols + i % kCols)) {
            ASSERT_TRUE(std::isnan(got)) << op_name(kind) << ", pattern " << pattern;
          } else {
            ASSERT_EQ(got, value_of(pattern)) << op_name(kind) << ", pattern " << pattern;
          }
        }
      }
    }
  }
}

// --- operators that follow each other on the same memory ---

// What a reduce-scatter leaves is what the all-gather behind it sends, round after round without synchronisation. In
// some rounds a rank comes 50 ms later than the others.
class Chain {
 public:
  static constexpr int kM = 128;
  static constexpr int kK = 64;  // N of the first, K of the second
  static constexpr int kN = 64;
  static constexpr int kRanks = 4;
  static constexpr int kPayloads = 3;

  Chain(World& world, int rounds)
      : world_(world),
        rounds_(rounds),
        first_(make_operator(world, gemm(Op::kGemmReduceScatter, kM, kK, kRanks * 8))),
        second_(make_operator(world, gemm(Op::kAllGatherGemm, kM, kN, kK))) {
    std::mt19937 random(1);
    for (Payload& payload : payloads_) make(payload, random);
    for (int rank = 0; rank < kRanks; ++rank) {
      middle_.push_back(new_matrix(rank, kM / kRanks, kK));
      results_.push_back(new_matrix(rank, rounds * kM, kN / kRanks));
    }
  }
  ~Chain() {
    for (const auto& [rank, data] : blocks_) world_.release(rank, data);
  }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  void launch(int rank, int round) {
    const auto r = static_cast<std::size_t>(rank);
    const Payload& payload = payloads_[static_cast<std::size_t>(round % kPayloads)];
    ASSERT_TRUE(first_.launch(rank, {payload.a[r], payload.b[r], middle_[r]}).ok());
    Matrix result = results_[r];
    result.rows = kM;
    result.data = static_cast<std::uint16_t*>(result.data) + std::int64_t{round} * kM * result.cols;
    ASSERT_TRUE(second_.launch(rank, {middle_[r], payload.second_b[r], result}).ok());
  }
  void check() {
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_TRUE(second_.wait(rank).ok());
      Elements got(static_cast<std::size_t>(rounds_) * kM * kN / kRanks);
      const std::int64_t bytes = static_cast<std::int64_t>(got.size()) * 2;
      ASSERT_TRUE(world_.copy(rank, got.data(), results_[static_cast<std::size_t>(rank)].data, bytes).ok());
      for (std::size_t i = 0; i < got.size(); ++i) {
        const std::size_t of_round = i % (kM * kN / kRanks);
        const std::size_t round = i / (kM * kN / kRanks);
        const Payload& payload = payloads_[round % kPayloads];
        const std::size_t row = of_round / (kN / kRanks);
        const std::size_t col = static_cast<std::size_t>(rank) * kN / kRanks + of_round % (kN / kRanks);
        ASSERT_EQ(bf16_to_float(got[i]), payload.expected[row * kN + col]) << "rank " << rank << ", round " << round;
      }
    }
  }

 private:
  struct Payload {
    std::vector<Matrix> a, b, second_b;  // by rank
    std::vector<float> expected;         // (M, N)
  };

  Matrix new_matrix(int rank, std::int64_t rows, std::int64_t cols) {
    void* const data = world_.allocate(rank, rows * cols * 2).value();
    blocks_.push_back({rank, data});
    const Elements bad(static_cast<std::size_t>(rows * cols), 0xffff);
    EXPECT_TRUE(world_.copy(rank, data, bad.data(), rows * cols * 2).ok());
    return Matrix::row_major(data, rows, cols);
  }
  // A part of a (rows, cols) matrix of -1, 0 and 1 for the rank.
  Matrix upload(int rank, const std::vector<int>& whole, int cols, int row0, int rows, int col0, int part_cols) {
    Elements part;
    for (int i = row0; i < row0 + rows; ++i) {
      for (int j = col0; j < col0 + part_cols; ++j) {
        part.push_back(float_to_bf16(static_cast<float>(whole[static_cast<std::size_t>(i * cols + j)])));
      }
    }
    const Matrix made = new_matrix(rank, rows, part_cols);
    EXPECT_TRUE(world_.copy(rank, made.data, part.data(), static_cast<std::int64_t>(part.size()) * 2).ok());
    return made;
  }
  // Every row of A has one element that is not 0, so that nothing is rounded anywhere: |A B| <= 1, |(A B) B'| <= 64.
  void make(Payload& payload, std::mt19937& random) {
    constexpr int kInner = kRanks * 8;
    std::vector<int> a(kM * kInner);
    std::vector<int> b(kInner * kK);
    std::vector<int> c(kK * kN);
    for (int i = 0; i < kM; ++i) {
      const std::size_t place = random() % kInner;
      a[static_cast<std::size_t>(i * kInner) + place] = random() % 2 == 0 ? 1 : -1;
    }
    for (int& x : b) x = static_cast<int>(random() % 3) - 1;
    for (int& x : c) x = static_cast<int>(random() % 3) - 1;
    payload.expected = product(product(a, b, kM, kInner, kK), c, kM, kK, kN);
    for (int rank = 0; rank < kRanks; ++rank) {
      payload.a.push_back(upload(rank, a, kInner, 0, kM, rank * 8, 8));
      payload.b.push_back(upload(rank, b, kK, rank * 8, 8, 0, kK));
      payload.second_b.push_back(upload(rank, c, kN, 0, kK, rank * kN / kRanks, kN / kRanks));
    }
  }
  template <class T>
  static std::vector<float> product(const std::vector<T>& a, const std::vector<int>& b, int m, int k, int n) {
    std::vector<float> result(static_cast<std::size_t>(m * n));
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        float sum = 0;
        for (int l = 0; l < k; ++l) {
          sum += static_cast<float>(a[static_cast<std::size_t>(i * k + l)]) *
                 static_cast<float>(b[static_cast<std::size_t>(l * n + j)]);
        }
        result[static_cast<std::size_t>(i * n + j)] = sum;
      }
    }
    return result;
  }

  World& world_;
  const int rounds_;
  Operator first_;
  Operator second_;
  Payload payloads_[kPayloads];
  std::vector<Matrix> middle_;
  std::vector<Matrix> results_;  // of all rounds, one behind the other
  std::vector<std::pair<int, void*>> blocks_;
};

TEST(GpuReliability, AThousandRoundsOfTwoOperatorsOnTheSameMemory) {
  SKIP_WITHOUT_GPU();
  constexpr int kRounds = 1000;
  World world = make_world(gpu_options(2, 2));
  Chain chain(world, kRounds);
  for (int round = 0; round < kRounds; ++round) {
    const int late = round / 50 % Chain::kRanks;
    for (int rank = 0; rank < Chain::kRanks; ++rank) {
      if (rank != late) chain.launch(rank, round);
    }
    if (round % 50 == 0) std::this_thread::sleep_for(milliseconds(50));
    chain.launch(late, round);
  }
  chain.check();
}

}  // namespace
}  // namespace mkernel
