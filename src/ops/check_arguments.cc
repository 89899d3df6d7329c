#include "ops/check_arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace mkernel {
namespace {

constexpr std::int64_t kMaxExtent = std::int64_t{1} << 58;  // elements; leaves room for bytes in 63 bits

// Where a matrix lies, in bytes: `rows` runs of `run` bytes each, `pitch` apart. Runs may hold gaps.
struct Place {
  std::int32_t rank = 0;
  char name = '?';
  bool output = false;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t pitch = 0;
  std::uint64_t run = 0;
};

// The offset of the last element, in elements; kMaxExtent + 1 when it is beyond all bounds. Strides are not negative.
std::int64_t extent(const Matrix& m) {
  const auto last = [](std::int64_t count, std::int64_t stride) {
    return count > 1 && stride > kMaxExtent / (count - 1) ? kMaxExtent + 1
                                                          : std::max<std::int64_t>(count - 1, 0) * stride;
  };
  return std::min(last(m.rows, m.row_stride) + last(m.cols, m.col_stride), kMaxExtent + 1);
}

// Whether some way of walking the matrix, rows in columns or columns in rows, never comes back.
bool overlaps_itself(const Matrix& m) {
  const auto nested = [](std::int64_t inner, std::int64_t inner_stride, std::int64_t outer, std::int64_t outer_stride) {
    if (inner > 1 && inner_stride < 1) return false;
    return outer <= 1 || outer_stride > (inner - 1) * inner_stride;
  };
  return !nested(m.cols, m.col_stride, m.rows, m.row_stride) && !nested(m.rows, m.row_stride, m.cols, m.col_stride);
}

Place place_of(std::int32_t rank, char name, const Matrix& m, std::int64_t element_bytes) {
  Place place;
  place.rank = rank;
  place.name = name;
  place.output = name == 'C';
  place.begin = reinterpret_cast<std::uintptr_t>(m.data);
  place.end = place.begin + static_cast<std::uint64_t>((extent(m) + 1) * element_bytes);
  const bool by_rows = m.row_stride >= m.col_stride;
  const std::int64_t pitch = by_rows ? m.row_stride : m.col_stride;
  const std::int64_t run = by_rows ? (m.cols - 1) * m.col_stride + 1 : (m.rows - 1) * m.row_stride + 1;
  place.pitch = static_cast<std::uint64_t>(pitch * element_bytes);
  place.run = static_cast<std::uint64_t>(run * element_bytes);
  return place;
}

// Never false for places that share a byte. Two parts of one larger matrix side by side, as columns of a shared C, have
// the same pitch and are found apart; other interleaved matrices count as overlapping.
bool overlap(const Place& a, const Place& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (a.pitch != b.pitch || a.run > a.pitch || b.run > b.pitch) return true;
  const std::uint64_t shift =
      a.begin <= b.begin ? (b.begin - a.begin) % a.pitch : (a.pitch - (a.begin - b.begin) % a.pitch) % a.pitch;
  return shift < a.run || shift + b.run > a.pitch;
}

Status check_matrix(std::int32_t rank, char name, const Matrix& m, const Plan::Extent& want, Dtype dtype) {
  const std::string who = fmt::format("rank {}: {}", rank, name);
  if (m.rows != want.rows || m.cols != want.cols) {
    return bad_argument(fmt::format("{} is {} x {}: it must be {} x {}", who, m.rows, m.cols, want.rows, want.cols));
  }
  if (m.row_stride < 0 || m.col_stride < 0) {
    return bad_argument(
        fmt::format("{} has strides {} and {}: they must be 0 or more", who, m.row_stride, m.col_stride));
  }
  if (want.rows == 0 || want.cols == 0) return Ok{};
  if (m.data == nullptr) {
    return bad_argument(
        fmt::format("{} has no data: {} x {} elements need a pointer that is not null", who, m.rows, m.cols));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(m.data);
  const std::int64_t bytes = dtype_bytes(dtype);
  if (address % static_cast<std::uintptr_t>(bytes) != 0) {
    return bad_argument(fmt::format("{} starts at address {:#x}: elements of {} must be aligned to {} bytes", who,
                                    address, dtype_name(dtype), bytes));
  }
  if (extent(m) > kMaxExtent ||
      static_cast<std::uint64_t>((extent(m) + 1) * bytes) > UINTPTR_MAX - std::uint64_t{address}) {
    return bad_argument(fmt::format("{} has strides {} and {}: its {} x {} elements would end beyond all addresses",
                                    who, m.row_stride, m.col_stride, m.rows, m.cols));
  }
  if (name == 'C' && overlaps_itself(m)) {
    return bad_argument(
        fmt::format("{} has strides {} and {}, so that some of its {} x {} elements lie in the same "
                    "place: row-major has strides {} or more and 1, its transpose 1 and {} or more",
                    who, m.row_stride, m.col_stride, m.rows, m.cols, m.cols, m.rows));
  }
  return Ok{};
}

Status check_matrices(const Plan& plan, std::int32_t rank, const GemmArguments& arguments, std::vector<Place>& places) {
  const struct {
    char name;
    const Matrix& matrix;
    Plan::Extent want;
  } matrices[] = {{'A', arguments.a, plan.a_extent(rank)},
                  {'B', arguments.b, plan.b_extent(rank)},
                  {'C', arguments.c, plan.c_extent(rank)}};
  const Dtype dtype = plan.spec().dtype;
  for (const auto& [name, matrix, want] : matrices) {
    if (Status status = check_matrix(rank, name, matrix, want, dtype); !status.ok()) return status;
    if (want.rows > 0 && want.cols > 0) places.push_back(place_of(rank, name, matrix, dtype_bytes(dtype)));
  }
  return Ok{};
}

// Looks at every two places of which one is an output and that meet in a sweep over the addresses.
Status check_overlaps(std::vector<Place>& places) {
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.begin < b.begin; });
  std::vector<const Place*> open;  // begun and not known to have ended
  for (const Place& place : places) {
    std::erase_if(open, [&](const Place* p) { return p->end <= place.begin; });
    for (const Place* other : open) {
      if (!(place.output || other->output) || !overlap(*other, place)) continue;
      const Place& c = place.output ? place : *other;
      const Place& with = place.output ? *other : place;
      return bad_argument(
          fmt::format("rank {}: C shares memory with {} of rank {}: outputs must lie apart from all "
                      "inputs and other outputs",
                      c.rank, with.name, with.rank));
    }
    open.push_back(&place);
  }
  return Ok{};
}

}  // namespace

Status check_rank_arguments(const Plan& plan, std::int32_t rank, const GemmArguments& arguments) {
  std::vector<Place> places;
  if (Status status = check_matrices(plan, rank, arguments, places); !status.ok()) return status;
  return check_overlaps(places);
}

Status check_arguments(const Plan& plan, std::span<const GemmArguments> arguments) {
  const std::int32_t world = plan.topo().world();
  if (arguments.size() != static_cast<std::size_t>(world)) {
    return bad_argument(
        fmt::format("arguments has {} entries: it must have one for each of the {} ranks", arguments.size(), world));
  }
  std::vector<Place> places;
  for (std::int32_t rank = 0; rank < world; ++rank) {
    if (Status status = check_matrices(plan, rank, arguments[rank], places); !status.ok()) return status;
  }
  return check_overlaps(places);
}

}  // namespace mkernel
