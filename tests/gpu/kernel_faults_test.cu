// Do the tests bite? The kernels are compiled here once more with faults and delays planted in them
// (exec/cuda/planted_faults.cuh), and these take the place of the library's.
//
//   faults   every fault must be seen: as wrong bits, as the error of a wait that did not end, or as a kernel that
//            hangs where nothing but mbarriers wait, which only this program's own deadline ends
//   delays   every warp is held up at random where it waits, signals, claims or stores: each result is right to the bit
//
//   kernel_faults_test [faults] [delays]    both without arguments; MKERNEL_DELAYED_LAUNCHES of each operator (10000)
//
// Faults run in child processes, since some leave a GPU context that is of no use any more.
#define MKERNEL_PLANTED_FAULTS
#include "exec/cuda/kernel_choice.cuh"
#include "gpu_program.cuh"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "base/half.h"
#include "world/world_impl.h"

namespace mkernel {

// Instead of the library's, which the linker then leaves out. The tests here ask for these two only, in bf16 and with a
// row-major B: the largest tile that has parts, and the one whose K is split over the warpgroups.
KernelEntry find_kernel(TileShape shape, Dtype, bool) {
  if (shape == TileShape{64, 64}) return entry_of<TileConfig<64, 64>, __nv_bfloat16, Major::kMn>();
  return entry_of<TileConfig<128, 128>, __nv_bfloat16, Major::kMn>();
}

namespace {

constexpr Op kOps[] = {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce};
constexpr int kSms = 8;

// Nothing runs.
void plant(const PlantedFaults& faults) {
  require(cudaMemcpyToSymbol(planted_faults, &faults, sizeof(faults)), "planting a fault");
}

World make_small_world(int nodes, int gpus, double deadline_s, int ring_depth = 256) {
  WorldOptions options;
  options.device = Device::kCuda;
  options.nodes = nodes;
  options.gpus = gpus;
  options.sms = kSms;
  options.deadline_s = deadline_s;
  options.ring_depth = ring_depth;
  return take(World::create(options), "world");
}
GemmOptions tiled(Op op, int tile, int m, int n, int k) {
  GemmOptions options = gemm(op, m, n, k);
  options.bm = options.bn = tile;
  options.chunk_tiles = op == Op::kAllGatherGemm ? 0 : 4;
  return options;
}

// --- faults ---

// What a fault must be seen in: calls on small integers, whose results are known to the bit.
struct Scenario {
  Topology topo;
  GemmOptions options;
  // Three, so that what an older call has left behind is never what this one must give.
  std::vector<std::shared_ptr<Problem>> problems;
};

std::vector<Scenario> make_scenarios() {
  std::vector<Scenario> scenarios;
  const auto add = [&](const Topology& topo, const GemmOptions& options) {
    Scenario& made = scenarios.emplace_back(Scenario{topo, options, {}});
    for (std::uint64_t seed = 0; seed < 3; ++seed) made.problems.push_back(make_problem(topo, options, kSms, seed));
  };
  for (const Op op : kOps) {
    add({2, 2}, tiled(op, 128, 512, 512, 1024));
    add({2, 2}, tiled(op, 64, 256, 256, 2048));
  }
  add({2, 2}, tiled(Op::kAllGatherGemm, 64, 200, 331, 136));  // ragged: C is written element by element
  add({1, 1}, tiled(Op::kGemmAllReduce, 64, 100, 96, 4096));  // one tile per row of tiles: K is cut over CTAs
  return scenarios;
}

// How the calls of a scenario went wrong; empty when they did not.
std::string run_scenario(const Scenario& scenario) {
  constexpr int kCalls = 5;
  World world = make_small_world(scenario.topo.nodes, scenario.topo.gpus, 0.4);
  Operator op = take(Operator::create(world, scenario.options), "operator");
  std::vector<std::unique_ptr<Data>> data;
  for (const auto& problem : scenario.problems) data.push_back(std::make_unique<Data>(world, problem));
  for (int call = 0; call < kCalls; ++call) {
    Data& now = *data[static_cast<std::size_t>(call) % data.size()];
    now.upload_c();
    std::string error;
    const auto note = [&](const Status& status) {
      if (status.ok() || !error.empty()) return;
      error = status.error().kind == ErrorKind::kTimeout ? "the deadline's error: " : "an error: ";
      error += status.error().message;
    };
    for (int rank = 0; rank < world.size() && error.empty(); ++rank) {
      note(op.launch(rank, now.device[static_cast<std::size_t>(rank)]));
      // The others work ahead as far as they can, and must not see what this rank has not done yet.
      if (call % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    for (int rank = 0; rank < world.size(); ++rank) note(op.wait(rank));
    if (!error.empty()) return error;
    if (const auto wrong = now.mismatch()) return "wrong bits: " + *wrong;
  }
  return "";
}

// Sums of integers are the same in any order. Here the second half of K takes back what the first half has given, so
// that what remains is nothing but roundings; one tile of K that is cut into more than two parts.
std::string run_order_scenario(const PlantedFaults& faults) {
  constexpr int kSize = 64;
  constexpr int kK = 8192;
  World world = make_small_world(1, 1, 0.4);
  const GemmOptions options = tiled(Op::kGemmAllReduce, 64, kSize, kSize, kK);
  Operator op = take(Operator::create(world, options), "operator");
  Data data(world, options, 1);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> a(kSize * kK);
  std::vector<std::uint16_t> b(kK * kSize);
  const std::size_t half = b.size() / 2;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool first = i % kK < kK / 2;
    a[i] = first ? float_to_bf16(normal(random)) : static_cast<std::uint16_t>(a[i - kK / 2] ^ 0x8000);
  }
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = i < half ? float_to_bf16(normal(random)) : b[i - half];
  expect(world.copy(0, data.device[0].a.data, a.data(), Data::bytes(data.device[0].a)).ok(), "upload");
  expect(world.copy(0, data.device[0].b.data, b.data(), Data::bytes(data.device[0].b)).ok(), "upload");
  std::vector<std::uint16_t> first;
  for (int call = 0; call < 3; ++call) {
    plant(call == 0 ? PlantedFaults{} : faults);
    const Result<RunReport> done = op.run(data.device);
    if (!done.ok()) return "an error: " + done.error().message;
    std::vector<std::uint16_t> c(kSize * kSize);
    expect(world.copy(0, c.data(), data.device[0].c.data, Data::bytes(data.device[0].c)).ok(), "download");
    if (call == 0) first = c;
    if (c != first) return "wrong bits: the sums of random numbers are not those of the first call";
  }
  return "";
}

struct Case {
  Fault fault;
  const char* name;
  std::uint32_t delay_ns = 0;
  // Whether it must be seen. This GPU forgives some: it is named whether they were seen, and nothing more is claimed.
  bool must = true;
};
constexpr Case kCases[] = {
    {Fault::kNone, "no fault"},
    {Fault::kNone, "no fault, delays", 4000},
    {Fault::kNoStageWait, "producer: loads into a stage that is being read"},
    {Fault::kStaleGather, "producer: reads the other parity's gathered rows"},
    {Fault::kNoLoadWait, "consumer: multiplies before the operands are there"},
    {Fault::kPartsKept, "consumer: the count of finished parts is not reset"},
    {Fault::kPartOrder, "consumer: parts are added in another order"},
    {Fault::kFlagFirst, "store: flags are raised before the stores", 8000},
    {Fault::kNoSignal, "store: a CTA forgets its signals"},
    {Fault::kNoCredit, "store: a box is never handed back"},
    {Fault::kWrongHalf, "store: the halves of a tile change places"},
    {Fault::kClippedShort, "store: a ragged tile's last column is left out"},
    {Fault::kRecordFirst, "store: a record is pushed by the first raiser", 8000},
    {Fault::kNoWait, "scheduler: flags are not waited for"},
    {Fault::kNoFlush, "scheduler: waits without a flush"},
    {Fault::kDoubleClaim, "scheduler: two CTAs take the same move", 8000},
    {Fault::kOldC, "scheduler: writes to where C was before"},
    {Fault::kWrongCount, "start: a barrier expects an arrival too few"},
    {Fault::kHeadsKept, "end: the heads of the lanes are not reset"},
    {Fault::kEpochKept, "end: the epoch is not advanced"},
    {Fault::kBegunKept, "end: the first tiles of CTAs stay taken"},
    {Fault::kNoProxyFence, "producer: no fence.proxy.async after the acquire", 4000, false},
    {Fault::kNoSharedFence, "consumer: no fence.proxy.async before a box is stored", 4000, false},
    {Fault::kNoStoreWait, "store: flags are raised while stores are under way", 4000, false},
    {Fault::kNoAcquire, "scheduler: no acquire after the flags", 4000, false},
};
constexpr int kCaseCount = sizeof(kCases) / sizeof(kCases[0]);

// Shared with the child processes.
struct Progress {
  std::atomic<int> next;
  std::atomic<int> seen;   // of those that must be
  std::atomic<int> wrong;  // missed, or seen where there is none
};

void report(Progress& progress, const Case& c, const std::string& seen) {
  const bool right = c.fault == Fault::kNone ? seen.empty() : !seen.empty() || !c.must;
  if (!right) ++progress.wrong;
  if (right && c.must && c.fault != Fault::kNone) ++progress.seen;
  const char* verdict = !right ? "WRONG" : c.fault == Fault::kNone ? "good" : seen.empty() ? "forgiven" : "seen";
  std::printf("%-8s %-56s %.240s\n", verdict, c.name, seen.c_str());
  std::fflush(stdout);
  ++progress.next;
}

std::atomic<int> beat{0};  // counts scenarios; 0: none is timed

std::string provoke(const Case& c, const std::vector<Scenario>& scenarios) {
  PlantedFaults faults;
  faults.fault = c.fault;
  faults.delay_ns = c.delay_ns;
  faults.delay_seed = 7;
  for (const Scenario& scenario : scenarios) {
    plant(faults);
    ++beat;
    if (const std::string seen = run_scenario(scenario); !seen.empty()) {
      const Topology& t = scenario.topo;
      return std::string(op_name(scenario.options.op)) + " on " + std::to_string(t.nodes) + "x" +
             std::to_string(t.gpus) + ", " + seen;
    }
  }
  ++beat;
  return run_order_scenario(faults);
}

// Ends the process when a scenario takes too long.
void watch(Progress& progress) {
  constexpr int kPatience = 40;  // tenths of a second; the deadline of waits that have one is 0.4 s
  for (int last = 0, ticks = 0;; ++ticks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (const int now = beat.load(); now != last || now == 0) {
      last = now;
      ticks = 0;
    }
    if (ticks < kPatience) continue;
    report(progress, kCases[progress.next], "a kernel hangs, and this program's own deadline ends it");
    _exit(0);  // nothing waits for the kernel
  }
}

// Cases from progress.next on, until all are done or the process is of no use any more.
void run_cases(Progress& progress) {
  const std::vector<Scenario> scenarios = make_scenarios();
  // What must come out is computed when it is first asked for: not while a case is timed.
  for (const Scenario& scenario : scenarios) {
    for (const auto& problem : scenario.problems) (void)problem->mismatch();
  }
  std::thread(watch, std::ref(progress)).detach();
  while (progress.next < kCaseCount) {
    const Case& c = kCases[progress.next];
    report(progress, c, provoke(c, scenarios));
    if (cudaDeviceSynchronize() != cudaSuccess) _exit(0);  // a crash: nothing works in this process now
  }
}

// Runs `work` in a child process, and ends that after a time that none should need.
int in_child(const std::function<int()>& work, int most_s) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const int code = work();
    std::fflush(stdout);
    _exit(code);
  }
  for (int i = 0; i < most_s * 100; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::printf("WRONG: a child process did not end in %d s\n", most_s);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return 1;
}

int test_faults() {
  void* const shared = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  auto& progress = *new (shared) Progress{};
  while (progress.next < kCaseCount) {
    const int begun = progress.next;
    const int code = in_child(
        [&] {
          run_cases(progress);
          return failures == 0 ? 0 : 1;
        },
        200);
    if (progress.next == kCaseCount) {
      progress.wrong += code != 0;
    } else if (code != 0 || progress.next == begun) {  // by exit(), in the middle of a case: it has said why
      report(progress, kCases[progress.next], "its process failed");
    }
  }
  const int wrong = progress.wrong;
  std::printf("%s: %d planted faults were seen, %d cases are wrong\n", wrong == 0 ? "ok" : "FAILED",
              progress.seen.load(), wrong);
  return wrong == 0 ? 0 : 1;
}

// --- delays ---

// Counts elements that are not as wanted, and poisons C for the next call.
__global__ void check_kernel(std::uint16_t* c, const std::uint16_t* want, std::int64_t count, unsigned* wrong) {
  unsigned found = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    found += c[i] != want[i];
    c[i] = 0xffff;
  }
  if (found != 0) atomicAdd_system(wrong, found);
}

// Calls of one operator without synchronisation between them. Every call has another payload than the four before it,
// of both parities, and all elements of every result are compared.
struct DelayedCalls {
  static constexpr int kPayloads = 5;
  static constexpr int kBatch = 40;

