// The single-tile kernel: its parameters, its shared memory, and where a block's tile is.
#pragma once

#include <cuda.h>

#include "algos/implicit_gemm/single_tile/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/mma.cuh"
#include "device/shuffled_places.h"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/cluster.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

// In the order of use: constants come from memory, too, 64 bytes at a time (the first 48 bytes here are such a line).
template <typename T>
struct Params {
  WaitReport* report;
  int steps, steps_per_split, split_k_log2;
  int input_slots, filter_slots, stage_bytes;
  int box_bytes, stage_taps, step_channels;
  int warpgroup_splits;  // warpgroups that have the same pixels, and each its turn of the steps
  bool joins;            // other warps have sums of the same pixels
  // Input.
  int rows_pixels;             // rows: pixels of a tile; else 0
  int tile_n, tile_p, tile_q;  // rows: tile_q is the pitch
  int pad_h, pad_w, stride_h, stride_w;
  int shifts;  // as in `shuffled`, which is read later
  FastDivide by_tile_q, by_tiles_p, by_stage_taps;
  // Filters.
  const unsigned char* weight;  // [packed filter tile][step][packed rows][128 bytes]
  std::int64_t packed_tile_bytes;
  const T* bias;           // as in the epilogue; null: read there, element by element
  int packed_bytes;        // of a step of a packed filter tile
  FastDivide by_n_splits;  // blocks that share a packed filter tile
  int k;
  // Products.
  int group_stride;           // of A: from 8 pixels to the next, bytes / 16
  int second_pixels;          // in a stage, from the first warpgroup's pixels to the second's
  int column_step, row_step;  // in a stage, from a tap to that of the next column, of the next row, bytes / 16
  int s;
  FastDivide by_s, by_taps;
  int dilation_h, dilation_w;
  int sums_bytes;  // that come from other blocks
  int owned_log2;  // sixteens of pixels that a block finishes
  // Output.
  int n, p, q;
  FastDivide by_tile_p;
  T* y;  // [N, P, Q, K], pixels y_pitch apart; nchw: [N, K, P, Q]
  Epilogue<T> epilogue;
  const int* exponents;  // class fp32: of the filters' scales, [filter]
  bool nchw;
  FastDivide by_image;  // pixels
  int y_pitch, y_row;   // NHWC: from one pixel of the convolution to the next, from one row
  ShuffledPlaces shuffled;
};

// split: class fp32. gated: it ends with the activations that are is_gated(), and there is no residual.
template <typename T_, int filter_tile_, bool split_, bool gated_>
struct Shape {
  using T = T_;
  static constexpr bool split = split_, gated = gated_;
  static constexpr int control_bytes = split ? split_control_bytes : single_tile::control_bytes;
  static constexpr int filter_tile = filter_tile_, sums = filter_tile / 2;
  static constexpr int filter_bytes = filter_tile * single_tile::row_bytes;
  static constexpr int warpgroups = multiply_warpgroups, multiplying = 4 * warpgroups;
  static constexpr int blocks = is_paired(filter_tile, split) ? 2 : 1;  // on a multiprocessor, if memory has room
  // Two warps load; in class fp32, whose loading warps are busy until the end, a third one goes through the epilogue
  // ahead of the others, where there are registers for it.
  static constexpr int threads = 32 * (multiplying + 2 + (split && blocks == 1 ? 1 : 0));
  static constexpr bool ahead = split && (filter_tile == 32 || filter_tile == 64);  // registers for the next step's A
  static constexpr int chunk = 16 / sizeof(T);  // filters that a lane stores at once
};

struct Control {
  hopper::Pipeline<max_input_slots>::Barriers input;
  hopper::Pipeline<max_filter_slots>::Barriers filters;
  hopper::Barrier sums_full;
  hopper::Barrier passed;  // split: all steps are done
  unsigned char bias[512];
  int touched[4 * multiply_warpgroups];  // never read
  int retry_pass;                        // split: how often the steps are to be done again
  // Split alone: the filters' scales; whole windows: the largest |x| of the pixels of a stage.
  alignas(16) int exponent[64];
  float largest_of_warp[4 * multiply_warpgroups], largest[max_box_pixels];
};
static_assert(offsetof(Control, exponent) <= control_bytes && sizeof(Control) <= split_control_bytes);
static_assert(offsetof(Control, bias) % 16 == 0);

// Warps that have different pixels; and a warpgroup's turn among those that have the same ones. (Divisions would be
// much of the code before the first product.)
static_assert(multiply_warpgroups == 2);
template <typename S>
__device__ __forceinline__ int pixel_warps(const Params<typename S::T>& params) {
  return params.warpgroup_splits == 1 ? S::multiplying : S::multiplying / 2;
}
template <typename T>
__device__ __forceinline__ int turn_of(const Params<T>& params, int warpgroup) {
  return params.warpgroup_splits == 1 ? 0 : warpgroup;
}

template <WaitRole role>
__device__ __forceinline__ void wait(std::uint32_t barrier, unsigned parity, WaitReport* report) {
  hopper::wait(barrier, parity, WaitSite{report, kernel_implicit_gemm, role});
}

// Where a block's tile is.
struct Place {
  int n, p, q;  // first image, row, column
  int start;    // rows: of the tile's first pixel in its row
};
template <typename T>
__device__ __forceinline__ Place place_of(const Params<T>& params) {
  Place place;
  unsigned at = blockIdx.z;
  if (params.rows_pixels > 0) {
    unsigned first = blockIdx.y * params.rows_pixels;
    place.start = static_cast<int>(params.by_tile_q.divmod(first));
    place.n = static_cast<int>(at), place.p = static_cast<int>(first), place.q = 0;
  } else {
    place.start = 0;
    place.q = static_cast<int>(blockIdx.y) * params.tile_q;
    place.p = static_cast<int>(params.by_tiles_p.divmod(at)) * params.tile_p;
    place.n = static_cast<int>(at) * params.tile_n;
  }
  return place;
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
