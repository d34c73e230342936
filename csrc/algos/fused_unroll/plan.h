// Tiles of the implicit GEMM, shared by the planner and by both implementations.
//   M = weight [K/G, C/G*R*S]  x  unrolled input [C/G*R*S, N*P*Q], per group
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace fastconv::algos::fused_unroll {

// Output channels and output pixels of a tile; a tile belongs to one group.
struct TileShape {
  int k, pixels;
};
inline constexpr TileShape wide_tile{64, 64};     // square: the most products per element loaded
inline constexpr TileShape narrow_tile{16, 128};  // first layers and groups, where 64 output channels do not exist
inline constexpr TileShape tile_shape(std::int64_t k_per_group) {
  return k_per_group <= narrow_tile.k ? narrow_tile : wide_tile;
}

// Every thread of the GPU owns 4 x 4 outputs.
inline constexpr int outputs_per_thread = 16;
// Lines of a tile in shared memory are this much longer, so that the lines written by one warp start in other banks.
inline constexpr int line_padding = 4;

// Input channels loaded at a time, with all R*S taps of each: 16 to 50 lines of the reduction, what fits 48 KiB of
// shared memory beside a second block, and for NHWC as many adjacent elements per pixel as that allows.
inline constexpr int chunk_channels(int kernel) {
  return kernel == 1 ? 16 : kernel == 2 ? 8 : kernel == 3 ? 4 : kernel <= 5 ? 2 : 1;
}

inline constexpr bool has_kernel_size(std::int64_t r, std::int64_t s) {
  return r == s && ((r >= 1 && r <= 5) || r == 7);
}

// The tiles of a problem, in the order in which they run: the tiles of one pixel range follow each other, because they
// read the same input.
struct TileGrid {
  std::int64_t k_tiles, groups, pixel_tiles;

  constexpr std::int64_t count() const { return k_tiles * groups * pixel_tiles; }
};

inline TileGrid tile_grid(const ConvProblem& problem, TileShape tile) {
  return {(problem.k_per_group() + tile.k - 1) / tile.k, problem.groups,
          (problem.n * problem.p() * problem.q() + tile.pixels - 1) / tile.pixels};
}

// Rows and columns of the padded input, and elements of a sample, stay below this: 32-bit arithmetic inside a sample.
inline constexpr std::int64_t sample_limit = std::int64_t{1} << 30;

}  // namespace fastconv::algos::fused_unroll