  DelayedCalls(World& w, const GemmOptions& options) : world(w), op(take(Operator::create(w, options), "operator")) {
    wrong = static_cast<unsigned*>(take(world.allocate(0, sizeof(unsigned)), "allocate"));
    const unsigned zero = 0;
    expect(world.copy(0, wrong, &zero, sizeof(zero)).ok(), "upload");
    for (std::uint64_t seed = 0; seed < kPayloads; ++seed) {
      Data& now = *data.emplace_back(std::make_unique<Data>(world, options, seed));
      now.upload_c();
      take(op.run(now.device), "a run without delays");
      now.check("a run without delays");
      for (int rank = 0; rank < world.size(); ++rank) {
        const Matrix& c = now.host[static_cast<std::size_t>(rank)].c;
        wanted.push_back(take(world.allocate(rank, Data::bytes(c)), "allocate"));
        expect(world.copy(rank, wanted.back(), c.data, Data::bytes(c)).ok(), "upload");
      }
      now.upload_c();
    }
  }
  ~DelayedCalls() {
    world.release(0, wrong);
    for (std::size_t i = 0; i < wanted.size(); ++i) world.release(static_cast<int>(i) % world.size(), wanted[i]);
  }

  unsigned run_batch() {
    for (int i = 0; i < kBatch; ++i, ++calls) {
      const auto payload = static_cast<std::size_t>(calls % kPayloads);
      for (int rank = 0; rank < world.size(); ++rank) {
        const GemmArguments& arguments = data[payload]->device[static_cast<std::size_t>(rank)];
        expect(op.launch(rank, arguments).ok(), "launch");
        check_kernel<<<kSms, 256, 0, static_cast<cudaStream_t>(world.stream(rank))>>>(
            static_cast<std::uint16_t*>(arguments.c.data),
            static_cast<const std::uint16_t*>(
                wanted[payload * static_cast<std::size_t>(world.size()) + static_cast<std::size_t>(rank)]),
            arguments.c.rows * arguments.c.cols, wrong);
      }
    }
    for (int rank = 0; rank < world.size(); ++rank) {
      const Status status = op.wait(rank);
      expect(status.ok(), status.ok() ? "" : status.error().message);
    }
    sync_all(world);
    unsigned found = 0;
    expect(world.copy(0, &found, wrong, sizeof(found)).ok(), "download");
    return found;
  }

