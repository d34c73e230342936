// Tiles of outputs, numbered along q, then along p, then by images.
#pragma once

#include <cstdint>

namespace fastconv {

// A tile's first output. grid: by_q_tiles and by_p_tiles, to divide by; size: a tile's tile_q and tile_p.
struct Origin {
  int n, p, q;

  template <typename Grid, typename Size>
  __device__ Origin(std::uint32_t tile, const Grid& grid, const Size& size) {
    q = static_cast<int>(grid.by_q_tiles.divmod(tile)) * size.tile_q;
    p = static_cast<int>(grid.by_p_tiles.divmod(tile)) * size.tile_p;
    n = static_cast<int>(tile);
  }
};

}  // namespace fastconv
