// The arguments of `mkernel bench`.
#pragma once
#include <span>
#include <string>

#include "cli/args.h"

namespace mkernel::cli {

// `args` without the word bench.
Result<Command> parse_bench(std::span<const std::string> args);

// scaled | balanced | none | GBPS[:LATENCY_US].
Result<bench::LinkRule> parse_bench_link(std::string_view option, std::string_view text);

}  // namespace mkernel::cli
