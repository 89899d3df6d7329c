#include "cli/attention_args.h"

#include <fmt/format.h>

#include "cli/apply.h"

namespace mkernel::cli {
namespace {

constexpr std::int64_t kMaxHeads = 1 << 20;
constexpr std::int64_t kMaxInt = (std::int64_t{1} << 31) - 1;

// "LEFT:RIGHT", either of them empty for all.
Status parse_window(AttentionOptions& attention, const std::string& text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) {
    return bad_argument(fmt::format("--window is {}: it must be LEFT:RIGHT, such as 1024:0 or 4k:", quote(text)));
  }
  const auto side = [&](const std::string& part, std::int64_t& value) -> Status {
    if (part.empty()) return Ok{};
    const auto size = parse_size("--window", part);
    if (!size) return size.error();
    value = *size;
    return Ok{};
  };
  if (const Status left = side(text.substr(0, colon), attention.window_left); !left) return left;
  return side(text.substr(colon + 1), attention.window_right);
}

Status parse_slots(AttentionOptions& attention, const std::string& text) {
  if (text == "all") {
    attention.slot_rounds = -1;
    return Ok{};
  }
  const auto count = parse_count("--slots", text, 1, kMaxInt);
  if (!count) return bad_argument(fmt::format("--slots is {}: it must be all, or 1 to {}", quote(text), kMaxInt));
  attention.slot_rounds = static_cast<int>(*count);
  return Ok{};
}

}  // namespace

void add_attention(OptionSet& options, AttentionOptions& attention, const AttentionDefaults& defaults) {
  attention.seq_q = defaults.tokens;
  attention.heads = defaults.heads;
  attention.dim = defaults.dim;
  options.group("ring_attention and its backward: O = softmax(scale * Q K^T + mask) V, tokens divided over the ranks");
  options.value("--batch", "COUNT", "batches [1]", count_into("--batch", attention.batch, 1, kMaxHeads));
  options.value("--heads", "COUNT", fmt::format("heads of Q and O [{}]", defaults.heads),
                count_into("--heads", attention.heads, 1, kMaxHeads));
  options.value("--kv-heads", "COUNT", "heads of K and V, a divisor of --heads [as many]",
                count_into("--kv-heads", attention.kv_heads, 1, kMaxHeads));
  options.value("--dim", "SIZE", fmt::format("of a head, a multiple of 8 up to 256 [{}]", defaults.dim),
                count_into("--dim", attention.dim, 8, 256));
  options.value("--seq", "TOKENS", fmt::format("tokens of Q, over all ranks [{}]", defaults.tokens),
                size_into("--seq", attention.seq_q));
  options.value("--seq-k", "TOKENS", "tokens of K and V [as many]", size_into("--seq-k", attention.seq_k));
  options.flag("--causal", "no query sees a later key", &attention.causal);
  options.value("--window", "LEFT:RIGHT", "how many keys a query sees on each side; nothing: all",
                [&attention](const std::string& text) { return parse_window(attention, text); });
  options.flag("--zigzag", "rank r of W holds parts r and 2W-1-r of 2W: equal work under --causal", &attention.zigzag);
  options.flag("--packed", "several sequences, cut at random by the seed", &attention.packed);
  options.value("--scale", "NUMBER", "of the scores [1 / sqrt(dim)]",
                into(attention.scale,
                     [](const std::string& text) { return parse_number("--scale", text, -1e6, 1e6, "a factor"); }));
  options.value("--slots", "ROUNDS", "chunks of each GPU index that a rank has room for: all, or a number [chosen]",
                [&attention](const std::string& text) { return parse_slots(attention, text); });
}

Status settle_attention(const OptionSet& options, ProblemArgs& problem) {
  const bool attention = problem.is_attention();
  constexpr const char* kAttention[] = {"--batch",  "--heads",  "--kv-heads", "--dim",    "--seq",   "--seq-k",
                                        "--causal", "--window", "--zigzag",   "--packed", "--scale", "--slots"};
  constexpr const char* kGemm[] = {"--m", "--n", "--k", "--band", "--chunk-tiles"};
  constexpr const char* kSums[] = {"--fp32-partials", "--bn"};  // also of the backward
  for (const char* name : kAttention) {
    if (attention || !options.given(name)) continue;
    return bad_argument(fmt::format("{} is for ring_attention, not for {}", name, op_name(problem.gemm.op)));
  }
  for (const char* name : kGemm) {
    if (!attention || !options.given(name)) continue;
    return bad_argument(fmt::format("{} is for the GEMM operators, not for {}", name, op_name(problem.gemm.op)));
  }
  for (const char* name : kSums) {
    if (!attention || problem.is_backward() || !options.given(name)) continue;
    return bad_argument(fmt::format("{} is for the GEMM operators and the backward, not for ring_attention", name));
  }
  problem.attention.dtype = problem.gemm.dtype;
  problem.attention.bm = problem.gemm.bm;
  problem.attention.chunk_rows = problem.gemm.chunk_rows;
  problem.attention.bn = problem.gemm.bn;
  problem.attention.fp32_partials = problem.gemm.fp32_partials;
  return Ok{};
}

}  // namespace mkernel::cli
