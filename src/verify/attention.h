// Whether the keys, values, states and gradients that ring_attention and its backward move through memory which it uses
// again within a call are the right ones at the right time.
#pragma once
#include <vector>

#include "verify/memory.h"
#include "verify/signals.h"

namespace mkernel {

// `order` is that of run_plan(). With `reuse`, also what two calls of the same parity do to each other.
void check_attention(const Enumeration& all, const std::vector<TaskId>& order, const Knowledge& knowledge, bool reuse,
                     Findings& findings);
void check_attention_backward(const Enumeration& all, const std::vector<TaskId>& order, const Knowledge& knowledge,
                              bool reuse, Findings& findings);

}  // namespace mkernel
