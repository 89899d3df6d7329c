// The table of what is refused before anything starts, and with which words.
#include <gtest/gtest.h>

#include <climits>
#include <cstdint>
#include <functional>
#include <limits>

#include "ops/check_arguments.h"
#include "ops/gemm_spec.h"
#include "ops/test_problem.h"
#include "ops/test_world.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

using test::failed;
using test::make_operator;
using test::make_world;
using test::Problem;
using test::small_tiles;
using test::succeeded;
using test::world_of;

struct BadArguments {
  const char* what;
  std::function<void(std::vector<GemmArguments>&)> damage;
  std::vector<std::string> words;
};

TEST(Arguments, BadMatricesAreRefusedByNameBeforeAnythingStarts) {
  const GemmOptions options = small_tiles(Op::kGemmAllReduce, 20, 12, 10, Dtype::kFp32);
  World world = make_world(world_of(2, 1));
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, 2, 1);
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const auto shifted = [](void* data, std::ptrdiff_t bytes) { return static_cast<std::byte*>(data) + bytes; };
  const BadArguments table[] = {
      {"too few", [](auto& v) { v.pop_back(); }, {"arguments has 1 entries", "2 ranks"}},
      {"too many", [](auto& v) { v.push_back(v[0]); }, {"arguments has 3 entries", "2 ranks"}},
      {"none", [](auto& v) { v.clear(); }, {"arguments has 0 entries"}},
      {"A rows", [](auto& v) { v[1].a.rows = 21; }, {"rank 1: A is 21 x 5", "must be 20 x 5"}},
      {"A cols", [](auto& v) { v[0].a.cols = 10; }, {"rank 0: A is 20 x 10", "must be 20 x 5"}},
      {"B transposed", [](auto& v) { std::swap(v[0].b.rows, v[0].b.cols); }, {"rank 0: B is 12 x 5", "5 x 12"}},
      {"C negative rows", [](auto& v) { v[1].c.rows = -20; }, {"rank 1: C is -20 x 12", "20 x 12"}},
      {"A null", [](auto& v) { v[0].a.data = nullptr; }, {"rank 0: A has no data", "20 x 5"}},
      {"B null", [](auto& v) { v[1].b.data = nullptr; }, {"rank 1: B has no data"}},
      {"C null", [](auto& v) { v[1].c.data = nullptr; }, {"rank 1: C has no data"}},
      {"A row stride", [](auto& v) { v[0].a.row_stride = -5; }, {"rank 0: A has strides -5 and 1", "0 or more"}},
      {"B col stride", [](auto& v) { v[0].b.col_stride = -1; }, {"rank 0: B has strides 12 and -1"}},
      {"C row stride 0", [](auto& v) { v[1].c.row_stride = 0; }, {"rank 1: C has strides 0 and 1", "same place"}},
      {"C row stride short", [](auto& v) { v[1].c.row_stride = 11; }, {"rank 1: C has strides 11 and 1", "12 or more"}},
      {"C col stride 0", [](auto& v) { v[1].c.col_stride = 0; }, {"rank 1: C has strides 12 and 0"}},
      {"C interleaved",
       [](auto& v) {
         v[1].c = {v[1].c.data, 20, 12, 2, 3};
       },
       {"rank 1: C has strides 2 and 3"}},
      {"A unaligned", [&](auto& v) { v[0].a.data = shifted(v[0].a.data, 2); }, {"rank 0: A starts at", "4 bytes"}},
      {"C unaligned", [&](auto& v) { v[0].c.data = shifted(v[0].c.data, 1); }, {"rank 0: C starts at", "fp32"}},
      {"A stride huge", [&](auto& v) { v[0].a.row_stride = kHuge; }, {"rank 0: A has strides", "beyond all addresses"}},
      {"B stride huge", [&](auto& v) { v[0].b.col_stride = kHuge / 4; }, {"rank 0: B has strides", "beyond"}},
      {"C = A", [](auto& v) { v[0].c.data = v[0].a.data; }, {"rank 0: C shares memory with A of rank 0"}},
      {"C = B of another", [](auto& v) { v[0].c.data = v[1].b.data; }, {"rank 0: C shares memory with B of rank 1"}},
      {"C = C", [](auto& v) { v[1].c.data = v[0].c.data; }, {"C shares memory with C of rank"}},
      {"C meets C", [&](auto& v) { v[1].c.data = shifted(v[0].c.data, 19 * 48); }, {"C shares memory with C of rank"}},
  };
  for (const BadArguments& bad : table) {
    std::vector<GemmArguments> arguments = problem.arguments();
    bad.damage(arguments);
    const std::vector<std::byte> before = problem.output_bytes();
    EXPECT_TRUE(failed(gemm.run(arguments), ErrorKind::kBadArgument, bad.words)) << bad.what;
    EXPECT_EQ(problem.output_bytes(), before) << bad.what;
  }
  std::vector<GemmArguments> arguments = problem.arguments();
  arguments[1].c.data = arguments[1].a.data;
  EXPECT_TRUE(
      failed(gemm.launch(1, arguments[1]), ErrorKind::kBadArgument, {"rank 1: C shares memory with A of rank 1"}));
  EXPECT_TRUE(failed(gemm.launch(0, arguments[1]), ErrorKind::kBadArgument, {"rank 0"}));
  EXPECT_TRUE(failed(gemm.launch(2, arguments[1]), ErrorKind::kBadArgument, {"rank is 2", "0 to 1"}));
  EXPECT_TRUE(failed(gemm.launch(-1, arguments[1]), ErrorKind::kBadArgument, {"rank is -1", "0 to 1"}));
  EXPECT_TRUE(failed(gemm.wait(2), ErrorKind::kBadArgument, {"rank is 2"}));
  EXPECT_EQ(gemm.a_shape(2), MatrixShape{});
  // After all that the world is as good as new.
  ASSERT_TRUE(succeeded(gemm.run(problem.arguments())));
  EXPECT_TRUE(problem.is_exact());
}

