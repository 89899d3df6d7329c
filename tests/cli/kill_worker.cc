// One rank of a world that ends itself at a point of the protocol. For kills_test.cc.
//
// The library has no switches for this: the linker puts the functions below before the library's own (--wrap in
// cmake/mkernel_tests.cmake), and the network's endpoint is wrapped in one of ours.
//
// Of the launcher's variables it takes MKERNEL_RANK and so on; of its own MKERNEL_WORKER_NODES, MKERNEL_WORKER_KILL
// ("POINT:COUNT:SIGNAL": at the COUNT-th time; unset for survivors) and MKERNEL_WORKER_SILENCE_S. Ends with exit code 3
// and one line when the world has failed as it should, 4 when it then leaves something behind or cannot be followed by
// another world, 5 when it never fails.
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include "exec/host/host_network.h"
#include "mkernel/mkernel.h"
#include "net/libfabric/fabric_endpoint.h"
#include "net/verbs/verbs_endpoint.h"
#include "world/bootstrap.h"

namespace mkernel {
namespace {

struct Kill {
  std::string point;
  int count = 0;
  int signal = 0;
  std::atomic<int> passed{0};
};

Kill& the_kill() {
  static Kill instance;
  return instance;
}

// The process is at a point of the protocol.
void pass(std::string_view point) {
  Kill& kill = the_kill();
  if (kill.point != point || ++kill.passed != kill.count) return;
  raise(kill.signal);
}

class WatchedEndpoint final : public ProcessEndpoint {
 public:
  explicit WatchedEndpoint(std::unique_ptr<ProcessEndpoint> inner) : inner_(std::move(inner)) {}

  PostStatus post(const Put& put, Nanos now) override {
    pass("before_post");
    // The peer has given the buffer back that this put goes to: it was used two epochs ago.
    if (put.epoch > 2) pass("credit");
    const PostStatus status = inner_->post(put, now);
    if (status == PostStatus::kPosted) pass("after_post");
    return status;
  }
  void flush(Nanos now) override { inner_->flush(now); }
  int poll(Nanos now, std::span<TransportEvent> events) override {
    const int count = inner_->poll(now, events);
    for (int i = 0; i < count; ++i) {
      const EventKind kind = events[static_cast<std::size_t>(i)].kind;
      if (kind == EventKind::kSent) pass("payload");
      if (kind == EventKind::kArrived || kind == EventKind::kStamped) pass("flag");
    }
    return count;
  }
  Nanos next_event() const override { return inner_->next_event(); }
  int arrivals_per_put() const override { return inner_->arrivals_per_put(); }
  const std::string& address() const override { return inner_->address(); }
  Status connect(std::int32_t peer, std::string_view address) override { return inner_->connect(peer, address); }
  Result<RemoteHeap> add_heap(std::uint32_t op, const HeapMemory& memory, std::uint64_t start_epoch) override {
    return inner_->add_heap(op, memory, start_epoch);
  }
  void set_remote(std::uint32_t op, std::int32_t peer, const RemoteHeap& heap) override {
    inner_->set_remote(op, peer, heap);
  }
  void remove_heap(std::uint32_t op) override { inner_->remove_heap(op); }
  std::string name() const override { return inner_->name(); }
  std::int64_t bytes_sent(std::uint32_t op) const override { return inner_->bytes_sent(op); }
  std::string last_error() const override { return inner_->last_error(); }

