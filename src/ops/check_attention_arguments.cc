#include "ops/check_attention_arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace mkernel {
namespace {

constexpr std::int64_t kMaxExtent = std::int64_t{1} << 58;  // elements; leaves room for bytes in 63 bits

// Where a tensor lies, in bytes; with gaps of strides inside.
struct Place {
  std::int32_t rank = 0;
  const char* name = "?";
  bool output = false;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct Want {
  const char* name;
  const AttentionTensor& tensor;
  std::int64_t heads;
  std::int64_t tokens;
  bool output;
};

// The offset of the last element; kMaxExtent + 1 when it is beyond all bounds. Strides are not negative.
std::int64_t extent(const AttentionTensor& t) {
  std::int64_t last = t.dim - 1;
  for (const auto& [count, stride] :
       {std::pair{t.batch, t.batch_stride}, {t.heads, t.head_stride}, {t.tokens, t.token_stride}}) {
    if (count > 1 && stride > kMaxExtent / (count - 1)) return kMaxExtent + 1;
    last += (count - 1) * stride;
    if (last > kMaxExtent) return kMaxExtent + 1;
  }
  return last;
}

// Whether some order of its dimensions, each one around those before it, never comes back to a place.
bool overlaps_itself(const AttentionTensor& t) {
  std::pair<std::int64_t, std::int64_t> axes[] = {
      {t.batch_stride, t.batch}, {t.head_stride, t.heads}, {t.token_stride, t.tokens}};
  std::sort(std::begin(axes), std::end(axes));
  std::int64_t last = t.dim - 1;
  for (const auto& [stride, count] : axes) {
    if (count <= 1) continue;
    if (stride <= last) return true;
    last += (count - 1) * stride;
  }
  return false;
}

Status check_tensor(std::int32_t rank, const Want& want, const AttentionSpec& spec, Dtype dtype) {
  const AttentionTensor& t = want.tensor;
  const std::string who = fmt::format("rank {}: {}", rank, want.name);
  if (t.batch != spec.batch || t.heads != want.heads || t.tokens != want.tokens || t.dim != spec.dim) {
    return bad_argument(fmt::format("{} is {} x {} x {} x {}: it must be {} x {} x {} x {} (batch, heads, tokens, dim)",
                                    who, t.batch, t.heads, t.tokens, t.dim, spec.batch, want.heads, want.tokens,
                                    spec.dim));
  }
  if (t.tokens == 0) return Ok{};
  if (t.batch_stride < 0 || t.head_stride < 0 || t.token_stride < 0) {
    return bad_argument(fmt::format("{} has strides {}, {} and {}: they must be 0 or more", who, t.batch_stride,
                                    t.head_stride, t.token_stride));
  }
  if (t.data == nullptr) return bad_argument(fmt::format("{} has no data: it needs a pointer that is not null", who));
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  const std::int64_t bytes = dtype_bytes(dtype);
  if (address % static_cast<std::uintptr_t>(bytes) != 0) {
    return bad_argument(fmt::format("{} starts at address {:#x}: elements of {} must be aligned to {} bytes", who,
                                    address, dtype_name(dtype), bytes));
  }
  if (extent(t) > kMaxExtent ||
      static_cast<std::uint64_t>((extent(t) + 1) * bytes) > UINTPTR_MAX - std::uint64_t{address}) {
    return bad_argument(fmt::format("{} has strides {}, {} and {}: it would end beyond all addresses", who,
                                    t.batch_stride, t.head_stride, t.token_stride));
  }
  if (want.output && overlaps_itself(t)) {
    return bad_argument(fmt::format("{} has strides {}, {} and {}, so that some of its elements lie in the same place",
                                    who, t.batch_stride, t.head_stride, t.token_stride));
  }
  return Ok{};
}

Status check_ends(std::int32_t rank, const char* name, const std::int32_t* ends, std::int32_t sequences,
                  std::int64_t tokens) {
  const auto refuse = [&](const std::string& why) {
    return bad_argument(fmt::format("rank {}: {} {}", rank, name, why));
  };
  if (ends == nullptr) return refuse("is null: packed sequences need their ends");
  if (ends[0] != 0) return refuse(fmt::format("begins with {}: it must begin with 0", ends[0]));
  for (std::int32_t i = 0; i < sequences; ++i) {
    if (ends[i + 1] < ends[i]) return refuse(fmt::format("falls from {} to {}: it must not", ends[i], ends[i + 1]));
  }
  if (ends[sequences] != tokens) {
    return refuse(fmt::format("ends with {}: it must end with the {} tokens of all ranks", ends[sequences], tokens));
  }
  return Ok{};
}

template <class Arguments>
Status check_sequences(const AttentionSpec& spec, std::int32_t rank, const Arguments& arguments) {
  if (!spec.packed) {
    if (arguments.cu_seqlens_q == nullptr && arguments.cu_seqlens_k == nullptr && arguments.sequences == 0) return Ok{};
    return bad_argument(
        fmt::format("rank {}: cu_seqlens are given, but the operator was not made for packed sequences", rank));
  }
  if (arguments.sequences < 1) {
    return bad_argument(fmt::format("rank {}: sequences is {}: it must be at least 1", rank, arguments.sequences));
  }
  if (Status status = check_ends(rank, "cu_seqlens_q", arguments.cu_seqlens_q, arguments.sequences, spec.seq_q);
      !status.ok()) {
    return status;
  }
  return check_ends(rank, "cu_seqlens_k", arguments.cu_seqlens_k, arguments.sequences, spec.seq_k);
}

// What a call of either direction brings. `lse` is 0 where there is none.
struct Call {
  std::vector<Want> wants;
  std::uintptr_t lse = 0;
  bool lse_is_output = false;
};

struct Tokens {
  std::int64_t q, k;
};
Tokens tokens_of(const Plan& plan, std::int32_t rank) {
  const AttentionSpec& spec = plan.spec().attention;
  return {spec.q_split(plan.topo()).tokens(rank), spec.k_split(plan.topo()).tokens(rank)};
}

Call call_of(const Plan& plan, std::int32_t rank, const AttentionArguments& a) {
  const AttentionSpec& spec = plan.spec().attention;
  const Tokens tokens = tokens_of(plan, rank);
  return {{{"Q", a.q, spec.heads, tokens.q, false},
           {"K", a.k, spec.kv_heads, tokens.k, false},
           {"V", a.v, spec.kv_heads, tokens.k, false},
           {"O", a.o, spec.heads, tokens.q, true}},
          reinterpret_cast<std::uintptr_t>(a.lse),
          true};
}
Call call_of(const Plan& plan, std::int32_t rank, const AttentionBackwardArguments& a) {
  const AttentionSpec& spec = plan.spec().attention;
  const Tokens tokens = tokens_of(plan, rank);
  return {{{"Q", a.q, spec.heads, tokens.q, false},
           {"K", a.k, spec.kv_heads, tokens.k, false},
           {"V", a.v, spec.kv_heads, tokens.k, false},
           {"O", a.o, spec.heads, tokens.q, false},
           {"dO", a.d_o, spec.heads, tokens.q, false},
           {"dQ", a.dq, spec.heads, tokens.q, true},
           {"dK", a.dk, spec.kv_heads, tokens.k, true},
           {"dV", a.dv, spec.kv_heads, tokens.k, true}},
          reinterpret_cast<std::uintptr_t>(a.lse),
          false};
}

template <class Arguments>
Status check_rank(const Plan& plan, std::int32_t rank, const Arguments& arguments, std::vector<Place>& places) {
  const AttentionSpec& spec = plan.spec().attention;
  const Dtype dtype = plan.spec().dtype;
  const std::int64_t q_tokens = tokens_of(plan, rank).q;
  const Call call = call_of(plan, rank, arguments);
  for (const Want& want : call.wants) {
    if (Status status = check_tensor(rank, want, spec, dtype); !status.ok()) return status;
    if (want.tokens == 0) continue;
    const auto begin = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(want.tensor.data));
    const auto bytes = static_cast<std::uint64_t>((extent(want.tensor) + 1) * dtype_bytes(dtype));
    places.push_back({rank, want.name, want.output, begin, begin + bytes});
  }
  if (call.lse == 0 && !call.lse_is_output && q_tokens > 0) {
    return bad_argument(fmt::format("rank {}: lse is null: the backward needs what the forward has given", rank));
  }
  if (call.lse != 0 && q_tokens > 0) {
    if (call.lse % sizeof(float) != 0) {
      return bad_argument(
          fmt::format("rank {}: lse starts at address {:#x}: fp32 must be aligned to 4 bytes", rank, call.lse));
    }
    const auto bytes = static_cast<std::uint64_t>(4 * spec.batch * spec.heads * q_tokens);
    places.push_back({rank, "lse", call.lse_is_output, call.lse, call.lse + bytes});
  }
  return check_sequences(spec, rank, arguments);
}

// Outputs whose elements interleave with others' count as overlapping.
Status check_overlaps(std::vector<Place>& places) {
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.begin < b.begin; });
  std::vector<const Place*> open;
  for (const Place& place : places) {
    std::erase_if(open, [&](const Place* p) { return p->end <= place.begin; });
    for (const Place* other : open) {
      if (!place.output && !other->output) continue;
      const Place& out = place.output ? place : *other;
      const Place& with = place.output ? *other : place;
      return bad_argument(
          fmt::format("rank {}: {} shares memory with {} of rank {}: outputs must lie apart from all "
                      "inputs and other outputs",
                      out.rank, out.name, with.name, with.rank));
    }
    open.push_back(&place);
  }
  return Ok{};
}

