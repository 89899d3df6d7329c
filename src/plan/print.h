// Plans for people: what `mkernel plan` prints, and how messages name tasks and flags.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "plan/plan.h"

namespace mkernel {

// "1 x 4096 queries and 4096 keys of 8 and 2 heads of 128, bf16, causal, zigzag".
std::string attention_text(const PlanSpec& spec);

// The same for ring_attention, and "1024 x 512 x 256" (m, n, k) for the others.
std::string shape_text(const PlanSpec& spec);

// "C", "partial", "node sum" and so on.
std::string_view buffer_name(Buffer buffer);

// "compute", "intra", "send" or "recv".
std::string_view role_name(Role role);

// "rank 3 recv[0] task 17".
std::string task_name(std::int32_t rank, Role role, std::int32_t lane, std::int64_t index);

// What a task does, without its waits and signals: "C[0:128, 256:512] = sum of node sums 0..3". Ranges are half-open.
std::string describe_action(const Plan& plan, std::int32_t rank, const Task& task);

// One line: the task's name, what it waits for, what it does and what it signals. Any task will do, also a damaged one.
std::string describe_task(const Plan& plan, std::int32_t rank, Role role, std::int32_t lane, std::int64_t index,
                          const Task& task);

// A flag of `rank` by number and meaning: "flag 90 (arrival, chunk/node 5/1, from rank 7)".
std::string describe_flag(const Plan& plan, std::int32_t rank, std::uint32_t flag);

// The whole plan of one rank: shape, topology, tiling, workspace and network bytes, then every lane with its tasks. Of
// a lane with more than `max_tasks_per_lane` tasks the middle is left out.
std::string print_plan(const PlanSource& source, std::int32_t rank, int max_tasks_per_lane);

}  // namespace mkernel
