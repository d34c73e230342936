// Y = A^T M A for a chunk of tiles, the scales undone, then the epilogue.
#pragma once

#include "algos/winograd/tile_math.cuh"
#include "device/epilogue.h"

namespace fastconv::winograd {

// A^T M A of one tile: load(frequency) gives a value of M, emit(i, row) takes a row of the result.
template <int m, typename Value, typename Load, typename Emit>
__device__ __forceinline__ void transform_output_tile(const Load& load, const Emit& emit) {
  constexpr int alpha = m + 2;
  Value half[m][alpha];
#pragma unroll
  for (int j = 0; j < alpha; ++j) {
    Value column[alpha], result[m];
#pragma unroll
    for (int i = 0; i < alpha; ++i) column[i] = load(i * alpha + j);
    Transform<m>::output(column, result);
#pragma unroll
    for (int i = 0; i < m; ++i) half[i][j] = result[i];
  }
#pragma unroll
  for (int i = 0; i < m; ++i) {
    Value row[m];
    Transform<m>::output(half[i], row);
    emit(i, row);
  }
}

// NHWC. A row of the block takes a tile, a lane `vec` filters; the grid's second dimension takes further filters, so
// that small maps fill the device.
template <typename T, int m, int vec>
__global__ void __launch_bounds__(128, 4)
    output_transform_nhwc(const Chunk chunk, const float* __restrict__ products,  // M [alpha^2][T][k_pad]
                          const int* __restrict__ tile_exponents,                 // [T], or null: nothing was scaled
                          const int* __restrict__ filter_exponents,               // [K]
                          T* __restrict__ y,                                      // [N, P, Q, K]
                          Epilogue<T> epilogue) {
  const int tile = blockIdx.x * blockDim.y + threadIdx.y;
  if (tile >= chunk.tiles) return;
  const TilePosition position = tile_position(chunk, tile);
  const int p0 = position.tp * m, q0 = position.tq * m;
  const int tile_exponent = tile_exponents != nullptr ? tile_exponents[tile] : 0;
  const int k = (blockIdx.y * blockDim.x + threadIdx.x) * vec;
  if (k >= chunk.k) return;
  float bias[vec], first[vec], second[vec];
#pragma unroll
  for (int e = 0; e < vec; ++e) {
    bias[e] = epilogue.bias_of(k + e);
    const Unscale unscale(tile_exponent, tile_exponents != nullptr ? filter_exponents[k + e] : 0);
    first[e] = unscale.first;
    second[e] = unscale.second;
  }
  const auto load = [&](int frequency) {
    const std::int64_t row = static_cast<std::int64_t>(frequency) * chunk.tiles + tile;
    return load_pack<vec>(products + row * chunk.k_pad + k);
  };
  transform_output_tile<m, Pack<vec>>(load, [&](int i, const Pack<vec>(&row)[m]) {
    if (p0 + i >= chunk.p) return;
    const std::int64_t index = chunk.out(position.n, k, p0 + i, q0);
#pragma unroll
    for (int j = 0; j < m; ++j) {
      if (q0 + j >= chunk.q) return;
      Aligned<T, vec> result;
#pragma unroll
      for (int e = 0; e < vec; ++e) {
        result.e[e] = epilogue.finish(row[j].e[e] * first[e] * second[e] + bias[e], index + j * chunk.out.w + e);
      }
      *reinterpret_cast<Aligned<T, vec>*>(y + index + j * chunk.out.w) = result;
    }
  });
}

// NCHW. A block takes 8 tiles, whatever rows they lie in, and 32 filters: M is read along K, the results are turned in
// shared memory and written a tile's row at a time, m neighbours of Q by one instruction where Q lets it.
constexpr int output_block_tiles = 8;
constexpr int output_block_filters = 32;

template <typename T, int m>
__global__ void __launch_bounds__(256)
    output_transform_nchw(const Chunk chunk, const float* __restrict__ products,  // M [alpha^2][T][k_pad]
                          const int* __restrict__ tile_exponents,                 // [T] or null
                          const int* __restrict__ filter_exponents,               // [K]
                          T* __restrict__ y,                                      // [N, K, P, Q]
                          Epilogue<T> epilogue) {
  constexpr int rows = m * output_block_tiles;     // of m outputs, for one filter
  constexpr int pitch = m * rows + m;              // a filter's rows, and one more: no bank conflicts over filters
  constexpr int filters_at_a_time = 256 / rows;
  __shared__ Aligned<float, m> turned[output_block_filters * pitch / m];  // [filters][m][tiles] rows
  const int tile0 = blockIdx.x * output_block_tiles, k0 = blockIdx.y * output_block_filters;

  if (const int slot = threadIdx.x / 32, lane = threadIdx.x % 32; tile0 + slot < chunk.tiles && k0 + lane < chunk.k) {
    const int tile = tile0 + slot, k = k0 + lane;
    const bool scaled = tile_exponents != nullptr;
    const Unscale unscale(scaled ? tile_exponents[tile] : 0, scaled ? filter_exponents[k] : 0);
    const float bias = epilogue.bias_of(k);
    const auto load = [&](int frequency) {
      const std::int64_t row = static_cast<std::int64_t>(frequency) * chunk.tiles + tile;
      return load_pack<1>(products + row * chunk.k_pad + k);
    };
    transform_output_tile<m, Pack<1>>(load, [&](int i, const Pack<1>(&row)[m]) {
      Aligned<float, m> result;
#pragma unroll
      for (int j = 0; j < m; ++j) result.e[j] = unscale(row[j].e[0]) + bias;
      turned[lane * (pitch / m) + i * output_block_tiles + slot] = result;
    });
  }
  __syncthreads();

  const int slot = threadIdx.x % output_block_tiles, i = threadIdx.x / output_block_tiles % m;
  if (tile0 + slot >= chunk.tiles) return;
  const TilePosition position = tile_position(chunk, tile0 + slot);
  const int p = position.tp * m + i, q = position.tq * m;
  if (p >= chunk.p) return;
  const bool whole = chunk.q % m == 0;
  const int first = threadIdx.x / rows, filters = min(output_block_filters, chunk.k - k0);
  std::int64_t index = chunk.out(position.n, k0 + first, p, q);
  for (int k = first; k < filters; k += filters_at_a_time, index += filters_at_a_time * chunk.out.c) {
    const Aligned<float, m> sums = turned[k * (pitch / m) + i * output_block_tiles + slot];
    if (whole) {
      Aligned<T, m> result;
#pragma unroll
      for (int j = 0; j < m; ++j) result.e[j] = epilogue.finish(sums.e[j], index + j);
      *reinterpret_cast<Aligned<T, m>*>(y + index) = result;
    } else {
#pragma unroll
      for (int j = 0; j < m; ++j) {
        if (q + j < chunk.q) y[index + j] = epilogue.finish(sums.e[j], index + j);
      }
    }
  }
}

}  // namespace fastconv::winograd
