// What `run` and `sim` do with the tensors of ring_attention and its backward.
#pragma once
#include "cli/args.h"
#include "cli/console.h"
#include "exec/backward_problem.h"

namespace mkernel::cli {

ExitCode run_attention(const RunArgs& args, Console& console);

// Bytes of all tensors that a run with data keeps.
double attention_bytes(const PlanSpec& spec);
// All rows against fp64 where that is quick, else some.
CheckReport check_tensors(const PlanSpec& spec, AttentionProblem& problem, const AttentionArithmetic& arithmetic = {});
GradientReport check_tensors(const PlanSpec& spec, BackwardProblem& problem);
// The error that a bad report is.
Status wrong_tensors(const PlanSpec& spec, const CheckReport& check);
Status wrong_tensors(const PlanSpec& spec, const GradientReport& check);

}  // namespace mkernel::cli
