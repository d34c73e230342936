// What lives where: kernel parameters, a block's shared memory, its place in y.
#pragma once

#include <cstdint>

#include "algos/implicit_gemm/few_channels/plan.h"
#include "algos/implicit_gemm/shared/half.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/mma.cuh"
#include "device/numeric.h"
#include "device/origin.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::few_channels {

template <typename T>
struct Params {
  const T* x;                   // [N, C, H, W], NCHW or NHWC
  const unsigned char* weight;  // packed (plan.h): the form of the plan
  const int* exponents;         // [filter tiles * filter_tile]
  T* y;                         // [N, K, P, Q], NCHW or NHWC
  Epilogue<T> epilogue;
  Plan plan;
  std::int64_t image_in, image_out;  // elements of an image of x and y
  std::uint64_t x_bytes;
  int in_row, in_pixel, in_channel;  // elements of x from one row, pixel, channel to the next
  int out_k, out_p, out_q;           // of y
  int pixel_bytes;                   // from one output to the next, in a row of the patch
  FastDivide by_line_chunks, by_pixel_pairs, by_p_tiles, by_q_tiles, by_patch_h, by_row_pairs;
  unsigned lines_at_once, rows_at_once;  // that the block's threads copy, a chunk each, or convert, a pair each
  int c, h, w, k, p, q, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  bool nhwc, has_activation;
  bool vector;  // y and residual can be accessed by a lane's neighbouring filters (NHWC) or outputs (NCHW)
};

// A kernel instantiation.
template <typename T_, int products_, int column_tiles_>
struct Shape {
  using T = T_;
  static constexpr int products = products_, column_tiles = column_tiles_;  // of 8 filters
  static constexpr bool scaled = std::is_same_v<T, float>;
  static constexpr int limbs = products == 3 ? 2 : 1;
  static constexpr int filter_tile = 8 * column_tiles;
  static constexpr int row_tiles = 2;                                      // of 16 outputs: a warp's part
  static constexpr int vector = !scaled && filter_tile % 32 == 0 ? 8 : 4;  // Weights::vector
  static constexpr int step_bytes = limbs * filter_tile * step_pairs * 4;  // of B
  static constexpr int blocks_per_processor = warps_per_processor(filter_tile, products) / max_warps;
};

// [row tile][column tile][]: row l/4 of tile m is the lane's output 2 m of its quad, row l/4 + 8 the next.
template <typename S>
using Sums = float[S::row_tiles][S::column_tiles][4];

// Sum i of quad output `pixel` for column j of a column tile.
template <typename S>
__device__ __forceinline__ float& sum_of(Sums<S>& sum, int pixel, int column_tile, int j) {
  return sum[pixel / 2][column_tile][pixel % 2 * 2 + j];
}

// The filter, within the block's, of the lane's column j (0 or 1) of a column tile: so permuted that it has `vector`
// neighbours.
template <int vector>
__device__ __forceinline__ int filter_of(int lane, int column_tile, int j) {
  return column_tile / (vector / 2) * 4 * vector + lane % 4 * vector + column_tile % (vector / 2) * 2 + j;
}

// The inverse: bytes from a step's fragments of one limb to a pair of a filter's.
struct PackedPlace {
  int offset;

  __device__ PackedPlace(int vector, int filter, int pair) {
    const int rest = filter % (4 * vector) % vector;
    const int column_tile = filter / (4 * vector) * (vector / 2) + rest / 2;
    const int column = filter % (4 * vector) / vector * 2 + rest % 2, place = pair % step_pairs;
    offset = column_tile / 2 * 512 + (column * 4 + place % 4) * 16 + column_tile % 2 * 8 + place / 4 * 4;
  }
};

// threadIdx.x, asked for anew: what is computed from it is not kept in registers while there are none to spare.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Where a thread's quad lies in the tile.
struct Place {
  int p, q;

  __device__ Place(int tile_q, int thread) {
    const int quads = tile_q / quad, index = thread / 4;
    p = index / quads, q = index % quads * quad;
  }
};

}  // namespace fastconv::algos::implicit_gemm::few_channels
