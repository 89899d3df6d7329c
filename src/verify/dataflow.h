// Whether the bytes that tasks move add up to the operator's result, in the right order and at the right time.
#pragma once
#include "verify/memory.h"
#include "verify/signals.h"

namespace mkernel {

// Every element of every C is written exactly once, by a task that the rank's completion covers and that knows the rank
// to have started its call.
void check_outputs(const Enumeration& all, const FlagTable& flags, const Knowledge& knowledge, Findings& findings);

// Every read of workspace finds what it needs: written in this epoch by a task that happens before, and holding the
// right thing. With `reuse`, also that the next write but one of the same memory cannot come too early.
void check_dataflow(const Enumeration& all, const WriteIndex& writes, const Knowledge& knowledge, bool reuse,
                    Findings& findings);

}  // namespace mkernel