TEST(Arguments, OutputsSideBySideInOneMatrixAreAccepted) {
  const std::int64_t m = 20, n = 12;
  const GemmOptions options = small_tiles(Op::kAllGatherGemm, m, n, 8);
  const Result<PlanSpec> spec = make_gemm_spec({1, 3}, options);
  ASSERT_TRUE(succeeded(spec));
  std::vector<std::uint16_t> c(m * n), a(m * 8), b(8 * n);
  std::vector<GemmArguments> arguments;
  for (int rank = 0; rank < 3; ++rank) {
    const MatrixShape s{Plan(*spec).a_extent(rank).rows, 8};
    arguments.push_back(
        {Matrix::row_major(a.data(), s.rows, 8), Matrix::row_major(b.data(), 8, 4), {c.data() + 4 * rank, m, 4, n, 1}});
  }
  EXPECT_TRUE(succeeded(check_arguments(Plan(*spec), arguments)));  // inputs may well be shared
  arguments[2].c.data = c.data() + 7;
  EXPECT_TRUE(failed(check_arguments(Plan(*spec), arguments), ErrorKind::kBadArgument, {"shares memory"}));
  for (int rank = 0; rank < 3; ++rank) arguments[rank].c = {c.data() + 4 * rank * m, m, 4, 1, m};
  EXPECT_TRUE(succeeded(check_arguments(Plan(*spec), arguments)));
  arguments[1].c.data = c.data() + 4 * m - 1;
  EXPECT_TRUE(failed(check_arguments(Plan(*spec), arguments), ErrorKind::kBadArgument, {"shares memory"}));
}

TEST(Arguments, NullPointersAndZeroSizesAreValid) {
  World world = make_world(world_of(2, 2));
  for (const Op op : test::kOps) {
    for (const auto& [m, n, k] : {std::tuple<int, int, int>{0, 0, 0}, {0, 5, 5}, {5, 0, 5}}) {
      Operator gemm = make_operator(world, small_tiles(op, m, n, k));
      std::vector<std::uint16_t> some(100);
      std::vector<GemmArguments> arguments(4);
      for (int rank = 0; rank < 4; ++rank) {
        const auto matrix = [&](MatrixShape s) {
          return Matrix::row_major(s.rows * s.cols == 0 ? nullptr : some.data(), s.rows, s.cols);
        };
        arguments[rank] = {matrix(gemm.a_shape(rank)), matrix(gemm.b_shape(rank)), matrix(gemm.c_shape(rank))};
      }
      EXPECT_TRUE(succeeded(gemm.run(arguments))) << m << " " << n << " " << k;
    }
  }
}

