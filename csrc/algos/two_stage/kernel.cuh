// Stage 1: a plane of scalar products per filter tap. Stage 2: the sum of the planes.
#pragma once

#include "algos/two_stage/plan.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::two_stage {

// One pass: some images, all taps.
template <typename T>
struct Params {
  const T* x;       // [images, C, H, W]
  const T* weight;  // [K, C/G, R, S]
  T* y;             // [images, K, P, Q]
  float* planes;    // [R*S][images, K, P, Q], each like y; null if there is one tap
  Strides4 in, out;
  Epilogue<T> epilogue;
  std::int64_t images, h, w, p, q, groups, c_per_group, k_per_group;
  std::int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  std::int64_t s, taps;
  std::int64_t pixels, pixel_tiles, k_tiles, blocks;  // pixels: images * P * Q
  std::int64_t numel;                                 // images * K * P * Q
};

// What a block computes: tap (r, s) of outputs from pixel0 of the flattened [images, P, Q], filters from k0 of group g.
struct Position {
  std::int64_t r, s, g, k0, pixel0;

  template <typename T>
  __device__ Position(std::int64_t block, const Params<T>& params, int k_tile, int pixel_tile) {
    k0 = block % params.k_tiles * k_tile, block /= params.k_tiles;
    g = block % params.groups, block /= params.groups;
    pixel0 = block % params.pixel_tiles * pixel_tile, block /= params.pixel_tiles;
    r = block / params.s, s = block % params.s;
  }
};

// A chunk of channels of both operands, transposed so that a thread's elements of one channel lie side by side.
template <int k_tile, int pixel_tile>
struct Shared {
  // + 4: fewer bank conflicts in the transposition, and rows stay 16-byte aligned.
  alignas(16) float filters[chunk][k_tile + 4];
  alignas(16) float x[chunk][pixel_tile + 4];
  std::int64_t origins[pixel_tile];  // of an output's input at the tap: offset in x, channel 0; -1: padding, no output
  std::int64_t targets[pixel_tile];  // of an output: offset in y, channel 0; -1: no such output
};

template <typename T, int k_tile, int pixel_tile>
__device__ void find_pixels(const Params<T>& params, const Position& at, Shared<k_tile, pixel_tile>& shared) {
  static_assert(pixel_tile <= threads);
  if (threadIdx.x >= pixel_tile) return;
  const std::int64_t pixel = at.pixel0 + threadIdx.x;
  const std::int64_t q = pixel % params.q, p = pixel / params.q % params.p, n = pixel / params.q / params.p;
  const std::int64_t h = p * params.stride_h + at.r * params.dilation_h - params.pad_h;
  const std::int64_t w = q * params.stride_w + at.s * params.dilation_w - params.pad_w;
  const bool exists = pixel < params.pixels;
  const bool inside = exists && h >= 0 && h < params.h && w >= 0 && w < params.w;
  shared.origins[threadIdx.x] = inside ? params.in(n, 0, h, w) : -1;
  shared.targets[threadIdx.x] = exists ? params.out(n, 0, p, q) : -1;
}

// Consecutive threads read consecutive elements: along W (NCHW) or along C (NHWC).
template <typename T, int k_tile, int pixel_tile>
__device__ void load_x(const Params<T>& params, const Position& at, std::int64_t c0,
                       Shared<k_tile, pixel_tile>& shared) {
  const bool nhwc = params.in.c == 1;
  for (int index = threadIdx.x; index < chunk * pixel_tile; index += threads) {
    const int c = nhwc ? index % chunk : index / pixel_tile, pixel = nhwc ? index / chunk : index % pixel_tile;
    const std::int64_t origin = shared.origins[pixel], channel = c0 + c;
    shared.x[c][pixel] = origin >= 0 && channel < params.c_per_group
                             ? to_float(params.x[origin + (at.g * params.c_per_group + channel) * params.in.c])
                             : 0.0f;
  }
}

// A z-row of a filter: every R*S-th element, so consecutive threads read along C.
template <typename T, int k_tile, int pixel_tile>
__device__ void load_filters(const Params<T>& params, const Position& at, std::int64_t c0,
                             Shared<k_tile, pixel_tile>& shared) {
  const T* tap = params.weight + at.r * params.s + at.s;
  for (int index = threadIdx.x; index < chunk * k_tile; index += threads) {
    const int c = index % chunk, filter = index / chunk;
    const std::int64_t k = at.k0 + filter, channel = c0 + c;
    const std::int64_t row = (at.g * params.k_per_group + k) * params.c_per_group + channel;
    shared.filters[c][filter] =
        k < params.k_per_group && channel < params.c_per_group ? to_float(tap[row * params.taps]) : 0.0f;
  }
}