bool same_ends(const std::int32_t* a, const std::int32_t* b, std::int32_t sequences) {
  return std::equal(a, a + sequences + 1, b);
}

template <class Arguments>
Status check_one(const Plan& plan, std::int32_t rank, const Arguments& arguments) {
  std::vector<Place> places;
  if (Status status = check_rank(plan, rank, arguments, places); !status.ok()) return status;
  return check_overlaps(places);
}

template <class Arguments>
Status check_all(const Plan& plan, std::span<const Arguments> arguments) {
  const std::int32_t world = plan.topo().world();
  if (arguments.size() != static_cast<std::size_t>(world)) {
    return bad_argument(
        fmt::format("arguments has {} entries: it must have one for each of the {} ranks", arguments.size(), world));
  }
  std::vector<Place> places;
  for (std::int32_t rank = 0; rank < world; ++rank) {
    if (Status status = check_rank(plan, rank, arguments[rank], places); !status.ok()) return status;
    if (!plan.spec().attention.packed) continue;
    const Arguments& first = arguments[0];
    const Arguments& own = arguments[rank];
    if (own.sequences != first.sequences || !same_ends(own.cu_seqlens_q, first.cu_seqlens_q, own.sequences) ||
        !same_ends(own.cu_seqlens_k, first.cu_seqlens_k, own.sequences)) {
      return bad_argument(fmt::format("rank {}: cu_seqlens are not those of rank 0: they must be the same", rank));
    }
  }
  return check_overlaps(places);
}

}  // namespace

Status check_rank_arguments(const Plan& plan, std::int32_t rank, const AttentionArguments& arguments) {
  return check_one(plan, rank, arguments);
}
Status check_rank_arguments(const Plan& plan, std::int32_t rank, const AttentionBackwardArguments& arguments) {
  return check_one(plan, rank, arguments);
}

Status check_arguments(const Plan& plan, std::span<const AttentionArguments> arguments) {
  return check_all(plan, arguments);
}
Status check_arguments(const Plan& plan, std::span<const AttentionBackwardArguments> arguments) {
  return check_all(plan, arguments);
}

}  // namespace mkernel
