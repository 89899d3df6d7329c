// The consumers of attention: two warpgroups, 64 queries each, that take turns at the tensor cores, so that the softmax
// of one runs under the multiplications of the other. They know no plan, only what stands beside the keys.
//
// Scores of the next keys are computed together with the product of the last weights and values. The running state of a
// row is (O, m, l) as in attend_math.h, but that m is in units of log 2, and that l stays in four parts, one for each
// thread that has columns of the row.
#pragma once
#include "exec/cuda/attention_shared.cuh"

namespace mkernel {

// The running maximum and sum of a thread's two rows.
struct AttentionRowState {
  float m[2];      // largest score so far * log2(e)
  float l[2];      // sum of 2^(score - m) over this thread's columns
  float alpha[2];  // what the last keys have multiplied the sums before them with
};

template <class Config, class T>
struct AttentionConsumer {
  static constexpr int kDim = Config::kDim;
  static constexpr int kKeys = Config::kKeys;
  using Scores = Wgmma<T, kKeys, Major::kK>;
  using Values = WgmmaFromRegisters<T, kDim>;
  using Sums = float[kDim / 2];             // (64, D) over the warpgroup
  using Weights = float[kKeys / 2];         // (64, keys)
  using Packed = std::uint32_t[kKeys / 4];  // the same in T, as wgmma takes them

  const AttentionCall& call;
  AttentionShared<Config>& s;
  const EpochView epoch;
  const int wg;  // 0 or 1
  const std::int32_t lane = threadIdx.x % 32;
  const std::int32_t row0 = wg * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // and the one 8 below
  RingPosition<Config::kQStages> q{0, 0};
  RingPosition<Config::kKvStages> k{0, 0};
  RingPosition<Config::kKvStages> v{0, 0};

  __device__ __forceinline__ void run_wg() {
    Sums o;
    Weights x;
    Packed p;
    AttentionRowState row;
    if (wg == 1) order_arrive_wg(kOrderBarrier);  // warpgroup 0 is first
    for (;;) {
      s.k_full[k.slot].wait(k.phase);
      const AttentionControl first = s.control[k.slot];
      if ((first.flags & kLeave) != 0) break;
      begin(o, row, first);
      std::uint32_t flags = first.flags;
      if ((flags & kNoKeys) != 0) {
        free_stage(s.k_empty, k);
      } else {
        s.q_full[q.slot].wait(q.phase);
        first_keys(o, x, p, row, flags);
        while ((flags & kLastKeys) == 0) {
          if ((flags & kMaskNext) != 0) {
            flags = next_keys<true>(o, x, p, row);
          } else {
            do {
              flags = next_keys<false>(o, x, p, row);
            } while ((flags & (kLastKeys | kMaskNext)) == 0);
          }
        }
        // The producer fetches the next tile's queries behind our last product.
        free_stage(s.q_empty, q);
        last_values(o, p);
      }
      if ((flags & kParkTile) != 0) {
        park(o, row, first.number);
      } else if ((flags & kDropTile) == 0) {
        finish(o, row, first);
      }
    }
  }

 private:
  template <int kSlots>
  __device__ __forceinline__ void free_stage(Mbarrier* empty, RingPosition<kSlots>& at) const {
    release_warp(empty[at.slot]);
    at.advance();
  }

  // --- multiplications ---

