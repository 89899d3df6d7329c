// The nets that catch a wrong run: each must have no hole.
#include "cli/matrices.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace mkernel::cli {
namespace {

PlanSpec spec_of(Op op, Dtype dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  PlanSpec spec;
  spec.op = op;
  spec.topo = {2, 2};
  spec.m = m;
  spec.n = n;
  spec.k = k;
  spec.dtype = spec.partial = dtype;
  return spec;
}

TEST(Matrices, DigestSeesEveryByteOfEveryRank) {
  // 5 x 5 of two bytes: whole words and a rest.
  Matrices matrices(spec_of(Op::kGemmAllReduce, Dtype::kBf16, 5, 5, 3));
  matrices.fill(1, Fill::kUniform);
  matrices.poison();
  const std::uint64_t before = matrices.digest();
  for (const GemmArguments& rank : matrices.arguments()) {
    auto* bytes = static_cast<std::byte*>(rank.c.data);
    for (int i = 0; i < 50; ++i) {
      bytes[i] ^= std::byte{0x10};
      EXPECT_NE(matrices.digest(), before) << "byte " << i;
      bytes[i] ^= std::byte{0x10};
    }
  }
  EXPECT_EQ(matrices.digest(), before);
}

TEST(Matrices, PoisonedResultsFailTheCheckInEveryTypeAndOperator) {
  for (const Op op : {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      Matrices matrices(spec_of(op, dtype, 6, 7, 8));
      matrices.fill(1, Fill::kUniform);
      matrices.poison();
      EXPECT_FALSE(matrices.check().ok) << op_name(op) << " " << dtype_name(dtype);
    }
  }
}

TEST(Matrices, ZerosThatNobodyWroteFailTheCheckToo) {
  // With K = 0 the right result is zero, so only a poison that is no number shows a C that was not written.
  Matrices matrices(spec_of(Op::kGemmAllReduce, Dtype::kBf16, 4, 4, 0));
  matrices.fill(1, Fill::kUniform);
  matrices.poison();
  EXPECT_FALSE(matrices.check().ok);
}

TEST(Matrices, ARankWithOtherBitsIsNamed) {
  Matrices matrices(spec_of(Op::kGemmAllReduce, Dtype::kFp32, 4, 4, 4));
  matrices.fill(1, Fill::kUniform);
  matrices.poison();
  EXPECT_FALSE(matrices.first_different_rank());
  static_cast<std::byte*>(matrices.arguments()[2].c.data)[63] ^= std::byte{1};
  EXPECT_EQ(matrices.first_different_rank(), 2);
}

TEST(Matrices, SampledRowsGoFromTheFirstToTheLastWithoutRepeating) {
  const std::vector<std::int64_t> all = Matrices::rows_to_check(spec_of(Op::kGemmAllReduce, Dtype::kBf16, 100, 9, 9));
  EXPECT_EQ(all.size(), 100u);
  for (const std::int64_t m : {65, 127, 4096, 1'000'003}) {
    const std::int64_t n = (std::int64_t{1} << 33) / m;
    const auto rows = Matrices::rows_to_check(spec_of(Op::kGemmAllReduce, Dtype::kBf16, m, n, 1));
    ASSERT_EQ(rows.size(), 64u) << m;
    EXPECT_EQ(rows.front(), 0);
    EXPECT_EQ(rows.back(), m - 1);
    for (std::size_t i = 1; i < rows.size(); ++i) EXPECT_LT(rows[i - 1], rows[i]) << m;
  }
}

}  // namespace
}  // namespace mkernel::cli