// One channel's elements of a warp: the same for all lanes, so that a read is a broadcast.
template <int count>
__device__ __forceinline__ void load_row(const float* source, float (&row)[count]) {
  if constexpr (count % 4 == 0) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(source + i);
      row[i] = four.x, row[i + 1] = four.y, row[i + 2] = four.z, row[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) row[i] = source[i];
  }
}

template <typename T, int tile_index, bool lanes_on_filters>
__global__ void __launch_bounds__(threads, 2) scalar_products(const __grid_constant__ Params<T> params) {
  constexpr Tile tile = tiles[tile_index];
  constexpr int k_tile = lanes_on_filters ? tile.n() : tile.m(), pixel_tile = lanes_on_filters ? tile.m() : tile.n();
  constexpr int m_count = tile.m_per_thread, n_count = tile.n_per_thread;
  __shared__ Shared<k_tile, pixel_tile> shared;
  const int m0 = threadIdx.x / lanes * m_count, lane = threadIdx.x % lanes;

  for (std::int64_t block = blockIdx.x; block < params.blocks; block += gridDim.x) {
    const Position at(block, params, k_tile, pixel_tile);
    __syncthreads();  // the block before may still read targets
    find_pixels(params, at, shared);
    float total[m_count][n_count] = {};
    for (std::int64_t c0 = 0; c0 < params.c_per_group; c0 += chunk) {
      __syncthreads();
      load_x(params, at, c0, shared);
      load_filters(params, at, c0, shared);
      __syncthreads();
      float sum[m_count][n_count] = {};  // of the chunk: sums of sums round less than one long chain
#pragma unroll 4                         // all 16 at once would spill
      for (int c = 0; c < chunk; ++c) {
        const float* m_row = lanes_on_filters ? shared.x[c] : shared.filters[c];
        const float* n_row = lanes_on_filters ? shared.filters[c] : shared.x[c];
        float m_value[m_count];
        load_row(m_row + m0, m_value);
#pragma unroll
        for (int j = 0; j < n_count; ++j) {
          const float n_value = n_row[lane + j * lanes];
#pragma unroll
          for (int i = 0; i < m_count; ++i) sum[i][j] += m_value[i] * n_value;
        }
      }
#pragma unroll
      for (int i = 0; i < m_count; ++i) {
#pragma unroll
        for (int j = 0; j < n_count; ++j) total[i][j] += sum[i][j];
      }
    }
    const std::int64_t plane = at.r * params.s + at.s;
#pragma unroll
    for (int i = 0; i < m_count; ++i) {
#pragma unroll
      for (int j = 0; j < n_count; ++j) {
        const int m = m0 + i, n = lane + j * lanes;
        const std::int64_t target = shared.targets[lanes_on_filters ? m : n];
        const std::int64_t k = at.k0 + (lanes_on_filters ? n : m), channel = at.g * params.k_per_group + k;
        if (target < 0 || k >= params.k_per_group) continue;
        const std::int64_t index = target + channel * params.out.c;
        if (params.planes != nullptr) {
          params.planes[plane * params.numel + index] = total[i][j];
        } else {
          params.y[index] = params.epilogue(total[i][j], index, channel);
        }
      }
    }
  }
}

// One thread per output element; planes have the order of y, so that all accesses coalesce in either layout.
template <typename T>
__global__ void __launch_bounds__(threads) sum_planes(const __grid_constant__ Params<T> params, std::int64_t channels) {
  for (std::int64_t index = blockIdx.x * static_cast<std::int64_t>(threads) + threadIdx.x; index < params.numel;
       index += static_cast<std::int64_t>(gridDim.x) * threads) {
    float sum = 0.0f;
#pragma unroll 4
    for (std::int64_t plane = 0; plane < params.taps; ++plane) sum += params.planes[plane * params.numel + index];
    params.y[index] = params.epilogue(sum, index, index / params.out.c % channels);
  }
}

}  // namespace fastconv::algos::two_stage
