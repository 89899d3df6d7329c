#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <vector>

#include "exec/reference.h"
#include "ops/test_problem.h"
#include "ops/test_world.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

using test::case_name;
using test::kOps;
using test::kWorlds;
using test::Layout;
using test::make_operator;
using test::make_world;
using test::Problem;
using test::Shape;
using test::small_tiles;
using test::succeeded;
using test::world_of;

// A world that is replaced before it has made as many operators as a world can make.
class Worlds {
 public:
  explicit Worlds(const WorldOptions& options) : options_(options) {}
  World& next() {
    if (!world_ || ++used_ == 60) {
      world_.emplace(make_world(options_));
      used_ = 0;
    }
    return *world_;
  }

 private:
  WorldOptions options_;
  std::optional<World> world_;
  int used_ = 0;
};

void expect_exact(World& world, Shape shape, const GemmOptions& options, std::uint64_t seed, Layout a = {},
                  Layout b = {}, Layout c = {}) {
  Operator gemm = make_operator(world, options);
  Problem problem(gemm, options, world.size(), seed, Fill::kInteger, a, b, c);
  ASSERT_TRUE(succeeded(gemm.run(problem.arguments()))) << case_name(options, shape);
  ASSERT_TRUE(problem.is_exact()) << case_name(options, shape);
}

