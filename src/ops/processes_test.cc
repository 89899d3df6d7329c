// Worlds of several processes, with threads for processes: each has its own World and knows only its own rank, and all
// goes through the bootstrap, shared memory and libfabric as it would between processes. tests/cli has real ones.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>

#include "exec/attention_problem.h"
#include "ops/attention_spec.h"
#include "ops/test_problem.h"
#include "ops/test_world.h"
#include "world/network.h"
#include "world/world_impl.h"

namespace mkernel {
namespace {

using test::kOps;
using test::Problem;

// MKERNEL_NETWORK: these tests also run in the virtual machine with RDMA (scripts/rdma_tests.sh).
std::string network_of_tests() {
  const char* name = std::getenv("MKERNEL_NETWORK");
  return name != nullptr ? name : "libfabric";
}

std::string new_job() {
  static std::atomic<int> count{0};
  return "processes_test " + std::to_string(getpid()) + " " + std::to_string(count++);
}

void for_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

WorldOptions options_of(test::Shape shape, int rank, const std::string& job) {
  WorldOptions options = test::world_of(shape.nodes, shape.gpus);
  options.processes.rank = rank;
  options.processes.size = shape.nodes * shape.gpus;
  options.processes.job = job;
  options.processes.start_s = 20;
  options.processes.network = network_of_tests();
  return options;
}

class ProcessesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string obstacle = network_obstacle(network_of_tests()); !obstacle.empty()) GTEST_SKIP() << obstacle;
  }
};

// The same inputs in one process and in several: every byte of every C is the same, however often it is run.
TEST_F(ProcessesTest, GiveTheSameBitsAsOneProcess) {
  for (const test::Shape shape : {test::Shape{2, 1}, test::Shape{1, 3}, test::Shape{2, 2}, test::Shape{3, 1}}) {
    const int size = shape.nodes * shape.gpus;
    World reference = test::make_world(test::world_of(shape.nodes, shape.gpus));
    for (const Op op_kind : kOps) {
      const Dtype dtype = size == 2 ? Dtype::kFp16 : size == 4 ? Dtype::kBf16 : Dtype::kFp32;
      const GemmOptions gemm = test::small_tiles(op_kind, 75, 83, 61, dtype);
      SCOPED_TRACE(test::case_name(gemm, shape));
      Operator one = test::make_operator(reference, gemm);
      Problem want(one, gemm, size, 3, Fill::kUniform);
      ASSERT_TRUE(test::succeeded(one.run(want.arguments())));
      Problem got(one, gemm, size, 3, Fill::kUniform);
      const std::string job = new_job();
      for_ranks(size, [&](int rank) {
        World world = test::make_world(options_of(shape, rank, job));
        EXPECT_EQ(world.rank(), rank);
        Operator op = test::make_operator(world, gemm);
        for (int run = 0; run < 4; ++run) {
          got.c(rank).clear();
          const GemmArguments arguments[] = {got.arguments(rank)};
          const auto report = op.run(arguments);
          ASSERT_TRUE(test::succeeded(report));
          EXPECT_EQ(report->network_bytes, report->network_bytes_bound);
          EXPECT_EQ(got.c(rank).bytes(), want.c(rank).bytes()) << "rank " << rank << ", run " << run;
        }
      });
    }
  }
}

// Communication and arithmetic one after the other on all processes, in turn with a fused operator: the same bits.
TEST_F(ProcessesTest, UnfusedRunsGiveTheSameBits) {
  for (const test::Shape shape : {test::Shape{1, 3}, test::Shape{2, 2}, test::Shape{3, 1}}) {
    const int size = shape.nodes * shape.gpus;
    World reference = test::make_world(test::world_of(shape.nodes, shape.gpus));
    for (const Op op_kind : kOps) {
      GemmOptions gemm = test::small_tiles(op_kind, 75, 83, 61, Dtype::kBf16);
      SCOPED_TRACE(test::case_name(gemm, shape));
      Operator one = test::make_operator(reference, gemm);
      Problem want(one, gemm, size, 3, Fill::kUniform);
      ASSERT_TRUE(test::succeeded(one.run(want.arguments())));
      Problem got(one, gemm, size, 3, Fill::kUniform);
      const std::string job = new_job();
      for_ranks(size, [&](int rank) {
        World world = test::make_world(options_of(shape, rank, job));
        Operator fused = test::make_operator(world, gemm);
        GemmOptions in_turn = gemm;
        in_turn.fused = false;
        Operator unfused = test::make_operator(world, in_turn);
        for (int run = 0; run < 6; ++run) {
          got.c(rank).clear();
          const GemmArguments arguments[] = {got.arguments(rank)};
          ASSERT_TRUE(test::succeeded((run % 3 == 2 ? fused : unfused).run(arguments)));
          EXPECT_EQ(got.c(rank).bytes(), want.c(rank).bytes()) << "rank " << rank << ", run " << run;
        }
      });
    }
  }
}

