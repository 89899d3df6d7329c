// Plans give the same tasks on a GPU as on the host: every task of every rank of a list of worlds is evaluated by a
// kernel and compared. Exit code 0 when all are equal, 1 when not, 77 (skipped) without a CUDA device.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "plan/operands.h"

namespace {

using namespace mkernel;

__global__ void evaluate_plan(Plan plan, std::int32_t rank, Role role, std::int32_t lane, std::int64_t count,
                              Task* tasks) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) tasks[i] = plan.task(rank, role, lane, i);
}

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Totals {
  long long tasks = 0;
  long long wrong = 0;
};

void compare_lane(const Plan& plan, std::int32_t rank, Role role, std::int32_t lane, Task* device, Totals& totals) {
  const std::int64_t count = plan.count(rank, role, lane);
  if (count == 0) return;
  constexpr int kThreads = 128;
  evaluate_plan<<<static_cast<unsigned>(ceil_div(count, kThreads)), kThreads>>>(plan, rank, role, lane, count, device);
  std::vector<Task> tasks(static_cast<std::size_t>(count));
  require(cudaMemcpy(tasks.data(), device, tasks.size() * sizeof(Task), cudaMemcpyDeviceToHost), "evaluate_plan");
  for (std::int64_t i = 0; i < count; ++i) {
    ++totals.tasks;
    if (!(tasks[static_cast<std::size_t>(i)] == plan.task(rank, role, lane, i))) ++totals.wrong;
  }
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: this machine has no CUDA device\n");
    return 77;
  }
  constexpr std::int64_t kMaxTasks = 1 << 18;
  Task* device = nullptr;
  require(cudaMalloc(&device, kMaxTasks * sizeof(Task)), "cudaMalloc");
  constexpr Topology kWorlds[] = {{1, 1}, {1, 8}, {2, 1}, {2, 4}, {2, 8}, {3, 1}, {3, 2}, {4, 8}, {5, 3}};
  constexpr std::int64_t kSizes[] = {0, 1, 129, 1000, 8192, 1 << 20};
  Totals totals;
  int plans = 0;
  for (int op = 0; op < kGemmOpCount; ++op) {
    for (const Topology& topo : kWorlds) {
      for (const std::int64_t size : kSizes) {
        PlanSpec spec;
        spec.op = static_cast<Op>(op);
        spec.topo = topo;
        spec.m = size;
        spec.n = size / 4 + 3;
        spec.k = size / 2 + 1;
        spec.partial = plans % 2 == 0 ? Dtype::kFp32 : Dtype::kBf16;
        if (size > 8192) spec.tiling = {1024, 1024, 4, 8, 1 << 20, 1 << 18, 8};  // so that tasks stay few
        const Plan plan(spec);
        ++plans;
        for (std::int32_t rank = 0; rank<topo.world(); rank += topo.world()> 8 ? 5 : 1) {
          for (int role = 0; role < kRoleCount; ++role) {
            for (std::int32_t lane = 0; lane < plan.lanes(static_cast<Role>(role)); ++lane) {
              if (plan.count(rank, static_cast<Role>(role), lane) > kMaxTasks) continue;
              compare_lane(plan, rank, static_cast<Role>(role), lane, device, totals);
            }
          }
        }
      }
    }
  }
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("{\"gpu\": \"%s\", \"plans\": %d, \"tasks\": %lld, \"wrong\": %lld}\n", properties.name, plans,
              totals.tasks, totals.wrong);
  return totals.wrong == 0 ? 0 : 1;
}
