// How a matrix is cut into tiles, in which order they are visited, and where a tile lies in a packed buffer.
#pragma once
#include <cstdint>

#include "base/macros.h"
#include "plan/topology.h"

namespace mkernel {

// A rectangle of a matrix, in elements.
struct Block {
  std::int64_t row = 0;
  std::int64_t col = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  MK_HD constexpr bool empty() const { return rows == 0 || cols == 0; }
  MK_HD constexpr std::int64_t elements() const { return rows * cols; }
  bool operator==(const Block&) const = default;
};

// The sizes that a plan is cut by. Chosen by choose_tiling() (plan/tiling.h) or given by the caller.
struct Tiling {
  std::int32_t bm = 128;          // rows of a tile (of queries, in ring_attention)
  std::int32_t bn = 256;          // columns of a tile
  std::int32_t band = 4;          // tile rows that are visited together, column by column (for the L2 cache)
  std::int32_t chunk_tiles = 8;   // tiles per network write (GEMM+RS, GEMM+AR)
  std::int32_t chunk_rows = 512;  // rows of A per network write (AG+GEMM), a multiple of bm; tokens (ring_attention)
  std::int32_t copy_rows = 64;    // rows of A that one copy moves; a chunk is one network write but several copies
  std::int32_t pitch_align = 1;  // the row pitch of gathered A is a multiple of this many elements (TMA wants 16 bytes)
  std::int32_t grid_shards = 1;  // shards that share a grid of tiles (AG+GEMM, GEMM+RS): see plan/shard_groups.h; more
                                 // than one only where their rows fit into one tile
};

// The tiles of a rows x cols matrix. There is always at least one tile, so that an empty matrix still has a task
// that signals. `grid_rows` may be given larger than `rows` needs: surplus tiles are empty.
//
// Order: bands of `band` tile rows from top to bottom; within a band column by column. Tiles are packed in exactly
// this order, each one row-major without gaps, so any run of consecutive tiles is one contiguous range.
struct TileGrid {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t grid_rows = 1;  // tile rows
  std::int64_t grid_cols = 1;  // tile columns
  std::int32_t bm = 1;
  std::int32_t bn = 1;
  std::int32_t band = 1;

  MK_HD static constexpr TileGrid make(std::int64_t rows, std::int64_t cols, std::int64_t rows_for_grid,
                                       const Tiling& tiling) {
    TileGrid grid;
    grid.rows = rows;
    grid.cols = cols;
    grid.grid_rows = max_of(1, ceil_div(rows_for_grid, tiling.bm));
    grid.grid_cols = max_of(1, ceil_div(cols, tiling.bn));
    grid.bm = tiling.bm;
    grid.bn = tiling.bn;
    grid.band = tiling.band;
    return grid;
  }

  MK_HD constexpr std::int64_t count() const { return grid_rows * grid_cols; }

  // Tile `t` of the order, clipped to the matrix.
  MK_HD constexpr Block tile(std::int64_t t) const {
    const std::int64_t per_band = band * grid_cols;
    const std::int64_t first_row = t / per_band * band;
    const std::int64_t height = min_of(band, grid_rows - first_row);
    const std::int64_t within = t % per_band;
    const std::int64_t i = first_row + within % height;
    const std::int64_t j = within / height;
    Block block;
    block.row = min_of(i * bm, rows);
    block.col = min_of(j * bn, cols);
    block.rows = min_of(rows - block.row, bm);
    block.cols = min_of(cols - block.col, bn);
    return block;
  }

  // Elements that precede tile `t` in the packed order; `t == count()` gives the size of the matrix.
  MK_HD constexpr std::int64_t packed(std::int64_t t) const {
    const std::int64_t per_band = band * grid_cols;
    const std::int64_t first_row = t / per_band * band;
    if (first_row >= grid_rows) return rows * cols;
    const std::int64_t height = min_of(band, grid_rows - first_row);
    const std::int64_t within = t % per_band;
    const std::int64_t i = first_row + within % height;
    const std::int64_t j = within / height;
    const std::int64_t band_begin = min_of(first_row * bm, rows);
    const std::int64_t band_end = min_of((first_row + height) * bm, rows);
    const std::int64_t row = min_of(i * bm, rows);
    const std::int64_t col = min_of(j * bn, cols);
    const std::int64_t width = min_of(cols - col, bn);
    return band_begin * cols + col * (band_end - band_begin) + (row - band_begin) * width;
  }
};

}  // namespace mkernel
