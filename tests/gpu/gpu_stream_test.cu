// Streams, CUDA graphs and SMs that somebody else holds.
#include "gpu_program.cuh"

#include <functional>
#include <memory>
#include <random>
#include <thread>

namespace {

using namespace mkernel;

// `calls` calls of one rank as a graph.
cudaGraphExec_t capture(World& world, Operator& op, const Data& data, int rank, int calls) {
  auto* const stream = static_cast<cudaStream_t>(world.stream(rank));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  for (int call = 0; call < calls; ++call) {
    expect(op.launch(rank, data.device[static_cast<std::size_t>(rank)], stream).ok(), "captured launch");
  }
  require(cudaStreamEndCapture(stream, &graph), "ending a capture");
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
  require(cudaGraphUpload(executable, stream), "uploading a graph");
  require(cudaGraphDestroy(graph), "destroying a graph");
  return executable;
}

// Two shapes are captured on every rank and replayed in turn 1000 times; the device advances the epochs.
void test_graphs(Op op) {
  World world = make_world(2, 2);
  const GemmOptions shapes[] = {gemm(op, 512, 768, 256), gemm(op, 256, 256, 640)};
  std::vector<std::unique_ptr<Operator>> ops;
  std::vector<std::unique_ptr<Data>> data;
  std::vector<std::vector<cudaGraphExec_t>> graphs(2);
  for (int i = 0; i < 2; ++i) {
    ops.push_back(std::make_unique<Operator>(take(Operator::create(world, shapes[i]), "operator")));
    data.push_back(std::make_unique<Data>(world, shapes[i], 7 + i));
    take(ops[i]->run(data[i]->device), "first run");
    for (int r = 0; r < world.size(); ++r) {
      // Three calls in one graph for the second shape.
      graphs[i].push_back(capture(world, *ops[i], *data[i], r, i == 0 ? 1 : 3));
    }
  }
  sync_all(world);
  for (auto& d : data) d->upload_c();
  for (int round = 0; round < 1000; ++round) {
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < world.size(); ++r) {
        require(cudaGraphLaunch(graphs[i][r], static_cast<cudaStream_t>(world.stream(r))), "replaying a graph");
      }
    }
    if (round % 100 == 99) {
      sync_all(world);
      for (int i = 0; i < 2; ++i) {
        data[i]->check("graph replay");
        data[i]->upload_c();
      }
    }
  }
  // Eager calls go on where the replays ended.
  for (int i = 0; i < 2; ++i) {
    take(ops[i]->run(data[i]->device), "eager run after replays");
    data[i]->check("eager after graphs");
    for (cudaGraphExec_t graph : graphs[i]) require(cudaGraphExecDestroy(graph), "destroying a graph");
  }
}

// Eager calls and graphs in any order, of every operator in two shapes, on one world. Nothing is synchronised within a
// sequence, and calls that follow each other have other payloads.
void test_random_sequences() {
  constexpr int kSequences = 100;
  constexpr int kCalls = 50;
  struct Member {
    std::unique_ptr<Operator> op;
    std::unique_ptr<Data> data[3];  // the last for graphs
    std::vector<cudaGraphExec_t> graphs;
  };
  World world = make_world(2, 2);
  std::vector<Member> members;
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
    for (const GemmOptions& options : {gemm(op, 256, 264, 320), gemm(op, 40, 512, 192)}) {
      Member& made = members.emplace_back();
      made.op = std::make_unique<Operator>(take(Operator::create(world, options), "operator"));
      for (std::uint64_t i = 0; i < 3; ++i) {
        made.data[i] = std::make_unique<Data>(world, options, 3 * members.size() + i);
        made.data[i]->upload_c();
        take(made.op->run(made.data[i]->device), "first run");
      }
      for (int r = 0; r < world.size(); ++r) {
        made.graphs.push_back(capture(world, *made.op, *made.data[2], r, 1 + static_cast<int>(members.size()) % 3));
      }
    }
  }
  sync_all(world);
  std::mt19937 random(1);
  for (int sequence = 0; sequence < kSequences; ++sequence) {
    for (int call = 0; call < kCalls; ++call) {
      Member& chosen = members[random() % members.size()];
      const unsigned payload = random() % 3;
      for (int r = 0; r < world.size(); ++r) {
        const auto rank = static_cast<std::size_t>(r);
        if (payload == 2) {
          require(cudaGraphLaunch(chosen.graphs[rank], static_cast<cudaStream_t>(world.stream(r))), "replaying");
        } else {
          expect(chosen.op->launch(r, chosen.data[payload]->device[rank]).ok(), "launch");
        }
      }
    }
    sync_all(world);
    // Those that were not called have what they had before.
    for (Member& member : members) {
      for (auto& data : member.data) data->check("sequence " + std::to_string(sequence));
    }
    if (sequence % 10 != 9) continue;
    for (Member& member : members) {
      for (auto& data : member.data) {
        data->upload_c();
        take(member.op->run(data->device), "a run after sequences");
      }
    }
  }
  for (Member& member : members) {
    for (cudaGraphExec_t graph : member.graphs) require(cudaGraphExecDestroy(graph), "destroying a graph");
  }
}