TEST(HostOperator, ComputesOddShapesExactlyOnEveryWorld) {
  constexpr std::int64_t kSizes[] = {0, 1, 7, 17, 64, 65, 129};
  for (const Shape& shape : kWorlds) {
    Worlds worlds(world_of(shape.nodes, shape.gpus));
    std::uint64_t turn = 0;
    for (const Op op : kOps) {
      for (const std::int64_t m : kSizes) {
        for (const std::int64_t n : kSizes) {
          // Every k and every type with every m and every n, though not with every pair of both.
          const std::int64_t k = kSizes[(turn + turn / 7) % 7];
          const GemmOptions options = small_tiles(op, m, n, k, static_cast<Dtype>(turn % 3));
          expect_exact(worlds.next(), shape, options, ++turn);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(HostOperator, ServesWorldsOfUpToTwentyFourRanks) {
  for (const Shape& shape : {Shape{1, 5}, Shape{2, 3}, Shape{1, 7}, Shape{2, 4}, Shape{3, 3}, Shape{4, 3}, Shape{5, 3},
                             Shape{6, 4}, Shape{12, 2}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    for (const Op op : kOps) {
      for (const std::int64_t m : {7, 129}) expect_exact(world, shape, small_tiles(op, m, 50, 40), 8);
    }
  }
}

TEST(HostOperator, ChoosesATilingThatWorks) {
  for (const Shape& shape : {Shape{1, 2}, Shape{2, 2}, Shape{3, 1}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    for (const Op op : kOps) {
      GemmOptions options;
      options.op = op;
      options.m = 200;
      options.n = 130;
      options.k = 70;
      expect_exact(world, shape, options, 5);
      options.bm = 256;  // taller than the chunk of rows that is chosen otherwise
      expect_exact(world, shape, options, 6);
    }
  }
}

TEST(HostOperator, CopiesChunksOfWideRowsInPieces) {
  for (const Shape& shape : {Shape{1, 3}, Shape{2, 2}, Shape{3, 1}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    // Rows of 16 KiB, of which few make a copy, and 16 a chunk.
    expect_exact(world, shape, small_tiles(Op::kAllGatherGemm, 65, 9, 4096, Dtype::kFp32), 4);
  }
}

TEST(HostOperator, TakesAnyStridesAndBasesAndWritesNothingElse) {
  World world = make_world(world_of(2, 2));
  for (const Op op : kOps) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp32}) {
      const GemmOptions options = small_tiles(op, 65, 33, 40, dtype);
      const Layout odd{false, 3, 1};  // a base that is aligned to one element only, odd strides
      const Layout transposed{true, 5, 3};
      expect_exact(world, {2, 2}, options, 1, odd, transposed, odd);
      expect_exact(world, {2, 2}, options, 2, transposed, odd, transposed);
      expect_exact(world, {2, 2}, options, 3, {}, transposed, {});
    }
  }
}

TEST(HostOperator, RoundsPartialSumsToTheTypeAskedFor) {
  // Three ranks sum 257 ones each. bf16 has 8 bits, so partial sums of 257 become 256 and the result 768; in fp32 they
  // stay, and 771 is rounded to 772.
  for (const Shape& shape : {Shape{1, 3}, Shape{3, 1}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    for (const Op op : {Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
      for (const bool fp32 : {false, true}) {
        GemmOptions options = small_tiles(op, 6, 5, 3 * 257);
        options.fp32_partials = fp32;
        Operator gemm = make_operator(world, options);
        Problem problem(gemm, options, 3, 1, Fill::kZero);
        for (int rank = 0; rank < 3; ++rank) {
          for (auto* matrix : {&problem.a(rank), &problem.b(rank)}) {
            auto* bits = static_cast<std::uint16_t*>(matrix->out().data);
            std::fill_n(bits, matrix->matrix().rows * matrix->matrix().cols, float_to_bf16(1.0f));
          }
        }
        ASSERT_TRUE(succeeded(gemm.run(problem.arguments())));
        EXPECT_EQ(problem.c(1).at(0, 0), fp32 ? 772.0f : 768.0f) << case_name(options, shape);
      }
    }
  }
}

TEST(HostOperator, StaysWithinTheErrorBoundOfItsArithmetic) {
  // One matrix each for the whole world, of which ranks get rows or columns: C of all_gather_gemm lies side by side.
  const std::int64_t m = 100, n = 90, k = 333;
  const Shape shape{2, 2};
  World world = make_world(world_of(shape.nodes, shape.gpus));
  for (const Op op : kOps) {
    const GemmOptions options = small_tiles(op, m, n, k);
    Operator gemm = make_operator(world, options);
    std::vector<std::uint16_t> a(m * k), b(k * n);
    std::vector<std::vector<std::uint16_t>> c(4, std::vector<std::uint16_t>(m * n));
    fill_random({a.data(), Dtype::kBf16, m, k, k, 1}, 1, Fill::kUniform);
    fill_random({b.data(), Dtype::kBf16, k, n, n, 1}, 2, Fill::kUniform);
    std::vector<GemmArguments> arguments;
    for (int rank = 0; rank < 4; ++rank) {
      const std::int64_t row = Split{m, 4}.begin(rank), col = Split{n, 4}.begin(rank), inner = Split{k, 4}.begin(rank);
      const bool gather = op == Op::kAllGatherGemm;
      const auto view = [](std::uint16_t* data, MatrixShape s, std::int64_t pitch) {
        return Matrix{data, s.rows, s.cols, pitch, 1};
      };
      std::uint16_t* out = op == Op::kGemmAllReduce ? c[rank].data() : c[0].data() + (gather ? col : row * n);
      arguments.push_back({view(a.data() + (gather ? row * k : inner), gemm.a_shape(rank), k),
                           view(b.data() + (gather ? col : inner * n), gemm.b_shape(rank), n),
                           view(out, gemm.c_shape(rank), n)});
    }
    ASSERT_TRUE(succeeded(gemm.run(arguments)));
    ReferenceSpec reference;
    reference.m = m;
    reference.n = n;
    reference.k = k;
    reference.nodes = shape.nodes;
    reference.gpus = shape.gpus;
    reference.split_k = op != Op::kAllGatherGemm;
    std::vector<std::int64_t> rows(m);
    for (std::int64_t i = 0; i < m; ++i) rows[i] = i;
    for (int copy = 0; copy < (op == Op::kGemmAllReduce ? 4 : 1); ++copy) {
      const CheckReport report =
          check_rows(reference, {a.data(), Dtype::kBf16, m, k, k, 1}, {b.data(), Dtype::kBf16, k, n, n, 1},
                     {c[copy].data(), Dtype::kBf16, m, n, n, 1}, rows);
      EXPECT_TRUE(report.ok) << op_name(op) << ": " << report.worst_ratio << " of the bound";
      EXPECT_GT(report.max_abs_error, 0) << "a result without any rounding error is no test of the bound";
    }
  }
}

TEST(HostOperator, UnfusedComputesTheSame) {
  for (const Shape& shape : kWorlds) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    for (const Op op : kOps) {
      GemmOptions options = small_tiles(op, 65, 50, 40);
      options.fused = false;
      Operator gemm = make_operator(world, options);
      Problem problem(gemm, options, world.size(), 3);
      for (std::uint64_t run = 0; run < 3; ++run) {
        problem.refill(run);
        ASSERT_TRUE(succeeded(gemm.run(problem.arguments()))) << case_name(options, shape);
        ASSERT_TRUE(problem.is_exact()) << case_name(options, shape);
      }
    }
  }
}

TEST(HostOperator, UnfusedBeginsTheSecondPhaseWhenTheFirstHasEndedEverywhere) {
  World world = make_world(world_of(2, 2));
  for (const Op op : kOps) {
    GemmOptions options = small_tiles(op, 64, 64, 64);
    options.fused = false;
    Operator gemm = make_operator(world, options);
    Problem problem(gemm, options, 4, 3);
    const Result<RunReport> report = gemm.run(problem.arguments(), true);
    ASSERT_TRUE(succeeded(report));
    double compute_begin = 1e18, compute_end = 0, other_begin = 1e18, other_end = 0;
    for (const TraceEvent& event : report->trace) {
      const bool compute = event.name.find("compute") != std::string::npos;
      (compute ? compute_begin : other_begin) = std::min(compute ? compute_begin : other_begin, event.begin_us);
      (compute ? compute_end : other_end) = std::max(compute ? compute_end : other_end, event.end_us);
    }
    if (op == Op::kAllGatherGemm) {
      EXPECT_GE(compute_begin, other_end);
    } else {
      EXPECT_GE(other_begin, compute_end);
    }
  }
}

TEST(HostOperator, GivesTheSameBitsInEveryRunOnEveryPartitionAndNetwork) {
  for (const Op op : kOps) {
    const GemmOptions options = small_tiles(op, 97, 70, 50);
    std::vector<std::byte> first;
    const auto check = [&](const WorldOptions& world_options, int runs) {
      World world = make_world(world_options);
      Operator gemm = make_operator(world, options);
      Problem problem(gemm, options, world.size(), 11, Fill::kUniform);
      for (int run = 0; run < runs; ++run) {
        for (int rank = 0; rank < world.size(); ++rank) problem.c(rank).fill(std::byte{0xff});
        ASSERT_TRUE(succeeded(gemm.run(problem.arguments())));
        if (first.empty()) first = problem.output_bytes();
        ASSERT_EQ(problem.output_bytes(), first) << op_name(op) << ", run " << run;
      }
    };
    WorldOptions world_options = world_of(2, 2, 4);
    check(world_options, 20);
    world_options.device = Device::kSim;
    check(world_options, 2);
    world_options.device = Device::kHost;
    world_options.link = {1.0, 20, true};
    check(world_options, 3);
    world_options.link = {};
    for (int compute = 0; compute <= 4; ++compute) {
      for (int intra = 0; compute + intra <= 4; ++intra) {
        world_options.partition = {compute, intra, 4 - compute - intra};
        check(world_options, 1);
      }
    }
  }
}

// Sums of reals depend on their order, so equal bits say that both executors add in the order that the plan states.
TEST(HostOperator, GivesTheBitsOfTheSimulatorOnRealInputsInEveryWorldAndType) {
  for (const Shape& shape : kWorlds) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      for (const Op op : kOps) {
        for (const std::int64_t m : {97, 15}) {  // shards with tiles of their own, and shards that share them
          const GemmOptions options = small_tiles(op, m, 70, 50, dtype);
          const auto output_of = [&](Device device) {
            WorldOptions world_options = world_of(shape.nodes, shape.gpus);
            world_options.device = device;
            World world = make_world(world_options);
            Operator gemm = make_operator(world, options);
            Problem problem(gemm, options, world.size(), 12, Fill::kUniform);
            EXPECT_TRUE(succeeded(gemm.run(problem.arguments())));
            return problem.output_bytes();
          };
          EXPECT_EQ(output_of(Device::kHost), output_of(Device::kSim)) << case_name(options, shape);
        }
      }
    }
  }
}

TEST(HostOperator, WorksThroughARingOfOneRecordAndOverAnUnorderedLink) {
  for (const Shape& shape : {Shape{2, 2}, Shape{3, 1}, Shape{4, 1}}) {
    for (const bool unordered : {false, true}) {
      for (const int depth : {1, 2}) {
        WorldOptions world_options = world_of(shape.nodes, shape.gpus);
        world_options.ring_depth = depth;
        world_options.link = {0, unordered ? 10.0 : 0.0, unordered};
        World world = make_world(world_options);
        for (const Op op : kOps) {
          GemmOptions options = small_tiles(op, 129, 65, 17);
          options.chunk_tiles = 1;
          expect_exact(world, shape, options, 9);
        }
      }
    }
  }
}

TEST(HostOperator, DoesNotDependOnWhatTheWorkspaceHeldBefore) {
  for (const Shape& shape : {Shape{1, 3}, Shape{2, 2}, Shape{3, 1}}) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    world.impl()->hooks.workspace_fill = 0xff;
    for (const Op op : kOps) {
      for (const std::int64_t m : {2, 65}) expect_exact(world, shape, small_tiles(op, m, 33, 24), 13);
    }
  }
}

TEST(HostOperator, ReportsTheBytesOfThePlanAndItsTasks) {
  for (const Shape& shape : kWorlds) {
    World world = make_world(world_of(shape.nodes, shape.gpus));
    for (const Op op : kOps) {
      const GemmOptions options = small_tiles(op, 65, 50, 40);
      Operator gemm = make_operator(world, options);
      Problem problem(gemm, options, world.size(), 3);
      const Result<RunReport> report = gemm.run(problem.arguments());
      ASSERT_TRUE(succeeded(report));
      EXPECT_EQ(report->network_bytes, report->network_bytes_bound) << case_name(options, shape);
      EXPECT_EQ(report->network_bytes > 0, shape.nodes > 1) << case_name(options, shape);
      EXPECT_GT(report->tasks, 0);
      EXPECT_GT(report->time_us, 0);
      EXPECT_EQ(report->workspace_bytes, gemm.workspace_bytes());
      EXPECT_TRUE(report->trace.empty());
    }
  }
}

TEST(HostOperator, TracesEveryTaskOnceAndEveryWriteOnItsLink) {
  World world = make_world(world_of(2, 2));
  for (const Op op : kOps) {
    const GemmOptions options = small_tiles(op, 65, 50, 40);
    Operator gemm = make_operator(world, options);
    Problem problem(gemm, options, world.size(), 3);
    const Result<RunReport> report = gemm.run(problem.arguments(), true);
    ASSERT_TRUE(succeeded(report));
    EXPECT_EQ(static_cast<std::int64_t>(report->trace.size()), report->tasks);
    std::set<std::string> names;
    std::int64_t links = 0;
    for (const TraceEvent& event : report->trace) {
      names.insert(event.name);
      EXPECT_LE(event.begin_us, event.end_us) << event.name;
      const bool link = event.track >= 1000;
      links += link ? 1 : 0;
      EXPECT_EQ(link, event.name.find("send") != std::string::npos) << event.name;
      if (link) {
        EXPECT_EQ(event.track, 1000 + 1 - event.rank / 2) << event.name;
      } else {
        EXPECT_LT(event.track, 2) << event.name;
      }
    }
    EXPECT_EQ(names.size(), report->trace.size());
    EXPECT_GT(links, 0);
  }
}

TEST(SimOperator, ComputesExactlyAndRefusesLaunch) {
  for (const Shape& shape : {Shape{1, 1}, Shape{2, 2}, Shape{3, 1}}) {
    WorldOptions world_options = world_of(shape.nodes, shape.gpus, 4);
    world_options.device = Device::kSim;
    World world = make_world(world_options);
    for (const Op op : kOps) {
      const GemmOptions options = small_tiles(op, 65, 33, 40);
      Operator gemm = make_operator(world, options);
      Problem problem(gemm, options, world.size(), 3);
      for (std::uint64_t run = 0; run < 3; ++run) {
        problem.refill(run);
        const Result<RunReport> report = gemm.run(problem.arguments());
        ASSERT_TRUE(succeeded(report));
        EXPECT_TRUE(problem.is_exact()) << case_name(options, shape);
        EXPECT_EQ(report->network_bytes, report->network_bytes_bound);
        EXPECT_GT(report->time_us, 0);
      }
      EXPECT_TRUE(test::failed(gemm.launch(0, problem.arguments(0)), ErrorKind::kBadArgument, {"kHost"}));
      EXPECT_TRUE(test::failed(gemm.wait(0), ErrorKind::kBadArgument, {"kHost"}));
    }
  }
}

}  // namespace
}  // namespace mkernel
