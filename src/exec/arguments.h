// One rank's matrices or tensors for one call of any operator.
#pragma once
#include <variant>

#include "mkernel/mkernel.h"

namespace mkernel {

using Arguments = std::variant<GemmArguments, AttentionArguments, AttentionBackwardArguments>;

}  // namespace mkernel
