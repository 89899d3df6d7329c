// Uses the public headers of an installed mKernel.
#include <cstdio>

#include "mkernel/result.h"
#include "mkernel/types.h"

int main() {
  const mkernel::Result<int> result = 4;
  if (!result.ok() || mkernel::dtype_bytes(mkernel::Dtype::kBf16) != 2) return 1;
  const std::string_view name = mkernel::op_name(mkernel::Op::kGemmAllReduce);
  std::printf("%.*s\n", static_cast<int>(name.size()), name.data());
  return 0;
}
