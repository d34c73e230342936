// The main loop: gather and split A one step ahead, multiply, promote; and the range check around it.
#pragma once

#include "algos/implicit_gemm/input.cuh"
#include "algos/implicit_gemm/output.cuh"
#include "device/mma.cuh"

namespace fastconv::algos::implicit_gemm {

// |hi| of a pixel must reach 2 (else lo would lose bits to float16's subnormals) and stay finite. The first guess brings
// the first step's largest value to [2^4, 2^5): the rest may be 2^11 times as large. The second is exact.
constexpr int guessed_target = 4, exact_target = 12;
constexpr float least_high = 2.0f;

// One step of B, filters [first_filter, first_filter + filter_tile), zeros beyond K.
template <typename S>
__device__ __forceinline__ void fetch_filters(const Params<typename S::T>& params, int first_filter, int step,
                                              std::uint32_t target) {
  if (step < params.steps) {
    constexpr int pieces = S::planes * S::filter_tile * 4;
#pragma unroll
    for (int first = 0; first < pieces; first += threads) {
      const int piece = first + static_cast<int>(threadIdx.x);
      if (pieces % threads == 0 || piece < pieces) {
        const int plane = piece / (S::filter_tile * 4), row = piece / 4 % S::filter_tile, part = piece % 4;
        const bool valid = first_filter + row < params.k;
        const std::int64_t line = static_cast<std::int64_t>(step * S::planes + plane) * params.k +
                                  (valid ? first_filter + row : 0);
        copy_async(target + plane * S::b_plane + swizzled(row, part), params.weight + line * depth_tile + part * 8,
                   valid);
      }
    }
  }
  commit_copies();  // empty behind the last step, so that the count of groups stays right
}

template <typename S>
using Accumulator = float[S::row_tiles][S::column_tiles][4];

// sum += A * B^T over one step, for one pair of planes.
template <typename S>
__device__ __forceinline__ void multiply(Accumulator<S>& sum, const std::uint32_t (&a)[S::row_tiles][2][4],
                                         std::uint32_t b_plane) {
#pragma unroll
  for (int n = 0; n < S::column_tiles; ++n) {
    std::uint32_t b[4];
    load_matrices(b, b_plane + n * 8 * S::row_bytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < S::row_tiles; ++m) {
        multiply_add<Half<typename S::T>>(sum[m][n], a[m][half], b[2 * half], b[2 * half + 1]);
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void load_pixels(std::uint32_t (&a)[S::row_tiles][2][4], std::uint32_t a_plane) {
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) load_matrices(a[m][half], (a_plane ^ half << 5) + m * 16 * S::row_bytes);
  }
}

// The tensor cores truncate their accumulator. So a step starts from zero, adds the small products lo*hi and hi*lo while
// that costs nothing, then hi*hi in two instructions, and joins the total by an addition that rounds
// (docs/numerics.md).
template <typename S>
__device__ __forceinline__ void multiply_step(Accumulator<S>& total, std::uint32_t a_stage, std::uint32_t b_stage) {
  std::uint32_t a[S::row_tiles][2][4];
  if constexpr (S::products == 1) {
    load_pixels<S>(a, a_stage);
    multiply<S>(total, a, b_stage);
  } else {
    Accumulator<S> sum = {};
    load_pixels<S>(a, a_stage + S::a_plane);
    multiply<S>(sum, a, b_stage);
    load_pixels<S>(a, a_stage);
    multiply<S>(sum, a, b_stage + S::b_plane);
    multiply<S>(sum, a, b_stage);
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < S::column_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[m][n][i] += sum[m][n][i];
      }
    }
  }
}

// Guesses the scales from the first step, which the loader holds.
template <typename S>
__device__ __forceinline__ void guess_scales(SharedTile<S>& shared, InputLoader<S>& loader) {
  loader.merge_largest_input(false);
  __syncthreads();
  const int row = threadIdx.x;
  if (row < pixel_tile) {
    set_scale(shared, row, __int_as_float(shared.largest[row]), guessed_target);
    shared.largest[row] = 0;
  }
  __syncthreads();
}