  World& world;
  Operator op;
  std::vector<std::unique_ptr<Data>> data;
  std::vector<void*> wanted;  // by payload and rank
  unsigned* wrong = nullptr;
  std::int64_t calls = 0;
};

void test_delays_of(Op kind, int tile, const Topology& topo, std::int64_t launches) {
  World world = make_small_world(topo.nodes, topo.gpus, 20, 2);
  world.impl()->hooks.start_epoch = (std::uint64_t{1} << 33) - 200;  // counters wrap on the way
  plant({});
  DelayedCalls calls(world, tiled(kind, tile, 256, 264, 512));
  const auto begin = std::chrono::steady_clock::now();
  PlantedFaults faults;
  while (calls.calls < launches && failures == 0) {
    faults.delay_ns = 500u << (faults.delay_seed % 6);
    plant(faults);
    const unsigned wrong = calls.run_batch();
    expect(wrong == 0, std::to_string(wrong) + " elements are wrong of calls with delays of up to " +
                           std::to_string(faults.delay_ns) + " ns, seed " + std::to_string(faults.delay_seed));
    ++faults.delay_seed;
  }
  plant({});
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%s: %lld delayed launches of %s on %dx%d, tiles of %d, in %.1f s\n", failures == 0 ? "ok" : "FAILED",
              static_cast<long long>(calls.calls), std::string(op_name(kind)).c_str(), topo.nodes, topo.gpus, tile,
              seconds);
  std::fflush(stdout);
}

int test_delays() {
  const char* const asked = std::getenv("MKERNEL_DELAYED_LAUNCHES");
  const std::int64_t launches = asked != nullptr ? std::atoll(asked) : 10'000;
  for (const Op op : kOps) {
    test_delays_of(op, 64, {2, 2}, launches / 2);
    test_delays_of(op, 128, {2, 2}, launches / 4);
    test_delays_of(op, 64, {1, 4}, launches / 4);
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace mkernel

int main(int argc, char** argv) {
  using namespace mkernel;
  const auto asked = [&](const char* name) {
    bool found = argc < 2;
    for (int i = 1; i < argc; ++i) found = found || std::strcmp(argv[i], name) == 0;
    return found;
  };
  // This process never calls CUDA: what a child had to leave behind would stay with it.
  if (in_child(no_gpu, 60) == 77) return 77;
  int code = 0;
  if (asked("faults")) code |= test_faults();
  if (asked("delays")) code |= in_child(test_delays, 200);
  return code;
}
