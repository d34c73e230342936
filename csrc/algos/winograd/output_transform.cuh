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
__global__ void __launch_bounds__(128, 3)
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

// NCHW. A block takes a strip of tiles of one tile row and 32 filters: M is read along K, the results are turned in
// shared memory and written along Q.
constexpr int output_strip_tiles = 8;
constexpr int output_strip_filters = 32;

template <typename T, int m>
__global__ void __launch_bounds__(256)
    output_transform_nchw(const Chunk chunk, int strips_per_row,
                          const float* __restrict__ products,        // M [alpha^2][T][k_pad]
                          const int* __restrict__ tile_exponents,    // [T] or null
                          const int* __restrict__ filter_exponents,  // [K]
                          T* __restrict__ y,                         // [N, K, P, Q]
                          Epilogue<T> epilogue) {
  constexpr int width = output_strip_tiles * m, pitch = m * width + 1;  // odd: no bank conflicts over filters
  __shared__ float turned[output_strip_filters * pitch];                // [filters][m][width]
  const int tile_row = chunk.first_tile / chunk.tiles_q + blockIdx.x / strips_per_row;  // n * tiles_p + tp
  const int tq0 = blockIdx.x % strips_per_row * output_strip_tiles, k0 = blockIdx.y * output_strip_filters;
  const int n = tile_row / chunk.tiles_p, tp = tile_row % chunk.tiles_p;
  const auto tile_of = [&](int slot) { return tile_row * chunk.tiles_q + tq0 + slot - chunk.first_tile; };
  const auto is_active = [&](int slot) {
    return tq0 + slot < chunk.tiles_q && tile_of(slot) >= 0 && tile_of(slot) < chunk.tiles;
  };

  const int lane = threadIdx.x % 32, slot = threadIdx.x / 32;
  if (is_active(slot) && k0 + lane < chunk.k) {
    const int tile = tile_of(slot), k = k0 + lane;
    const bool scaled = tile_exponents != nullptr;
    const Unscale unscale(scaled ? tile_exponents[tile] : 0, scaled ? filter_exponents[k] : 0);
    const auto load = [&](int frequency) {
      const std::int64_t row = static_cast<std::int64_t>(frequency) * chunk.tiles + tile;
      return load_pack<1>(products + row * chunk.k_pad + k);
    };
    transform_output_tile<m, Pack<1>>(load, [&](int i, const Pack<1>(&row)[m]) {
#pragma unroll
      for (int j = 0; j < m; ++j) turned[lane * pitch + i * width + slot * m + j] = unscale(row[j].e[0]);
    });
  }
  __syncthreads();

  for (int index = threadIdx.x; index < output_strip_filters * m * width; index += blockDim.x) {
    const int j = index % width, i = index / width % m, k = k0 + index / (width * m);
    const int p = tp * m + i, q = tq0 * m + j;
    if (k >= chunk.k || p >= chunk.p || q >= chunk.q || !is_active(j / m)) continue;
    const std::int64_t target = chunk.out(n, k, p, q);
    y[target] = epilogue.finish(turned[(k - k0) * pitch + i * width + j] + epilogue.bias_of(k), target);
  }
}

}  // namespace fastconv::winograd
