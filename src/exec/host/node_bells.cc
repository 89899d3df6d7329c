#include "exec/host/node_bells.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <utility>

namespace mkernel {
namespace {

constexpr timespec kLongestSleep = {0, 100'000'000};

// Not the private kind: waiter and waker are different processes.
void futex_wait(std::uint32_t* word, std::uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &kLongestSleep, nullptr, 0);
}
void futex_wake(std::uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace

NodeBells::NodeBells(NodeBell* bells, std::int32_t own_gpu, std::function<void()> on_ring)
    : bells_(bells), own_gpu_(own_gpu), on_ring_(std::move(on_ring)), thread_([this] { listen(); }) {}

NodeBells::~NodeBells() {
  stop_.store(true);
  ring(own_gpu_);
  thread_.join();
}

void NodeBells::ring(std::int32_t gpu) {
  NodeBell& bell = bells_[gpu];
  // order: either we see that the owner sleeps, or it sees our ring before it does: both sides write one word and then
  // read the other's, all in the one order of seq_cst; pairs with listen().
  std::atomic_ref<std::uint32_t>(bell.rings).fetch_add(1, std::memory_order_seq_cst);
  if (std::atomic_ref<std::uint32_t>(bell.sleeping).load(std::memory_order_seq_cst) != 0) futex_wake(&bell.rings);
}

void NodeBells::listen() {
  NodeBell& bell = bells_[own_gpu_];
  const std::atomic_ref<std::uint32_t> rings(bell.rings);
  const std::atomic_ref<std::uint32_t> sleeping(bell.sleeping);
  std::uint32_t heard = rings.load(std::memory_order_seq_cst);
  while (!stop_.load()) {
    sleeping.store(1, std::memory_order_seq_cst);  // order: see ring()
    std::uint32_t now = rings.load(std::memory_order_seq_cst);
    if (now == heard) {
      futex_wait(&bell.rings, heard);
      now = rings.load(std::memory_order_seq_cst);
    }
    sleeping.store(0, std::memory_order_seq_cst);
    if (now == heard) continue;
    heard = now;
    on_ring_();
  }
}

}  // namespace mkernel