 private:
  std::unique_ptr<ProcessEndpoint> inner_;
};

using Endpoints = Result<std::unique_ptr<ProcessEndpoint>>;

Endpoints watched(Endpoints endpoint) {
  if (!endpoint.ok()) return endpoint;
  return std::unique_ptr<ProcessEndpoint>(std::make_unique<WatchedEndpoint>(std::move(endpoint).value()));
}

// By how the label of an exchange begins.
constexpr std::pair<const char*, const char*> kExchanges[] = {{"create a world", "world"},
                                                              {"tell its address", "addresses"},
                                                              {"share the workspace", "operator"},
                                                              {"end: ", "barrier"},
                                                              {"destroy operator", "destroy"}};

}  // namespace

// The linker's names: __real_X is the library's X, and whoever calls X calls __wrap_X. A member function is called as a
// function of the object, where functions return what they return in the same way (Itanium C++ ABI).
extern "C" {
Endpoints __real__ZN7mkernel22create_fabric_endpointEiiRKNS_13FabricOptionsE(std::int32_t, std::int32_t,
                                                                             const FabricOptions&);
Endpoints __wrap__ZN7mkernel22create_fabric_endpointEiiRKNS_13FabricOptionsE(std::int32_t rank, std::int32_t world,
                                                                             const FabricOptions& options) {
  return watched(__real__ZN7mkernel22create_fabric_endpointEiiRKNS_13FabricOptionsE(rank, world, options));
}

Endpoints __real__ZN7mkernel21create_verbs_endpointEiiRKNS_12VerbsOptionsE(std::int32_t, std::int32_t,
                                                                           const VerbsOptions&);
Endpoints __wrap__ZN7mkernel21create_verbs_endpointEiiRKNS_12VerbsOptionsE(std::int32_t rank, std::int32_t world,
                                                                           const VerbsOptions& options) {
  return watched(__real__ZN7mkernel21create_verbs_endpointEiiRKNS_12VerbsOptionsE(rank, world, options));
}

bool __real__ZN7mkernel11HostNetwork4pushEiiRKNS_6RecordE(HostNetwork*, std::int32_t, std::int32_t, const Record&);
bool __wrap__ZN7mkernel11HostNetwork4pushEiiRKNS_6RecordE(HostNetwork* network, std::int32_t rank, std::int32_t node,
                                                          const Record& record) {
  pass("before_push");
  const bool pushed = __real__ZN7mkernel11HostNetwork4pushEiiRKNS_6RecordE(network, rank, node, record);
  if (pushed) pass("after_push");
  return pushed;
}

using Texts = Result<std::vector<std::string>>;
Texts __real__ZN7mkernel9Bootstrap8exchangeERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES8_d(
    Bootstrap*, const std::string&, const std::string&, double);
Texts __wrap__ZN7mkernel9Bootstrap8exchangeERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES8_d(
    Bootstrap* bootstrap, const std::string& label, const std::string& text, double deadline_s) {
  for (const auto& [begin, point] : kExchanges) {
    if (label.starts_with(begin)) pass(point);
  }
  return __real__ZN7mkernel9Bootstrap8exchangeERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES8_d(
      bootstrap, label, text, deadline_s);
}

using Bootstraps = Result<std::unique_ptr<Bootstrap>>;
Bootstraps __real__ZN7mkernel9Bootstrap6createERKNS_16BootstrapOptionsE(const BootstrapOptions&);
Bootstraps __wrap__ZN7mkernel9Bootstrap6createERKNS_16BootstrapOptionsE(const BootstrapOptions& asked) {
  BootstrapOptions options = asked;
  if (const char* text = std::getenv("MKERNEL_WORKER_SILENCE_S")) options.silence_s = std::atof(text);
  return __real__ZN7mkernel9Bootstrap6createERKNS_16BootstrapOptionsE(options);
}
}  // extern "C"

namespace {

constexpr int kGenerations = 60;  // operators of a world, which makes at most 63

// A rank's matrices, full of zeros.
struct Arguments {
  explicit Arguments(const Operator& op, int rank) {
    const MatrixShape shapes[] = {op.a_shape(rank), op.b_shape(rank), op.c_shape(rank)};
    Matrix* const matrices[] = {&gemm.a, &gemm.b, &gemm.c};
    for (int i = 0; i < 3; ++i) {
      memory[i].resize(static_cast<std::size_t>(2 * shapes[i].rows * shapes[i].cols + 2));
      *matrices[i] = Matrix::row_major(memory[i].data(), shapes[i].rows, shapes[i].cols);
    }
  }
  std::vector<std::byte> memory[3];
  GemmArguments gemm;
};

// Makes operators, runs them in every way and destroys them, until something fails.
Status use(World& world) {
  constexpr Op kOps[] = {Op::kGemmAllReduce, Op::kAllGatherGemm, Op::kGemmReduceScatter};
  for (int generation = 0; generation < kGenerations; ++generation) {
    GemmOptions options;
    options.op = kOps[generation % 3];
    options.m = options.n = 96;
    options.k = 64;
    options.bm = options.bn = 16;
    options.band = options.chunk_tiles = 2;
    options.chunk_rows = 16;
    Result<Operator> op = Operator::create(world, options);
    if (!op.ok()) return op.error();
    const int ranks = world.rank() < 0 ? world.size() : 1;
    std::vector<Arguments> all;
    for (int i = 0; i < ranks; ++i) all.emplace_back(*op, world.rank() < 0 ? i : world.rank());
    std::vector<GemmArguments> arguments;
    for (const Arguments& each : all) arguments.push_back(each.gemm);
    for (int i = 0; i < 2; ++i) {
      const Result<RunReport> report = op->run(arguments);
      if (!report.ok()) return report.error();
    }
    if (world.rank() < 0) return Ok{};
    for (int i = 0; i < 6; ++i) {
      if (Status status = op->launch(world.rank(), arguments[0]); !status.ok()) return status;
    }
    if (Status status = op->wait(world.rank()); !status.ok()) return status;
  }
  return Ok{};
}

// One world from its begin to its end.
Status live(const WorldOptions& options) {
  Result<World> world = World::create(options);
  if (!world.ok()) return world.error();
  return use(*world);
}

int entries_of(const char* folder) {
  const auto begin = std::filesystem::directory_iterator(folder);
  return static_cast<int>(std::distance(begin, std::filesystem::directory_iterator()));
}

void set_kill(std::string text) {
  const std::size_t first = text.find(':');
  const std::size_t second = text.find(':', first + 1);
  Kill& kill = the_kill();
  kill.point = text.substr(0, first);
  kill.count = std::atoi(text.substr(first + 1, second - first - 1).c_str());
  kill.signal = text.substr(second + 1) == "STOP" ? SIGSTOP : SIGKILL;
}

// A moment after threads were joined there are as many as before; a sanitizer has one of its own.
bool threads_are_gone(int before) {
  for (int i = 0; i < 100; ++i) {
    if (entries_of("/proc/self/task") <= before) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

int run_worker() {
#ifdef __SANITIZE_ADDRESS__
  __lsan_disable();  // libfabric 1.17 leaks connections that are closed while they are being made
#endif
  const int threads_before = entries_of("/proc/self/task");
  if (const char* text = std::getenv("MKERNEL_WORKER_KILL")) set_kill(text);
  const Result<Processes> processes = processes_from_environment();
  if (!processes.ok()) return 6;
  WorldOptions options;
  options.nodes = std::atoi(std::getenv("MKERNEL_WORKER_NODES"));
  options.gpus = processes->size / options.nodes;
  options.sms = 1;
  options.processes = *processes;
  const Status status = live(options);
  if (status.ok()) return 5;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  // reliability.md: usable after failure.
  const bool clean = threads_are_gone(threads_before);
  if (!clean) std::fprintf(stderr, "%d threads are left\n", entries_of("/proc/self/task") - threads_before);
  WorldOptions next;
  next.nodes = 2;
  next.sms = 1;
  const Status again = live(next);
  if (!again.ok()) std::fprintf(stderr, "the next world: %s\n", again.error().message.c_str());
  return clean && again.ok() ? 3 : 4;
}

}  // namespace
}  // namespace mkernel

int main() { return mkernel::run_worker(); }
