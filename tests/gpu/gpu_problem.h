// For tests: a Problem (small integers, so that every result is known to the bit) in the memory of GPUs.
#pragma once
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exec/problem.h"
#include "mkernel/mkernel.h"
#include "ops/gemm_spec.h"
#include "world/world_impl.h"

namespace mkernel {

// Why GPU tests cannot run here; nothing when they can, or when a world fails for another reason: then they must fail.
inline const std::optional<std::string>& no_gpu() {
  static const std::optional<std::string> reason = [] {
    WorldOptions options;
    options.device = Device::kCuda;
    const Result<World> world = World::create(options);
    const bool missing = !world.ok() && world.error().kind == ErrorKind::kUnsupported;
    return missing ? std::optional(world.error().message) : std::nullopt;
  }();
  return reason;
}
#define SKIP_WITHOUT_GPU() \
  if (no_gpu()) GTEST_SKIP() << *no_gpu()

inline WorldOptions gpu_options(int nodes, int gpus) {
  WorldOptions options;
  options.device = Device::kCuda;
  options.nodes = nodes;
  options.gpus = gpus;
  options.deadline_s = 5;
  return options;
}

inline GemmOptions gemm(Op op, std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmOptions options;
  options.op = op;
  options.m = m;
  options.n = n;
  options.k = k;
  return options;
}

// The matrices of one call on all ranks. Device memory repeats the host's layout, `offset` bytes further.
class GpuProblem {
 public:
  GpuProblem(World& world, const GemmOptions& options, std::uint64_t seed, std::int64_t padding = 0,
             std::int64_t offset = 0)
      : world_(world),
        bytes_(dtype_bytes(options.dtype)),
        problem_(Plan(make_gpu_gemm_spec({world.options().nodes, world.options().gpus}, options, world.options().sms)
                          .value()),
                 seed, padding),
        host_(problem_.matrices()),
        device_(host_) {
    for (std::size_t rank = 0; rank < host_.size(); ++rank) {
      for (Matrix* m : {&device_[rank].a, &device_[rank].b, &device_[rank].c}) {
        Result<void*> data = world_.allocate(static_cast<int>(rank), span(*m) + offset);
        blocks_.push_back({static_cast<int>(rank), data.value()});
        m->data = static_cast<std::byte*>(data.value()) + offset;
      }
    }
    upload();
  }
  ~GpuProblem() {
    for (const auto& [rank, data] : blocks_) world_.release(rank, data);
  }
  GpuProblem(const GpuProblem&) = delete;
  GpuProblem& operator=(const GpuProblem&) = delete;

  const std::vector<GemmArguments>& arguments() const { return device_; }
  std::vector<GemmArguments>& arguments() { return device_; }

  // Inputs, and outputs as they were before the call.
  void upload() {
    for (std::size_t rank = 0; rank < host_.size(); ++rank) {
      copy(static_cast<int>(rank), device_[rank].a.data, host_[rank].a);
      copy(static_cast<int>(rank), device_[rank].b.data, host_[rank].b);
      copy(static_cast<int>(rank), device_[rank].c.data, host_[rank].c);
    }
  }
  // Nothing when C is right to the last bit on every rank, also beside it.
  std::optional<std::string> mismatch() {
    download();
    return problem_.mismatch();
  }
  void download() {
    for (std::size_t rank = 0; rank < host_.size(); ++rank) {
      const Matrix& c = host_[rank].c;
      EXPECT_TRUE(world_.copy(static_cast<int>(rank), c.data, device_[rank].c.data, span(c)).ok());
    }
  }
  // As last downloaded.
  const std::vector<std::vector<std::byte>>& outputs() const { return problem_.outputs(); }

 private:
  // Bytes from the first to the last element.
  std::int64_t span(const Matrix& m) const {
    if (m.rows == 0 || m.cols == 0) return 0;
    return ((m.rows - 1) * m.row_stride + (m.cols - 1) * m.col_stride + 1) * bytes_;
  }
  void copy(int rank, void* device, const Matrix& host) {
    EXPECT_TRUE(world_.copy(rank, device, host.data, span(host)).ok());
  }

  World& world_;
  std::int64_t bytes_;
  Problem problem_;
  std::vector<GemmArguments> host_;
  std::vector<GemmArguments> device_;
  std::vector<std::pair<int, void*>> blocks_;
};

// Runs one call and says what is wrong; nothing when all is right.
inline std::string run_once(World& world, GemmOptions options, std::uint64_t seed = 1, std::int64_t padding = 0,
                            std::int64_t offset = 0) {
  // The ranks' parts are views of whole matrices, whose rows begin anywhere.
  options.any_layout = true;
  Result<Operator> op = Operator::create(world, options);
  if (!op.ok()) return op.error().message;
  GpuProblem problem(world, options, seed, padding, offset);
  const Result<RunReport> report = op->run(problem.arguments());
  if (!report.ok()) return report.error().message;
  if (report->network_bytes != report->network_bytes_bound) return "network bytes differ from the bound";
  return problem.mismatch().value_or("");
}

}  // namespace mkernel