  __device__ __forceinline__ std::uint64_t q_descriptor() const {
    return box_descriptor<Major::kK, kAttentionRows * 128>(shared_address(s.q[q.slot]) + wg * 64 * 128);
  }
  __device__ __forceinline__ std::uint64_t k_descriptor() const {
    return box_descriptor<Major::kK, kKeys * 128>(shared_address(s.k[k.slot]));
  }
  __device__ __forceinline__ std::uint64_t v_descriptor() const {
    return box_descriptor<Major::kMn, kKeys * 128>(shared_address(s.v[v.slot]));
  }
  __device__ __forceinline__ static void start_scores(std::uint64_t q_desc, std::uint64_t k_desc, Weights& x) {
    constexpr int kQBox = kAttentionRows * 128 >> 4;
    constexpr int kKBox = kKeys * 128 >> 4;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      Scores::mma_wg(q_desc + i / 4 * kQBox + i % 4 * 2, k_desc + i / 4 * kKBox + i % 4 * 2, x, i > 0);
    }
    cute::warpgroup_commit_batch();
  }
  __device__ __forceinline__ static void start_values(const Packed& p, std::uint64_t v_desc, Sums& o) {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) Values::mma_wg(p + 4 * i, v_desc + i * (16 * 128 >> 4), o);
    cute::warpgroup_commit_batch();
  }

  __device__ __forceinline__ void first_keys(Sums& o, Weights& x, Packed& p, AttentionRowState& row,
                                             std::uint32_t flags) {
    const std::uint64_t q_desc = q_descriptor();
    const std::uint64_t k_desc = k_descriptor();
    order_sync_wg(kOrderBarrier + wg);
    fence_registers(x);
    cute::warpgroup_arrive();
    start_scores(q_desc, k_desc, x);
    order_arrive_wg(kOrderBarrier + (wg ^ 1));
    cute::warpgroup_wait<0>();
    fence_registers(x);
    const AttentionControl control = s.control[k.slot];
    free_stage(s.k_empty, k);
    if ((flags & kMaskKeys) != 0) mask(x, control);
    softmax(x, row);
    rescale(o, row);
    pack(x, p);
  }

  // Only warpgroup 0 waits for keys and values; its turn at the barrier tells warpgroup 1 (7 % faster, H200).
  template <bool kMasked>
  __device__ __forceinline__ std::uint32_t next_keys(Sums& o, Weights& x, Packed& p, AttentionRowState& row) {
    const std::uint64_t q_desc = q_descriptor();
    const std::uint64_t k_desc = k_descriptor();
    const std::uint64_t v_desc = v_descriptor();
    if (wg == 0) s.k_full[k.slot].wait(k.phase);
    order_sync_wg(kOrderBarrier + wg);
    const AttentionControl control = s.control[k.slot];
    fence_registers(x);
    fence_registers(o);
    fence_registers(p);
    cute::warpgroup_arrive();
    start_scores(q_desc, k_desc, x);
    if (wg == 0) s.v_full[v.slot].wait(v.phase);
    cute::warpgroup_arrive();
    start_values(p, v_desc, o);
    order_arrive_wg(kOrderBarrier + (wg ^ 1));
    cute::warpgroup_wait<1>();
    fence_registers(x);
    free_stage(s.k_empty, k);
    if constexpr (kMasked) mask(x, control);
    softmax(x, row);
    cute::warpgroup_wait<0>();
    fence_registers(o);
    fence_registers(p);
    free_stage(s.v_empty, v);
    rescale(o, row);
    pack(x, p);
    return control.flags;
  }

  __device__ __forceinline__ void last_values(Sums& o, Packed& p) {
    const std::uint64_t v_desc = v_descriptor();
    s.v_full[v.slot].wait(v.phase);
    fence_registers(o);
    fence_registers(p);
    cute::warpgroup_arrive();
    start_values(p, v_desc, o);
    cute::warpgroup_wait<0>();
    fence_registers(o);
    free_stage(s.v_empty, v);
  }

  // --- softmax ---

  // What a row does not see becomes -infinity.
  __device__ __forceinline__ void mask(Weights& x, const AttentionControl& control) const {
    std::uint32_t first[2];  // this thread's first column, counted from the first that the row sees
    std::uint32_t width[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 range = s.ranges[q.slot][row0 + 8 * r];
      const std::int32_t end = min(range.y, control.end);
      width[r] = static_cast<std::uint32_t>(max(end - range.x, 0));
      first[r] = static_cast<std::uint32_t>(control.key + lane % 4 * 2 - range.x);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const std::uint32_t col = i / 4 * 8 + i % 2;
      const int r = i / 2 % 2;
      if (first[r] + col >= width[r]) x[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ void softmax(Weights& x, AttentionRowState& row) const {
    const float scale = call.scale_log2;
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = x[2 * r];
      float odd = x[2 * r + 1];
#pragma unroll
      for (int i = 1; i < kKeys / 8; ++i) {
        even = fmaxf(even, x[4 * i + 2 * r]);
        odd = fmaxf(odd, x[4 * i + 2 * r + 1]);
      }
      float most = fmaxf(even, odd);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      // Rounded once, and used as it is everywhere, so that its error cancels.
      const float now = fmaxf(row.m[r], __fmul_rn(most, scale));
      base[r] = now == -INFINITY ? 0.0f : now;  // nothing was seen so far: weights 0, not exp(inf - inf)
      row.alpha[r] = exp2_approx(row.m[r] - base[r]);
      row.m[r] = now;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = row.l[r] * row.alpha[r];
      float odd = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        float& a = x[4 * i + 2 * r];
        float& b = x[4 * i + 2 * r + 1];
        a = exp2_approx(fmaf(a, scale, -base[r]));
        b = exp2_approx(fmaf(b, scale, -base[r]));
        even += a;
        odd += b;
      }
      row.l[r] = even + odd;
    }
  }
  __device__ __forceinline__ static void rescale(Sums& o, const AttentionRowState& row) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] *= row.alpha[i / 2 % 2];
  }
  __device__ __forceinline__ static void pack(const Weights& x, Packed& p) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = pack_pair(x[2 * i], x[2 * i + 1], T{});
  }

  // --- the ends of a run ---

  // This thread's sums in kState lie 128 threads apart, four at a time: eight columns of two rows.
  __device__ __forceinline__ float4* parked_sums(std::int32_t number) const {
    const DeviceRank& rank = call.rank;
    auto* g_state = reinterpret_cast<float*>(rank.heaps[rank.gpu] + epoch.buffer_begin(rank, Buffer::kState));
    return reinterpret_cast<float4*>(g_state + number * call.state_elements) + wg * (call.dim / 8) * 128 +
           threadIdx.x % 128;
  }
  __device__ __forceinline__ float4* parked_rows(std::int32_t number) const {
    return call.rows_state + std::int64_t{number} * kConsumerThreads + wg * 128 + threadIdx.x % 128;
  }

  // A tile stays with its CTA, and each thread reads what it has written itself.
  __device__ __forceinline__ void begin(Sums& o, AttentionRowState& row, const AttentionControl& first) const {
    row.alpha[0] = row.alpha[1] = 1;
    if ((first.flags & kResumeTile) == 0) {
      row.m[0] = row.m[1] = -INFINITY;
      row.l[0] = row.l[1] = 0;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] = 0;
      return;
    }
    const float4 rows = __ldcg(parked_rows(first.number));
    row.m[0] = rows.x, row.m[1] = rows.y, row.l[0] = rows.z, row.l[1] = rows.w;
    const float4* g_sums = parked_sums(first.number);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float4 sums = 8 * i < call.dim ? __ldcg(g_sums + i * 128) : float4{};
      o[4 * i] = sums.x, o[4 * i + 1] = sums.y, o[4 * i + 2] = sums.z, o[4 * i + 3] = sums.w;
    }
  }
  __device__ __forceinline__ void park(const Sums& o, const AttentionRowState& row, std::int32_t number) const {
    __stcg(parked_rows(number), float4{row.m[0], row.m[1], row.l[0], row.l[1]});
    float4* g_sums = parked_sums(number);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      if (8 * i < call.dim) __stcg(g_sums + i * 128, float4{o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]});
    }
  }

  __device__ __forceinline__ void finish(const Sums& o, const AttentionRowState& row,
                                         const AttentionControl& tile) const {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = row.l[r];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      inverse[r] = total == 0 ? 0.0f : 1.0f / total;  // nothing was seen: O is 0 already
      const std::int32_t at = row0 + 8 * r;
      if (call.lse != nullptr && lane % 4 == 0 && at < tile.rows) {
        constexpr float kLog2 = 0.693147180559945309f;
        const float lse = total == 0 ? -INFINITY : (row.m[r] + log2_approx(total)) * kLog2;
        call.lse[(std::int64_t{tile.batch} * call.heads + tile.head) * call.q_tokens + tile.token + at] = lse;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t at = row0 + 8 * r;
      auto* g_row = static_cast<T*>(call.o_view.data) + offset_in(call.o_view, tile.batch, tile.head, tile.token + at) +
                    lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        const Bytes16 unit = row_unit(o, i, r, inverse[r]);
        if (at < tile.rows && i * 32 + lane % 4 * 8 < call.dim) st_global_16(g_row + i * 32, unit);
      }
    }
  }
  // Of 32 columns of a row, which four threads hold two by two, this thread's eight neighbours.
  __device__ __forceinline__ Bytes16 row_unit(const Sums& o, int i, int r, float inverse) const {
    std::uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = (4 * i + j) * 4 + 2 * r;
      w[j] = pack_pair(o[at] * inverse, o[at + 1] * inverse, T{});
    }
    const bool odd = (lane & 1) != 0;
    const bool high = (lane & 2) != 0;
    swap(w[0], w[1], odd, 1);
    swap(w[2], w[3], odd, 1);
    swap(w[0], w[2], high, 2);
    swap(w[1], w[3], high, 2);
    return {w[0], w[1], w[2], w[3]};
  }
  // Exchanges `b` of one thread for `a` of the other.
  __device__ __forceinline__ static void swap(std::uint32_t& a, std::uint32_t& b, bool upper, int distance) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? a : b, distance);
    if (upper) {
      a = got;
    } else {
      b = got;
    }
  }
};

}  // namespace mkernel
