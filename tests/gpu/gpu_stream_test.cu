// Streams, CUDA graphs and SMs that somebody else holds. A program of its own: 0 good, 1 wrong, 77 without a GPU.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exec/problem.h"
#include "mkernel/mkernel.h"
#include "ops/gemm_spec.h"

namespace {

using namespace mkernel;

int failures = 0;
void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("WRONG: %s\n", what.c_str());
}
void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("WRONG: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}
template <class T>
T take(Result<T> result, const char* what) {
  if (!result.ok()) {
    std::printf("WRONG: %s: %s\n", what, result.error().message.c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

// Integer inputs whose exact result is known, on the GPUs.
struct Data {
  Data(World& w, const GemmOptions& options, std::uint64_t seed)
      : world(w),
        problem(Plan(take(make_gpu_gemm_spec({w.options().nodes, w.options().gpus}, options, w.options().sms), "spec")),
                seed),
        host(problem.matrices()),
        device(host) {
    for (std::size_t r = 0; r < host.size(); ++r) {
      for (auto [to, from] :
           {std::pair{&device[r].a, &host[r].a}, {&device[r].b, &host[r].b}, {&device[r].c, &host[r].c}}) {
        to->data = take(world.allocate(static_cast<int>(r), bytes(*from)), "allocate");
        expect(world.copy(static_cast<int>(r), to->data, from->data, bytes(*from)).ok(), "upload");
      }
    }
  }
  ~Data() {
    for (std::size_t r = 0; r < host.size(); ++r) {
      for (const Matrix* m : {&device[r].a, &device[r].b, &device[r].c}) world.release(static_cast<int>(r), m->data);
    }
  }
  static std::int64_t bytes(const Matrix& m) { return m.rows == 0 ? 0 : ((m.rows - 1) * m.row_stride + m.cols) * 2; }
  void upload_c() {
    for (std::size_t r = 0; r < host.size(); ++r) {
      std::memset(host[r].c.data, 0xff, static_cast<std::size_t>(bytes(host[r].c)));
      expect(world.copy(static_cast<int>(r), device[r].c.data, host[r].c.data, bytes(host[r].c)).ok(), "poison");
    }
  }
  void check(const std::string& what) {
    for (std::size_t r = 0; r < host.size(); ++r) {
      expect(world.copy(static_cast<int>(r), host[r].c.data, device[r].c.data, bytes(host[r].c)).ok(), "download");
    }
    if (const auto wrong = problem.mismatch()) expect(false, what + ": " + *wrong);
  }

  World& world;
  Problem problem;
  std::vector<GemmArguments> host;
  std::vector<GemmArguments> device;
};

World make_world(int nodes, int gpus, double deadline_s = 20) {
  WorldOptions options;
  options.device = Device::kCuda;
  options.nodes = nodes;
  options.gpus = gpus;
  options.deadline_s = deadline_s;
  return take(World::create(options), "world");
}
GemmOptions gemm(Op op, int m, int n, int k) {
  GemmOptions options;
  options.op = op;
  options.m = m;
  options.n = n;
  options.k = k;
  return options;
}
void sync_all(World& world) {
  for (int r = 0; r < world.size(); ++r) {
    require(cudaStreamSynchronize(static_cast<cudaStream_t>(world.stream(r))), "waiting for a stream");
  }
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
      auto* const stream = static_cast<cudaStream_t>(world.stream(r));
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
      // Three calls in one graph for the second shape.
      for (int call = 0; call < (i == 0 ? 1 : 3); ++call) {
        expect(ops[i]->launch(r, data[i]->device[r], stream).ok(), "captured launch");
      }
      require(cudaStreamEndCapture(stream, &graph), "ending a capture");
      require(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
      require(cudaGraphUpload(executable, stream), "uploading a graph");
      require(cudaGraphDestroy(graph), "destroying a graph");
      graphs[i].push_back(executable);
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
  WorldOptions probe;
  probe.device = Device::kCuda;
  if (const Result<World> world = World::create(probe);
      !world.ok() && world.error().kind == ErrorKind::kUnsupported) {
    std::printf("skipped: %s\n", world.error().message.c_str());
    return 77;
  }
  const struct {
    const char* name;
    std::function<void()> run;
  } tests[] = {{"graphs, gemm_all_reduce", [] { test_graphs(Op::kGemmAllReduce); }},
               {"graphs, gemm_reduce_scatter", [] { test_graphs(Op::kGemmReduceScatter); }},
               {"graphs, all_gather_gemm", [] { test_graphs(Op::kAllGatherGemm); }},
               {"1 SM held", [] { test_held_sms(1); }},
               {"2 SMs held", [] { test_held_sms(2); }},
               {"half of the SMs held", [] { test_held_sms(66); }},
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
