// The main loop: gather A one step ahead, split, multiply, promote; and the range check around it.
#pragma once

#include "algos/implicit_gemm/portable/load.cuh"
#include "algos/implicit_gemm/portable/output.cuh"
#include "device/mma.cuh"

namespace fastconv::algos::implicit_gemm::portable {

// One step of B, filters [first_filter, first_filter + filter_tile), zeros beyond K.
template <typename S>
__device__ __forceinline__ void fetch_filters(const Params<typename S::T>& params, int first_filter, int step,
                                              std::uint32_t target) {
  if (step < params.steps) {
    constexpr int pieces = S::stage_bytes / 16;
    static_assert(pieces % threads == 0);
#pragma unroll
    for (int first = 0; first < pieces; first += threads) {
      const int piece = first + static_cast<int>(threadIdx.x);
      const int limb = piece / (S::filter_tile * 4), row = piece / 4 % S::filter_tile;
      const bool valid = first_filter + row < params.k;
      const std::int64_t line =
          (static_cast<std::int64_t>(S::group() * params.steps + step) * S::limbs + limb) * params.k +
          (valid ? first_filter + row : 0);
      copy_async(target + piece * 16, params.weight + line * depth_tile + piece % 4 * 8, valid);
    }
  }
  commit_copies();  // empty behind the last step, so that the count of groups stays right
}

template <typename S>
using Accumulator = float[S::row_tiles][S::column_tiles][4];

// The 8 neighbouring elements of lane/4's filter in tile n: B's registers for both instructions of a step.
template <typename S>
__device__ __forceinline__ uint4 load_filter(const unsigned char* limb, int n) {
  return *reinterpret_cast<const uint4*>(limb + n * 8 * S::row_bytes + threadIdx.x % 32 * 16);
}

// d = c + A B^T over half a step, for one tile of 8 filters.
template <typename S>
__device__ __forceinline__ void multiply(float (&d)[S::row_tiles][4], const Fragments<S>& a, const uint4& b, int half,
                                         const float (&c)[S::row_tiles][4]) {
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m) {
    multiply_add<Half<typename S::T>>(d[m], a[m][half], half == 0 ? b.x : b.z, half == 0 ? b.y : b.w, c[m]);
  }
}

// The tensor cores truncate their accumulator. So a step starts from zero, adds the small products lo*hi and hi*lo
// while that costs nothing, then hi*hi in two instructions, and joins the total by an addition that rounds
// (docs/concepts/numerics.md).
template <typename S>
__device__ __forceinline__ void multiply_split(Accumulator<S>& total, const Fragments<S>& high, const Fragments<S>& low,
                                               const unsigned char* stage) {
  constexpr int group = 2;  // tiles of filters at a time: enough independent chains of instructions, few registers
  static_assert(S::column_tiles % group == 0);
  constexpr float zero[S::row_tiles][4] = {};
#pragma unroll
  for (int first = 0; first < S::column_tiles; first += group) {
    float sum[group][S::row_tiles][4];
    uint4 b_high[group], b_low[group];
#pragma unroll
    for (int n = 0; n < group; ++n) {
      b_high[n] = load_filter<S>(stage, first + n);
      b_low[n] = load_filter<S>(stage + S::limb_bytes, first + n);
    }
#pragma unroll
    for (int n = 0; n < group; ++n) multiply<S>(sum[n], low, b_high[n], 0, zero);
#pragma unroll
    for (int n = 0; n < group; ++n) multiply<S>(sum[n], low, b_high[n], 1, sum[n]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < group; ++n) multiply<S>(sum[n], high, b_low[n], half, sum[n]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < group; ++n) multiply<S>(sum[n], high, b_high[n], half, sum[n]);
    }
#pragma unroll
    for (int n = 0; n < group; ++n) {
#pragma unroll
      for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[m][first + n][i] += sum[n][m][i];
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void multiply_single(Accumulator<S>& total, const Fragments<S>& a,
                                                const unsigned char* stage) {
#pragma unroll
  for (int n = 0; n < S::column_tiles; ++n) {
    const uint4 b = load_filter<S>(stage, n);
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m) {
      multiply_add<Half<typename S::T>>(total[m][n], a[m][0], b.x, b.y, total[m][n]);
      multiply_add<Half<typename S::T>>(total[m][n], a[m][1], b.z, b.w, total[m][n]);
    }
  }
}

// The whole reduction. `input` holds step 0 and its scales.
template <typename S>
__device__ __forceinline__ void accumulate(const Params<typename S::T>& params, SharedTile<S>& shared, Input<S>& input,
                                           Accumulator<S>& total, int first_filter) {
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < S::column_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[m][n][i] = 0.0f;
    }
  }
  const std::uint32_t target = shared_address(shared.filters);
  int read = 0;  // stage of this step
  for (int step = 0; step < params.steps; ++step) {
    Fragments<S> high;
    [[maybe_unused]] Fragments<S> low;
    input.split(high, low);
    if (step + 1 < params.steps) input.load(params, shared, step + 1);  // arrives while the tensor cores work
    wait_for_copies<S::stages - 2>();
    __syncthreads();  // this step's filters are there, and nobody reads the previous step's any more
    const int write = read == 0 ? S::stages - 1 : read - 1;
    fetch_filters<S>(params, first_filter, step + S::stages - 1, target + write * S::stage_bytes);
    const unsigned char* stage = shared.filters + read * S::stage_bytes;
    if constexpr (S::products == 3) {
      multiply_split<S>(total, high, low, stage);
    } else {
      multiply_single<S>(total, high, stage);
    }
    read = read == S::stages - 1 ? 0 : read + 1;
  }
}

template <typename S>
__global__ void __launch_bounds__(threads, blocks_per_processor)
    convolve(const __grid_constant__ Params<typename S::T> params) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedTile<S>*>(memory);
  unsigned pixel_block = blockIdx.x;  // blocks of the same pixels are neighbours: they share x in the L2 cache
  const int first_filter = static_cast<int>(params.by_filter_tiles.divmod(pixel_block)) * S::filter_tile;
  const unsigned first_pixel = pixel_block * pixel_tile;
  static_assert(threads == pixel_tile);
  shared.rows[threadIdx.x] = find_row<S>(params, first_pixel + threadIdx.x);

  Input<S> input;
  Accumulator<S> total;
  for (bool retry = false;; retry = true) {
#pragma unroll
    for (int step = 0; step < S::stages - 1; ++step) {
      fetch_filters<S>(params, first_filter, step, shared_address(shared.filters) + step * S::stage_bytes);
    }
    if (!retry) __syncthreads();  // rows
    input.load(params, shared, 0);
    if constexpr (S::scaled) {
      if (!retry) input.guess_scales();
      input.launder_largest();
    }
    accumulate<S>(params, shared, input, total, first_filter);
    wait_for_copies<0>();
    if constexpr (!S::scaled) break;
    if (retry) break;
    bool off = false;
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      off |= static_cast<int>(input.is_off(i)) & static_cast<int>(first_pixel + row_of_lane(i) < params.pixels);
    }
    // The answer depends on this block's input alone. Both barriers also end the reading of the last filters.
    if (!__syncthreads_or(off)) break;
    if (!__syncthreads_or(input.correct_scales(params, shared))) break;
  }
  __syncthreads();  // the output takes the filters' place
  int exponents[S::rows] = {};
  if constexpr (S::scaled) {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) exponents[i] = input.exponent(i);
  }
  stage_output<S>(params, shared, total, exponents, first_filter);
  __syncthreads();
  store_output<S>(params, shared, first_pixel, first_filter);
}

}  // namespace fastconv::algos::implicit_gemm::portable
