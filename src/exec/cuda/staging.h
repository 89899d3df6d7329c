// Copies between a GPU rank's heaps and their mirrors in host memory, which the network between processes uses.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "exec/cuda/driver.h"
#include "exec/cuda/pinned_memory.h"
#include "net/process_endpoint.h"
#include "net/record.h"
#include "plan/heap_layout.h"
#include "plan/plan.h"

namespace mkernel {

// One heap with its mirror.
struct StagedHeap {
  struct Incoming {  // what the put that raises a stamp brings
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
  };

  // Errors: kOutOfMemory.
  static Result<std::unique_ptr<StagedHeap>> create(const PlanSource& source, const HeapLayout& layout,
                                                    std::int32_t rank, std::byte* device);

  std::byte* device = nullptr;
  PinnedMemory mirror;
  std::int64_t bytes = 0;
  std::vector<Incoming> incoming;  // by flag, parity included
};

// The heaps of one rank and the streams that copy. One thread at a time.
class Staging {
 public:
  Staging(const DriverApi* api, int device) : api_(api), device_(device) {}
  ~Staging();
  Status open();

  void set_heap(std::uint32_t op, std::unique_ptr<StagedHeap> heap) { heaps_[op] = std::move(heap); }
  StagedHeap* heap(std::uint32_t op) const { return heaps_[op].get(); }

  static constexpr int kEvents = 256;  // copies out under way, each with an event of its own
  // From the GPU to the mirror; done(event) says when.
  void copy_out(const Put& put, int event);
  bool done(int event);
  // What the stamp stands for from the mirror to the GPU, then the stamp.
  void copy_in(std::uint32_t op, std::int64_t flag, std::uint32_t value);
  // Waits until nothing is under way.
  void settle();
  // Why copies fail, once one has.
  std::optional<Error> failure() const;

 private:
  void check(cudaError_t status);

  const DriverApi* api_;
  int device_;
  cudaStream_t out_ = nullptr;
  cudaStream_t in_ = nullptr;
  std::array<cudaEvent_t, kEvents> events_ = {};
  std::array<std::unique_ptr<StagedHeap>, kMaxOperators> heaps_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace mkernel
