#include "plan/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace mkernel {
namespace {

Tiling tiling_of(std::int32_t bm, std::int32_t bn, std::int32_t band) {
  Tiling tiling;
  tiling.bm = bm;
  tiling.bn = bn;
  tiling.band = band;
  return tiling;
}

std::string text(const TileGrid& grid) {
  return std::to_string(grid.rows) + " x " + std::to_string(grid.cols) + ", grid " + std::to_string(grid.grid_rows) +
         " x " + std::to_string(grid.grid_cols) + " of " + std::to_string(grid.bm) + " x " + std::to_string(grid.bn) +
         ", band " + std::to_string(grid.band);
}

// The definition in words, as loops: bands from top to bottom, within a band column by column, tiles clipped.
std::vector<Block> tiles_by_loops(const TileGrid& grid) {
  std::vector<Block> tiles;
  for (std::int64_t top = 0; top < grid.grid_rows; top += grid.band) {
    for (std::int64_t j = 0; j < grid.grid_cols; ++j) {
      for (std::int64_t i = top; i < std::min<std::int64_t>(top + grid.band, grid.grid_rows); ++i) {
        const std::int64_t row = std::min<std::int64_t>(i * grid.bm, grid.rows);
        const std::int64_t col = std::min<std::int64_t>(j * grid.bn, grid.cols);
        tiles.push_back({row, col, std::min<std::int64_t>(grid.bm, grid.rows - row),
                         std::min<std::int64_t>(grid.bn, grid.cols - col)});
      }
    }
  }
  return tiles;
}

void expect_matches_loops(const TileGrid& grid) {
  const std::vector<Block> tiles = tiles_by_loops(grid);
  ASSERT_EQ(grid.count(), static_cast<std::int64_t>(tiles.size())) << text(grid);
  std::int64_t packed = 0;
  for (std::int64_t t = 0; t < grid.count(); ++t) {
    const Block& wanted = tiles[static_cast<std::size_t>(t)];
    ASSERT_EQ(grid.tile(t), wanted) << text(grid) << ", tile " << t;
    ASSERT_EQ(grid.packed(t), packed) << text(grid) << ", tile " << t;
    packed += wanted.elements();
  }
  ASSERT_EQ(grid.packed(grid.count()), packed) << text(grid);
  ASSERT_EQ(packed, grid.rows * grid.cols) << text(grid);
}

TEST(TileGrid, ClosedFormsMatchLoopsForAllSmallGrids) {
  for (std::int64_t rows = 0; rows <= 9; ++rows) {
    for (std::int64_t cols = 0; cols <= 9; ++cols) {
      for (const std::int32_t bm : {1, 2, 4}) {
        for (const std::int32_t bn : {1, 2, 8}) {
          for (const std::int32_t band : {1, 2, 3, 100}) {
            expect_matches_loops(TileGrid::make(rows, cols, rows, tiling_of(bm, bn, band)));
          }
        }
      }
    }
  }
}

TEST(TileGrid, ClosedFormsMatchLoopsForRandomGridsWithSurplusTiles) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t rows = below(200);
    const auto bm = static_cast<std::int32_t>(1 << below(7));
    const auto bn = static_cast<std::int32_t>(1 << below(7));
    const auto band = static_cast<std::int32_t>(1 + below(6));
    expect_matches_loops(TileGrid::make(rows, below(200), rows + below(100), tiling_of(bm, bn, band)));
  }
}

// Every element of the matrix has one place in the packed buffer, and every place one element.
TEST(TileGrid, PackingIsABijection) {
  for (const std::int32_t band : {1, 2, 3}) {
    const TileGrid grid = TileGrid::make(37, 29, 50, tiling_of(8, 4, band));
    std::vector<int> element_seen(37 * 29);
    std::vector<int> place_seen(37 * 29);
    for (std::int64_t t = 0; t < grid.count(); ++t) {
      const Block tile = grid.tile(t);
      for (std::int64_t i = 0; i < tile.rows; ++i) {
        for (std::int64_t j = 0; j < tile.cols; ++j) {
          ++element_seen.at(static_cast<std::size_t>((tile.row + i) * 29 + tile.col + j));
          ++place_seen.at(static_cast<std::size_t>(grid.packed(t) + i * tile.cols + j));
        }
      }
    }
    EXPECT_EQ(std::count(element_seen.begin(), element_seen.end(), 1), 37 * 29) << band;
    EXPECT_EQ(std::count(place_seen.begin(), place_seen.end(), 1), 37 * 29) << band;
  }
}

TEST(TileGrid, AnEmptyMatrixHasOneEmptyTile) {
  const TileGrid grid = TileGrid::make(0, 0, 0, Tiling{});
  EXPECT_EQ(grid.count(), 1);
  EXPECT_TRUE(grid.tile(0).empty());
  EXPECT_EQ(grid.packed(1), 0);
}

TEST(TileGrid, TilesOfMatricesBeyond32BitsHaveTheRightPlaces) {
  const std::int64_t size = std::int64_t{1} << 26;
  const TileGrid grid = TileGrid::make(size, size, size, tiling_of(128, 256, 4));
  const std::int64_t last = grid.count() - 1;
  EXPECT_EQ(last, (size / 128) * (size / 256) - 1);
  EXPECT_EQ(grid.tile(last), (Block{size - 128, size - 256, 128, 256}));
  EXPECT_EQ(grid.packed(last), size * size - 128 * 256);
}

}  // namespace
}  // namespace mkernel