// Whether a pixel's guess was so far off that the block must repeat its tile; then the scales are exact ones. The answer
// depends on this block's input alone.
template <typename S>
__device__ __forceinline__ bool correct_scales(const Params<typename S::T>& params, SharedTile<S>& shared,
                                               InputLoader<S>& loader, bool exists) {
  const int row = threadIdx.x;
  loader.merge_largest_stored();
  __syncthreads();
  bool off = false;
  if (row < pixel_tile) {
    const float high = __int_as_float(shared.largest[row]);
    off = exists && !(high >= least_high && high < INFINITY);
    shared.largest[row] = 0;
  }
  if (!__syncthreads_or(off)) return false;
  for (int step = 0; step < params.steps; ++step) {
    loader.load(params, step);
    loader.merge_largest_input(true);
  }
  __syncthreads();
  if (off) {  // a pixel that sees nothing but zeros is right at any scale
    const float largest = __int_as_float(shared.largest[row]);
    off = largest > 0.0f;
    if (off) set_scale(shared, row, largest, exact_target);
  }
  return __syncthreads_or(off);
}

template <typename S>
__global__ void __launch_bounds__(threads, blocks_per_processor) convolve(const __grid_constant__ Params<typename S::T> params) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedTile<S>*>(memory);
  unsigned pixel_block = blockIdx.x;  // blocks of the same pixels are neighbours: they share x in the L2 cache
  const int first_filter = static_cast<int>(params.by_filter_tiles.peel(pixel_block)) * S::filter_tile;
  const unsigned first_pixel = pixel_block * pixel_tile;

  unsigned char* const a_memory = shared.operands;
  const std::uint32_t b_memory = shared_address(shared.operands + S::a_stages * S::a_stage);
  fetch_filters<S>(params, first_filter, 0, b_memory);
  fetch_filters<S>(params, first_filter, 1, b_memory + S::b_stage);
  if (threadIdx.x < pixel_tile) {
    shared.rows[threadIdx.x] = find_row(params, first_pixel + threadIdx.x);
    shared.largest[threadIdx.x] = 0;
  }
  __syncthreads();

  // The lane's part of the fragments' addresses.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % 4 * 16 * S::row_tiles, warp_column = warp / 4 * 8 * S::column_tiles;
  const std::uint32_t a_lane = shared_address(a_memory) + swizzled(warp_row + lane % 16, lane / 16);
  const std::uint32_t b_lane = b_memory + swizzled(warp_column + lane % 8, lane / 8);

  InputLoader<S> loader(shared);
  Accumulator<S> total;
  for (bool repeated = false;; repeated = true) {
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < S::column_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[m][n][i] = 0.0f;
      }
    }
    loader.load(params, 0);
    if constexpr (S::scaled) {
      if (!repeated) guess_scales(shared, loader);
      loader.forget_largest();
    }
    loader.store(a_memory);
    int b_read = 0;
    for (int step = 0; step < params.steps; ++step) {
      const bool more = step + 1 < params.steps;
      if (more) loader.load(params, step + 1);  // arrives while the tensor cores work
      wait_for_copies<1>();
      __syncthreads();  // A and B of this step are there, and nobody reads those of the previous one any more
      const int b_write = b_read == 0 ? 2 : b_read - 1;  // step + 2, where step - 1 was
      fetch_filters<S>(params, first_filter, step + 2, b_memory + b_write * S::b_stage);
      multiply_step<S>(total, a_lane + step % 2 * S::a_stage, b_lane + b_read * S::b_stage);
      if (more) loader.store(a_memory + (step + 1) % 2 * S::a_stage);
      b_read = b_read == 2 ? 0 : b_read + 1;
    }
    if constexpr (!S::scaled) break;
    if (repeated) break;
    if (!correct_scales<S>(params, shared, loader, first_pixel + threadIdx.x < params.pixels)) break;
    fetch_filters<S>(params, first_filter, 0, b_memory);
    fetch_filters<S>(params, first_filter, 1, b_memory + S::b_stage);
  }
  wait_for_copies<0>();
  __syncthreads();  // the output takes the operands' place
  stage_output<S>(params, shared, total, warp_row, warp_column, first_filter);
  __syncthreads();
  store_output<S>(params, shared, first_pixel, first_filter);
}

}  // namespace fastconv::algos::implicit_gemm