TEST_F(ProcessesTest, LaunchesWithoutBarriersAndSeveralOperatorsOnOneWorld) {
  for (const test::Shape shape : {test::Shape{2, 2}, test::Shape{4, 1}}) {
    const int size = shape.nodes * shape.gpus;
    World reference = test::make_world(test::world_of(shape.nodes, shape.gpus));
    const GemmOptions options[] = {test::small_tiles(Op::kGemmAllReduce, 64, 48, 33),
                                   test::small_tiles(Op::kAllGatherGemm, 50, 70, 20),
                                   test::small_tiles(Op::kGemmReduceScatter, 64, 64, 64)};
    std::vector<std::unique_ptr<Problem>> problems;
    for (const GemmOptions& gemm : options) {
      Operator op = test::make_operator(reference, gemm);
      problems.push_back(std::make_unique<Problem>(op, gemm, size, 5));
    }
    const std::string job = new_job();
    for_ranks(size, [&](int rank) {
      World world = test::make_world(options_of(shape, rank, job));
      std::vector<Operator> ops;
      for (const GemmOptions& gemm : options) ops.push_back(test::make_operator(world, gemm));
      for (int round = 0; round < 100; ++round) {
        if (round % 7 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const std::size_t i = static_cast<std::size_t>(round) % ops.size();
        ASSERT_TRUE(test::succeeded(ops[i].launch(rank, problems[i]->arguments(rank))));
      }
      for (Operator& op : ops) ASSERT_TRUE(test::succeeded(op.wait(rank)));
    });
    for (auto& problem : problems) EXPECT_TRUE(problem->is_exact());
  }
}

TEST_F(ProcessesTest, RingAttentionGivesTheSameBitsAsOneProcess) {
  for (const test::Shape shape : {test::Shape{1, 3}, test::Shape{2, 2}, test::Shape{3, 1}}) {
    AttentionOptions options;
    options.dim = 16;
    options.heads = 2;
    options.seq_q = 150;
    options.causal = options.zigzag = true;
    options.bm = 16;
    options.chunk_rows = 11;
    options.slot_rounds = 2;
    AttentionProblem problem(Plan(make_attention_spec({shape.nodes, shape.gpus}, options).value()), 3);
    const std::string job = new_job();
    for_ranks(shape.nodes * shape.gpus, [&](int rank) {
      World world = test::make_world(options_of(shape, rank, job));
      Result<Operator> op = Operator::create(world, options);
      ASSERT_TRUE(test::succeeded(op));
      const AttentionArguments arguments[] = {problem.arguments(rank)};
      for (int run = 0; run < 4; ++run) {
        const auto report = op->run(arguments);
        ASSERT_TRUE(test::succeeded(report));
        EXPECT_EQ(report->network_bytes, report->network_bytes_bound);
      }
    });
    const auto wrong = problem.mismatch();
    EXPECT_FALSE(wrong) << *wrong;
  }
}

TEST_F(ProcessesTest, RanksThatAskForDifferentThingsAreNamedOnAll) {
  const std::string job = new_job();
  for_ranks(3, [&](int rank) {
    World world = test::make_world(options_of({3, 1}, rank, job));
    GemmOptions gemm = test::small_tiles(Op::kGemmAllReduce, 64, 64, rank == 1 ? 65 : 64);
    EXPECT_TRUE(test::failed(Operator::create(world, gemm), ErrorKind::kBadArgument,
                             {"rank 1 asks for gemm_all_reduce of 64 x 64 x 65", "but rank 0 for", "64 x 64 x 64"}));
    // Nothing has failed: the next operator works.
    gemm.k = 64;
    Operator op = test::make_operator(world, gemm);
    Problem problem(op, gemm, 3, 1);
    const GemmArguments bad[] = {rank == 2 ? GemmArguments{} : problem.arguments(rank)};
    EXPECT_TRUE(test::failed(op.run(bad), ErrorKind::kBadArgument, {rank == 2 ? "a" : "rank 2: "}));
    EXPECT_TRUE(test::failed(op.run(problem.arguments()), ErrorKind::kBadArgument, {"3 sets", "its own rank"}));
    EXPECT_TRUE(test::failed(op.launch((rank + 1) % 3, problem.arguments(0)), ErrorKind::kBadArgument,
                             {"another process", "rank " + std::to_string(rank)}));
    const GemmArguments good[] = {problem.arguments(rank)};
    EXPECT_TRUE(test::succeeded(op.run(good)));
  });
  const std::string other = new_job();
  for_ranks(2, [&](int rank) {
    const WorldOptions options = options_of(rank == 0 ? test::Shape{2, 1} : test::Shape{1, 2}, rank, other);
    EXPECT_TRUE(test::failed(World::create(options), ErrorKind::kBadArgument, {"1 nodes with 2", "2 nodes with 1"}));
  });
}

TEST_F(ProcessesTest, WhatCannotRunOverProcessesIsRefusedOnAll) {
  const std::string job = new_job();
  for_ranks(2, [&](int rank) {
    World world = test::make_world(options_of({2, 1}, rank, job));
    GemmOptions gemm = test::small_tiles(Op::kGemmAllReduce, 64, 64, 64);
    gemm.fused = false;
    {
      Operator op = test::make_operator(world, gemm);
      Problem problem(op, gemm, 2, 1);
      EXPECT_TRUE(test::failed(op.launch(rank, problem.arguments(rank)), ErrorKind::kUnsupported, {"call run()"}));
    }
    WorldOptions options = options_of({2, 1}, rank, job);
    options.device = Device::kSim;
    EXPECT_TRUE(test::failed(World::create(options), ErrorKind::kBadArgument, {"Device::kSim"}));
    options = options_of({3, 1}, rank, job);
    options.processes.size = 2;
    EXPECT_TRUE(test::failed(World::create(options), ErrorKind::kBadArgument, {"3 ranks", "2 processes"}));
  });
}

TEST_F(ProcessesTest, ALateRankIsNamedAndANewWorldWorks) {
  const std::string jobs[] = {new_job(), new_job()};
  for (const test::Shape shape : {test::Shape{3, 1}, test::Shape{1, 3}}) {
    for_ranks(3, [&](int rank) {
      const GemmOptions gemm = test::small_tiles(Op::kGemmAllReduce, 64, 64, 64);
      {
        WorldOptions options = options_of(shape, rank, jobs[0]);
        options.deadline_s = 0.7;
        World world = test::make_world(options);
        Operator op = test::make_operator(world, gemm);
        Problem problem(op, gemm, 3, 1);
        if (rank != 1) {
          ASSERT_TRUE(test::succeeded(op.launch(rank, problem.arguments(rank))));
          const Status status = op.wait(rank);
          EXPECT_TRUE(
              test::failed(status, ErrorKind::kTimeout, {shape.gpus == 1 ? "from rank 1" : "from the GPUs of node 0"}));
        } else {
          while (!world.impl()->failure().happened()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          EXPECT_TRUE(test::failed(op.launch(rank, problem.arguments(rank)), ErrorKind::kAborted, {"failed before"}));
        }
      }
      World world = test::make_world(options_of(shape, rank, jobs[1]));
      Operator op = test::make_operator(world, gemm);
      Problem problem(op, gemm, 3, 1);
      const GemmArguments arguments[] = {problem.arguments(rank)};
      EXPECT_TRUE(test::succeeded(op.run(arguments)));
    });
  }
}

TEST_F(ProcessesTest, AnAbortReachesAllRanks) {
  const std::string job = new_job();
  for_ranks(3, [&](int rank) {
    World world = test::make_world(options_of({3, 1}, rank, job));
    const GemmOptions gemm = test::small_tiles(Op::kGemmReduceScatter, 64, 64, 64);
    Operator op = test::make_operator(world, gemm);
    Problem problem(op, gemm, 3, 1);
    if (rank == 2) {
      world.abort("enough");
      return;
    }
    ASSERT_TRUE(op.launch(rank, problem.arguments(rank)).ok() || world.impl()->failure().happened());
    EXPECT_FALSE(op.wait(rank).ok());
    EXPECT_NE(world.impl()->failure().error().message.find("enough"), std::string::npos);
  });
}

TEST_F(ProcessesTest, WorldsComeAndGoWithoutLeavingAnythingOpen) {
  const auto open_files = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) count += access(("/proc/self/fd/" + std::to_string(fd)).c_str(), F_OK) == 0;
    return count;
  };
  int before = 0;
  const std::string job = new_job();
  for (int round = 0; round < 8; ++round) {
    for_ranks(4, [&](int rank) {
      World world = test::make_world(options_of({2, 2}, rank, job));
      const GemmOptions gemm = test::small_tiles(Op::kGemmAllReduce, 32, 32, 32);
      Operator op = test::make_operator(world, gemm);
      Problem problem(op, gemm, 4, 1);
      const GemmArguments arguments[] = {problem.arguments(rank)};
      EXPECT_TRUE(test::succeeded(op.run(arguments)));
    });
    if (round == 2) before = open_files();
  }
  EXPECT_EQ(open_files(), before);
}

}  // namespace
}  // namespace mkernel
