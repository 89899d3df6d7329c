// For tests: every kind of network that mKernel has, made and driven in one way. An endpoint and a heap per rank, all
// in one thread and in real time. Heaps begin with stamps, and what the tests look at is those, as executors do.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/local/local_transport.h"
#include "net/process_endpoint.h"
#include "net/transport.h"

namespace mkernel {

struct NetworkOptions {
  int world = 2;
  std::int64_t heap_bytes = 0;  // beyond the stamps
  std::int64_t stamps = 1 << 10;
  int queue_depth = 64;
  bool star = false;       // only rank 0 and the others write to each other
  bool impatient = false;  // a peer that is gone is noticed within 0.1 s; a machine under load may be taken for gone
  // Gives a rank's memory, of stamps and heap; null: ordinary memory.
  std::function<std::byte*(int rank, std::int64_t bytes)> memory = nullptr;
};

// A kind of network that tests run over.
struct NetworkKind {
  std::string name;
  enum class Family { kLocal, kLibfabric, kVerbs } family = Family::kLocal;
  int pieces = 0;                           // counted arrivals per put; 0: the network writes stamps
  bool shuffle = false;                     // kVerbs
  bool notify = true;                       // kVerbs, ordered
  bool fake = false;                        // kVerbs: over the device in fake_verbs.h
  std::string local_address = "127.0.0.1";  // kLibfabric: of the interface to use
};

std::string network_name(const NetworkKind& kind);
// All of them.
std::vector<NetworkKind> network_kinds();
// Why this machine or this build cannot run it; empty when it can.
std::string network_obstacle(const NetworkKind& kind);
// An endpoint between processes; not for kLocal. Fails the program when it cannot be made.
std::unique_ptr<ProcessEndpoint> make_endpoint(const NetworkKind& kind, std::int32_t rank, std::int32_t world,
                                               int queue_depth, bool star = false, bool impatient = false);
inline constexpr Nanos kNetworkDeadline = 60'000'000'000;

inline Nanos clock_now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

class TestNetwork final : public Landing {
 public:
  TestNetwork(const NetworkKind& kind, const NetworkOptions& options);
  ~TestNetwork() override;

  int world() const { return options_.world; }
  Endpoint* endpoint(int rank) { return endpoints_[static_cast<std::size_t>(rank)]; }
  // Null over the local network.
  ProcessEndpoint* process_endpoint(int rank) { return processes_[static_cast<std::size_t>(rank)].get(); }
  std::byte* heap(int rank) { return memory_[static_cast<std::size_t>(rank)]; }
  // Offset of byte `at` beyond the stamps.
  std::int64_t offset(std::int64_t at) const { return stamp_bytes() + at; }
  std::byte* data(int rank, std::int64_t at = 0) { return heap(rank) + offset(at); }
  std::uint32_t stamp_of(int rank, std::int64_t flag) {
    // order: what the stamp vouches for; pairs with the network's write of it, or with stamp().
    return std::atomic_ref<std::uint32_t>(reinterpret_cast<std::uint32_t*>(heap(rank))[flag])
        .load(std::memory_order_acquire);
  }

  // Makes all ranks' heaps of operator `op` known to all, over the same memory.
  void add_heaps(std::uint32_t op, std::uint64_t start_epoch = 0);
  void remove_heaps(std::uint32_t op);
  // The rank's endpoint goes.
  void close(int rank);

  // Of `bytes` from offset(src_at) to offset(dst_at), with a stamp.
  Put put(int src, int dst, std::int64_t src_at, std::int64_t dst_at, std::int64_t bytes, std::int64_t flag,
          std::uint64_t epoch = 1) const;

  void poll(int rank);
  void poll_all();
  // Polls everybody until `done`; false when it never is.
  bool poll_until(const std::function<bool()>& done, Nanos limit = kNetworkDeadline);
  // Posts and flushes, polling while there is no room. False when it is refused for good.
  bool post(const Put& put);

  struct Counts {
    std::int64_t sent = 0;
    std::int64_t failed = 0;
    std::int64_t arrivals = 0;  // that the endpoint told of
    std::int32_t failed_peer = -1;
  };
  const Counts& counts(int rank) const { return counts_[static_cast<std::size_t>(rank)]; }
  // Counted: arrivals that were not those of exactly one put.
  std::int64_t wrong_arrivals() const { return wrong_arrivals_; }

  void land(const Put& put, std::int64_t begin, std::int64_t bytes) override;
  void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override;

 private:
  std::int64_t stamp_bytes() const { return (options_.stamps * 4 + 255) / 256 * 256; }
  void arrived(int rank, const TransportEvent& event);

  NetworkKind kind_;
  NetworkOptions options_;
  std::vector<std::vector<std::byte>> owned_;
  std::vector<std::byte*> memory_;
  std::unique_ptr<LocalNetwork> local_;
  std::vector<std::unique_ptr<ProcessEndpoint>> processes_;
  std::vector<Endpoint*> endpoints_;  // null: closed
  std::vector<Counts> counts_;
  struct Pieces {
    std::uint64_t epoch = 0;
    int count = 0;
  };
  std::vector<std::vector<Pieces>> pieces_;  // by rank, flag
  std::int64_t wrong_arrivals_ = 0;
};

}  // namespace mkernel
