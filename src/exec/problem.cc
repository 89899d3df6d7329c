#include "exec/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/half.h"
#include "exec/fill.h"

namespace mkernel {
namespace {

constexpr std::byte kCanary{0x5a};

float round_to(Dtype dtype, float value) {
  switch (dtype) {
    case Dtype::kBf16: return bf16_to_float(float_to_bf16(value));
    case Dtype::kFp16: return fp16_to_float(float_to_fp16(value));
    case Dtype::kFp32: return value;
  }
  return value;
}

float load(Dtype dtype, const std::byte* at) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return dtype == Dtype::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

}  // namespace

Problem::Problem(const Plan& plan, std::uint64_t seed, std::int64_t padding)
    : plan_(plan), padding_(padding), a_stride_(plan.spec().k + padding), b_stride_(plan.spec().n + padding) {
  const PlanSpec& spec = plan_.spec();
  const auto size = static_cast<std::size_t>(dtype_bytes(spec.dtype));
  const auto make = [&](std::int64_t rows, std::int64_t cols, std::int64_t stride, std::uint64_t s,
                        std::vector<std::byte>& bytes, std::vector<float>& values) {
    bytes.assign(static_cast<std::size_t>(rows * stride) * size, kCanary);
    fill_random({bytes.data(), spec.dtype, rows, cols, stride, 1}, s, Fill::kInteger);
    values.resize(static_cast<std::size_t>(rows * cols));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        values[static_cast<std::size_t>(i * cols + j)] =
            load(spec.dtype, bytes.data() + static_cast<std::size_t>(i * stride + j) * size);
      }
    }
  };
  make(spec.m, spec.k, a_stride_, 2 * seed, a_, a_values_);
  make(spec.k, spec.n, b_stride_, 2 * seed + 1, b_, b_values_);
  for (std::int32_t rank = 0; rank < plan_.topo().world(); ++rank) {
    const Plan::Extent extent = plan_.c_extent(rank);
    c_.emplace_back(static_cast<std::size_t>(extent.rows * (extent.cols + padding_)) * size, kCanary);
  }
}

Matrix Problem::view(std::vector<std::byte>& bytes, Plan::Extent extent, std::int64_t row, std::int64_t col,
                     std::int64_t stride) {
  if (extent.rows == 0 || extent.cols == 0) return {nullptr, extent.rows, extent.cols, stride, 1};
  const std::int64_t first = (row * stride + col) * dtype_bytes(plan_.spec().dtype);
  return {bytes.data() + first, extent.rows, extent.cols, stride, 1};
}

GemmArguments Problem::arguments(std::int32_t rank) {
  const PlanSpec& spec = plan_.spec();
  const Plan::Extent c = plan_.c_extent(rank);
  GemmArguments result;
  if (spec.op == Op::kAllGatherGemm) {
    result.a = view(a_, plan_.a_extent(rank), spec.row_split().begin(rank), 0, a_stride_);
    result.b = view(b_, plan_.b_extent(rank), 0, spec.col_split().begin(rank), b_stride_);
  } else {
    result.a = view(a_, plan_.a_extent(rank), 0, spec.k_split().begin(rank), a_stride_);
    result.b = view(b_, plan_.b_extent(rank), spec.k_split().begin(rank), 0, b_stride_);
  }
  result.c = view(c_[static_cast<std::size_t>(rank)], c, 0, 0, c.cols + padding_);
  return result;
}

std::vector<GemmArguments> Problem::matrices() {
  std::vector<GemmArguments> result;
  for (std::int32_t rank = 0; rank < plan_.topo().world(); ++rank) result.push_back(arguments(rank));
  return result;
}

std::vector<Arguments> Problem::arguments() {
  const std::vector<GemmArguments> all = matrices();
  return {all.begin(), all.end()};
}

// The design's roundings: partial, node sum, result. A row at a time, so that the inner loops run along memory.
void Problem::expect_row(std::int64_t row, float* expected) const {
  const PlanSpec& spec = plan_.spec();
  const auto cols = static_cast<std::size_t>(spec.n);
  std::vector<float> product(cols);
  const auto multiply = [&](std::int64_t begin, std::int64_t end) {
    std::fill(product.begin(), product.end(), 0.0f);
    for (std::int64_t k = begin; k < end; ++k) {
      const float a = a_values_[static_cast<std::size_t>(row * spec.k + k)];
      const float* b = b_values_.data() + static_cast<std::size_t>(k) * cols;
      for (std::size_t col = 0; col < cols; ++col) product[col] += a * b[col];
    }
  };
  const auto add_rounded = [&](Dtype dtype, const std::vector<float>& from, std::vector<float>& to) {
    for (std::size_t col = 0; col < cols; ++col) to[col] += round_to(dtype, from[col]);
  };
  std::vector<float> total(cols, 0.0f);
  if (spec.op == Op::kAllGatherGemm || spec.topo.world() == 1) {
    multiply(0, spec.k);
    total = product;
  } else {
    for (std::int32_t node = 0; node < spec.topo.nodes; ++node) {
      std::vector<float> sum(cols, 0.0f);
      for (std::int32_t gpu = 0; gpu < spec.topo.gpus; ++gpu) {
        const std::int32_t rank = spec.topo.rank_of(node, gpu);
        const std::int64_t begin = spec.k_split().begin(rank);
        multiply(begin, begin + spec.k_split().size(rank));
        add_rounded(spec.partial, product, sum);
      }
      add_rounded(spec.topo.nodes > 1 ? spec.partial : Dtype::kFp32, sum, total);
    }
  }
  for (std::size_t col = 0; col < cols; ++col) expected[col] = round_to(spec.dtype, total[col]);
}

std::optional<std::string> Problem::mismatch() {
  const PlanSpec& spec = plan_.spec();
  const auto size = static_cast<std::size_t>(dtype_bytes(spec.dtype));
  if (expected_.empty()) {
    expected_.resize(static_cast<std::size_t>(spec.m * spec.n));
    for (std::int64_t row = 0; row < spec.m; ++row) expect_row(row, expected_.data() + row * spec.n);
  }
  for (std::int32_t rank = 0; rank < plan_.topo().world(); ++rank) {
    const Plan::Extent extent = plan_.c_extent(rank);
    const std::int64_t stride = extent.cols + padding_;
    const std::int64_t row0 = spec.op == Op::kGemmReduceScatter ? spec.row_split().begin(rank) : 0;
    const std::int64_t col0 = spec.op == Op::kAllGatherGemm ? spec.col_split().begin(rank) : 0;
    const std::vector<std::byte>& bytes = c_[static_cast<std::size_t>(rank)];
    for (std::int64_t i = 0; i < extent.rows; ++i) {
      const std::byte* line = bytes.data() + static_cast<std::size_t>(i * stride) * size;
      for (std::int64_t j = 0; j < extent.cols; ++j) {
        const float got = load(spec.dtype, line + static_cast<std::size_t>(j) * size);
        const float want = expected_[static_cast<std::size_t>((row0 + i) * spec.n + col0 + j)];
        if (got == want) continue;
        return fmt::format("rank {} C[{}, {}] is {}, but must be {}", rank, i, j, got, want);
      }
      const std::byte* pad = line + static_cast<std::size_t>(extent.cols) * size;
      const std::byte* end = line + static_cast<std::size_t>(stride) * size;
      if (std::any_of(pad, end, [](std::byte b) { return b != kCanary; })) {
        return fmt::format("rank {} wrote beside row {} of C", rank, i);
      }
    }
  }
  return std::nullopt;
}

}  // namespace mkernel
