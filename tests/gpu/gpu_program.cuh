// What the GPU tests that need CUDA itself share. They are programs of their own, without GoogleTest: 0 good, 1 wrong,
// 77 without a GPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exec/problem.h"
#include "mkernel/mkernel.h"
#include "ops/gemm_spec.h"

namespace mkernel {

inline int failures = 0;
inline void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("WRONG: %s\n", what.c_str());
}
inline void require(cudaError_t status, const char* what) {
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

inline std::shared_ptr<Problem> make_problem(const Topology& topo, const GemmOptions& options, int sms,
                                             std::uint64_t seed) {
  return std::make_shared<Problem>(Plan(take(make_gpu_gemm_spec(topo, options, sms), "spec")), seed);
}

// Integer inputs whose exact result is known, on the GPUs.
struct Data {
  Data(World& w, std::shared_ptr<Problem> p)
      : world(w), problem(std::move(p)), host(problem->matrices()), device(host) {
    for (std::size_t r = 0; r < host.size(); ++r) {
      for (auto [to, from] :
           {std::pair{&device[r].a, &host[r].a}, {&device[r].b, &host[r].b}, {&device[r].c, &host[r].c}}) {
        to->data = take(world.allocate(static_cast<int>(r), bytes(*from)), "allocate");
        expect(world.copy(static_cast<int>(r), to->data, from->data, bytes(*from)).ok(), "upload");
      }
    }
  }
  Data(World& w, const GemmOptions& options, std::uint64_t seed)
      : Data(w, make_problem({w.options().nodes, w.options().gpus}, options, w.options().sms, seed)) {}
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;
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
  std::optional<std::string> mismatch() {
    for (std::size_t r = 0; r < host.size(); ++r) {
      expect(world.copy(static_cast<int>(r), host[r].c.data, device[r].c.data, bytes(host[r].c)).ok(), "download");
    }
    return problem->mismatch();
  }
  void check(const std::string& what) {
    if (const auto wrong = mismatch()) expect(false, what + ": " + *wrong);
  }

  World& world;
  std::shared_ptr<Problem> problem;
  std::vector<GemmArguments> host;
  std::vector<GemmArguments> device;
};

inline World make_world(int nodes, int gpus, double deadline_s = 20) {
  WorldOptions options;
  options.device = Device::kCuda;
  options.nodes = nodes;
  options.gpus = gpus;
  options.deadline_s = deadline_s;
  return take(World::create(options), "world");
}
inline GemmOptions gemm(Op op, int m, int n, int k) {
  GemmOptions options;
  options.op = op;
  options.m = m;
  options.n = n;
  options.k = k;
  return options;
}
inline void sync_all(World& world) {
  for (int r = 0; r < world.size(); ++r) {
    require(cudaStreamSynchronize(static_cast<cudaStream_t>(world.stream(r))), "waiting for a stream");
  }
}

// The exit code where there is no GPU; 0 where there is one, or where a world fails for another reason, as tests then
// must, too.
inline int no_gpu() {
  WorldOptions probe;
  probe.device = Device::kCuda;
  const Result<World> world = World::create(probe);
  if (world.ok() || world.error().kind != ErrorKind::kUnsupported) return 0;
  std::printf("skipped: %s\n", world.error().message.c_str());
  return 77;
}

}  // namespace mkernel
