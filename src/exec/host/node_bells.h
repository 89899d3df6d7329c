// How the processes of one node wake each other: a word of shared memory per GPU, and a thread that sleeps on its own.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>

namespace mkernel {

// One GPU's bell, in memory that all processes of the node have mapped and that was zeroed.
struct alignas(64) NodeBell {
  std::uint32_t rings = 0;     // only grows, and may wrap
  std::uint32_t sleeping = 0;  // its owner's thread sleeps, or is about to
};

class NodeBells {
 public:
  // `bells` has one entry per GPU of the node and outlives this; `on_ring` is called after each ring of `own_gpu`'s, or
  // once for several.
  NodeBells(NodeBell* bells, std::int32_t own_gpu, std::function<void()> on_ring);
  ~NodeBells();
  NodeBells(const NodeBells&) = delete;
  NodeBells& operator=(const NodeBells&) = delete;

  // What we wrote before is visible to the owner when it wakes.
  void ring(std::int32_t gpu);

 private:
  void listen();

  NodeBell* bells_;
  std::int32_t own_gpu_;
  std::function<void()> on_ring_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace mkernel
