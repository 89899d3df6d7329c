#include "cli/ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "world/world_impl.h"

namespace mkernel::cli {

Status Ranks::confirm(World& world, const std::string& what, const Status& status) const {
  return several() ? world.impl()->group->confirm(what, status) : status;
}

Status Ranks::same_bits(World& world, std::uint64_t digest) const {
  if (!several()) return Ok{};
  const auto all = world.impl()->group->gather("compare C", {static_cast<std::int64_t>(digest)});
  if (!all) return all.error();
  for (std::size_t rank = 1; rank < all->size(); ++rank) {
    if ((*all)[rank] == (*all)[0]) continue;
    return Error{ErrorKind::kCheckFailed, fmt::format("C of rank {} has other bits than C of rank 0", rank)};
  }
  return Ok{};
}

Result<CheckReport> Ranks::worst(World& world, const CheckReport& own, bool rows_divided) const {
  if (!several()) return own;
  const auto all = world.impl()->group->gather(
      "compare their checks",
      {std::bit_cast<std::int64_t>(own.max_rel_error), std::bit_cast<std::int64_t>(own.max_abs_error),
       std::bit_cast<std::int64_t>(own.worst_ratio), own.worst_row, own.worst_col, own.checked_rows, own.ok ? 1 : 0,
       std::bit_cast<std::int64_t>(own.rel_bound)});
  if (!all) return all.error();
  CheckReport worst;
  for (const std::vector<std::int64_t>& one : *all) {
    worst.max_rel_error = std::max(worst.max_rel_error, std::bit_cast<double>(one[0]));
    worst.max_abs_error = std::max(worst.max_abs_error, std::bit_cast<double>(one[1]));
    const auto ratio = std::bit_cast<double>(one[2]);
    // Also true when it is not a number.
    if (!(ratio <= worst.worst_ratio)) {
      worst.worst_ratio = ratio;
      worst.worst_row = one[3];
      worst.worst_col = one[4];
    }
    worst.checked_rows = rows_divided ? worst.checked_rows + one[5] : std::max(worst.checked_rows, one[5]);
    worst.ok = worst.ok && one[6] != 0;
    worst.rel_bound = std::max(worst.rel_bound, std::bit_cast<double>(one[7]));
  }
  return worst;
}

}  // namespace mkernel::cli
