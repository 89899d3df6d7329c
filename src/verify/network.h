// Network bytes against the least that each operator's pattern allows.
#pragma once
#include "verify/enumeration.h"

namespace mkernel {

// Attention: whether some query of `node` sees one of the keys [key, key + keys), asked of each query by itself.
bool node_sees(const PlanSpec& spec, std::int32_t node, std::int64_t key, std::int64_t keys);

// Bytes that all puts of a rank move.
std::int64_t sent_bytes(const Enumeration& all, std::int32_t rank);

// The lower bound over all ranks, from the operator's definition alone.
std::int64_t network_bound(const PlanSpec& spec);

// Every rank sends what the plan announces; all ranks together send the lower bound, and share it as evenly as chunks
// allow.
void check_network(const Enumeration& all, Findings& findings);

}  // namespace mkernel