__global__ void hold_kernel(const volatile int* release, long long most_cycles) {
  const long long begin = clock64();
  while (*release == 0 && clock64() - begin < most_cycles) __nanosleep(1000);
}

// Another kernel holds `held` SMs for 200 ms while ours starts: it finishes all the same.
void test_held_sms(int held) {
  World world = make_world(1, 1);
  const GemmOptions options = gemm(Op::kGemmAllReduce, 2048, 2048, 512);
  Operator op = take(Operator::create(world, options), "operator");
  Data data(world, options, 3);
  take(op.run(data.device), "first run");
  data.upload_c();
  cudaStream_t other = nullptr;
  int* flag = nullptr;
  require(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
  require(cudaHostAlloc(reinterpret_cast<void**>(&flag), sizeof(int), cudaHostAllocMapped), "flag");
  *flag = 0;
  constexpr int kBytes = 160 * 1024;  // of shared memory: one block per SM, and none of ours beside it
  require(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "attribute");
  hold_kernel<<<held, 32, kBytes, other>>>(flag, 4'000'000'000LL);
  require(cudaGetLastError(), "holding SMs");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::thread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    *static_cast<volatile int*>(flag) = 1;
  });
  take(op.run(data.device), "run beside another kernel");
  release.join();
  require(cudaStreamSynchronize(other), "the other kernel");
  data.check("run beside another kernel");
  require(cudaStreamDestroy(other), "stream");
  require(cudaFreeHost(flag), "flag");
}

// Two operators on two streams of every rank, launched in the same order everywhere.
void test_two_streams() {
  World world = make_world(1, 2);
  const GemmOptions options[] = {gemm(Op::kGemmAllReduce, 512, 512, 512), gemm(Op::kAllGatherGemm, 512, 512, 256)};
  Operator first = take(Operator::create(world, options[0]), "operator");
  Operator second = take(Operator::create(world, options[1]), "operator");
  Data a(world, options[0], 1);
  Data b(world, options[1], 2);
  std::vector<cudaStream_t> others(2);
  for (auto& s : others) require(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
  for (int i = 0; i < 50; ++i) {
    for (int r = 0; r < 2; ++r) {
      expect(first.launch(r, a.device[r]).ok(), "launch on the rank's stream");
      expect(second.launch(r, b.device[r], others[r]).ok(), "launch on another stream");
    }
  }
  for (int r = 0; r < 2; ++r) {
    expect(first.wait(r).ok(), "wait");
    expect(second.wait(r).ok(), "wait");
  }
  a.check("first of two streams");
  b.check("second of two streams");
  for (auto& s : others) require(cudaStreamDestroy(s), "stream");
}

// Ranks that launch in different orders are told so.
void test_opposite_orders() {
  World world = make_world(1, 2);
  const GemmOptions options = gemm(Op::kGemmAllReduce, 256, 256, 256);
  Operator first = take(Operator::create(world, options), "operator");
  Operator second = take(Operator::create(world, options), "operator");
  Data a(world, options, 1);
  Data b(world, options, 2);
  expect(first.launch(0, a.device[0]).ok(), "launch");
  const Status status = second.launch(1, b.device[1]);
  expect(!status.ok() && status.error().message.find("same order") != std::string::npos, "opposite orders are refused");
  expect(!first.wait(0).ok(), "the call that can never end has ended with an error");
}

}  // namespace

int main() {
  if (const int code = no_gpu()) return code;
  const struct {
    const char* name;
    std::function<void()> run;
  } tests[] = {{"graphs, gemm_all_reduce", [] { test_graphs(Op::kGemmAllReduce); }},
               {"graphs, gemm_reduce_scatter", [] { test_graphs(Op::kGemmReduceScatter); }},
               {"graphs, all_gather_gemm", [] { test_graphs(Op::kAllGatherGemm); }},
               {"random sequences", test_random_sequences},
               {"1 SM held", [] { test_held_sms(1); }},
               {"2 SMs held", [] { test_held_sms(2); }},
               {"half of the SMs held", [] { test_held_sms(66); }},
               {"all but one SM held", [] { test_held_sms(131); }},
               {"all SMs held", [] { test_held_sms(132); }},
               {"two streams", test_two_streams},
               {"opposite orders", test_opposite_orders}};
  for (const auto& test : tests) {
    const int before = failures;
    test.run();
    std::printf("%s: %s\n", failures == before ? "ok" : "FAILED", test.name);
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}