struct BadOptions {
  std::function<void(GemmOptions&)> damage;
  std::vector<std::string> words;
};

TEST(Arguments, BadOperatorsAreRefusedByName) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const BadOptions table[] = {
      {[](auto& o) { o.op = static_cast<Op>(7); }, {"op is 7", "gemm_all_reduce"}},
      {[](auto& o) { o.dtype = static_cast<Dtype>(9); }, {"dtype is 9", "bf16", "fp16", "fp32"}},
      {[](auto& o) { o.m = -1; }, {"m is -1", "0 or more"}},
      {[](auto& o) { o.n = -7; }, {"n is -7", "0 or more"}},
      {[](auto& o) { o.k = std::numeric_limits<std::int64_t>::min(); }, {"k is -9223372036854775808"}},
      {[](auto& o) { o.m = kHuge; }, {"m is 9223372036854775807", "2^55"}},
      {[](auto& o) { o.m = o.n = o.k = std::int64_t{1} << 40; }, {"2^55"}},
      {[](auto& o) { o.k = o.n = std::int64_t{1} << 30; }, {"B (k x n)"}},
      {[](auto& o) { o.bm = 24; }, {"24 x 16", "powers of two"}},
      {[](auto& o) { o.bn = 2048; }, {"16 x 2048", "powers of two"}},
      {[](auto& o) { o.bm = -16; }, {"bm is -16"}},
      {[](auto& o) { o.band = -1; }, {"band is -1"}},
      {[](auto& o) { o.chunk_tiles = INT_MIN; }, {"chunk_tiles is -2147483648"}},
      {[](auto& o) { o.chunk_rows = 17; }, {"chunk_rows is 17", "multiple of bm = 16"}},
      {[](auto& o) { o.chunk_rows = -16; }, {"chunk_rows is -16"}},
  };
  for (const Device device : {Device::kHost, Device::kSim}) {
    WorldOptions world_options = world_of(2, 1);
    world_options.device = device;
    World world = make_world(world_options);
    for (const BadOptions& bad : table) {
      GemmOptions options = small_tiles(Op::kGemmAllReduce, 20, 12, 10);
      bad.damage(options);
      EXPECT_TRUE(failed(Operator::create(world, options), ErrorKind::kBadArgument, bad.words));
    }
  }
}

TEST(Arguments, MoreMemoryThanThereIsIsRefusedWithBothNumbers) {
  World world = make_world(world_of(2, 1));
  GemmOptions options;
  options.m = options.n = 1 << 16;
  options.k = 64;
  world.impl()->hooks.memory_limit = 1'000'000;
  const Result<Operator> refused = Operator::create(world, options);
  EXPECT_TRUE(failed(refused, ErrorKind::kOutOfMemory, {"gemm_all_reduce", "65536 x 65536", "1000000 are available"}));
  world.impl()->hooks.memory_limit.reset();
  options.m = options.n = std::int64_t{1} << 24;  // 2^48 elements, which no machine has the memory for
  options.bm = options.bn = 1024;
  EXPECT_TRUE(failed(Operator::create(world, options), ErrorKind::kOutOfMemory, {"bytes"}));
}

TEST(Arguments, AWorldMakesSixtyThreeOperatorsAndNoMore) {
  for (const Device device : {Device::kHost, Device::kSim}) {
    WorldOptions world_options = world_of(2, 1, 1);
    world_options.device = device;
    World world = make_world(world_options);
    const GemmOptions options = small_tiles(Op::kAllGatherGemm, 8, 8, 8);
    std::vector<Operator> operators;
    for (int i = 0; i < 63; ++i) operators.push_back(make_operator(world, options));
    EXPECT_TRUE(failed(Operator::create(world, options), ErrorKind::kBadArgument, {"63"}));
    Problem problem(operators[62], options, 2, 1);
    EXPECT_TRUE(succeeded(operators[62].run(problem.arguments())));
    EXPECT_TRUE(problem.is_exact());
  }
}

}  // namespace
}  // namespace mkernel
