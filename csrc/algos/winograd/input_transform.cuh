// V = B^T d B for a chunk of tiles, with the tile's scale and, in split mode, the split into two halves.
#pragma once

#include "algos/winograd/tile_math.cuh"

namespace fastconv::winograd {

// NHWC. A row of the block (blockDim.x lanes) takes a tile, a lane `vec` channels: loads and stores coalesce over C.
// While a tile's channels fit the row's registers, x is read once: the values wait there for the tile's maximum.
template <typename T, int m, Mode mode, int vec>
__global__ void __launch_bounds__(512) input_transform_nhwc(
    const Chunk chunk, const T* __restrict__ x,          // [N, H, W, C]
    typename Operand<mode>::type* __restrict__ v,         // [alpha^2][T][depth]
    int* __restrict__ exponents) {                        // [T]
  constexpr int alpha = m + 2;
  __shared__ float scratch[16];
  const int tile = blockIdx.x * blockDim.y + threadIdx.y;
  const bool active = tile < chunk.tiles;
  const TilePosition position = tile_position(chunk, active ? tile : 0);
  const int h0 = position.tp * m - chunk.pad_h, w0 = position.tq * m - chunk.pad_w;
  const T* corner = x + chunk.in(position.n, 0, h0, w0);
  const int step = blockDim.x * vec;

  Pack<vec> d[alpha][alpha];
  const auto load = [&](int c) {
#pragma unroll
    for (int i = 0; i < alpha; ++i) {
      const bool row_inside = active && c < chunk.c && static_cast<unsigned>(h0 + i) < static_cast<unsigned>(chunk.h);
#pragma unroll
      for (int j = 0; j < alpha; ++j) {
        d[i][j] = Pack<vec>{};
        if (row_inside && static_cast<unsigned>(w0 + j) < static_cast<unsigned>(chunk.w)) {
          d[i][j] = load_pack<vec>(corner + i * chunk.in.h + j * chunk.in.w + c);
        }
      }
    }
  };

  float scale = 1.0f;
  if constexpr (mode != Mode::fp32) {
    float largest = 0.0f;
    for (int c = threadIdx.x * vec; c < chunk.c_pad; c += step) {
      load(c);
#pragma unroll
      for (int i = 0; i < alpha; ++i) {
#pragma unroll
        for (int j = 0; j < alpha; ++j) {
#pragma unroll
          for (int e = 0; e < vec; ++e) largest = fmaxf(largest, fabsf(d[i][j].e[e]));
        }
      }
    }
    largest = row_max(largest, blockDim.x, scratch);
    const int exponent = scale_exponent(largest, input_target_exponent<m>);
    scale = power_of_two(exponent);
    if (active && threadIdx.x == 0) exponents[tile] = exponent;
  }
  if (!active) return;

  const bool loaded = mode != Mode::fp32 && chunk.c_pad <= step;
  for (int c = threadIdx.x * vec; c < chunk.c_pad; c += step) {
    if (!loaded) load(c);
    if constexpr (mode != Mode::fp32) {
#pragma unroll
      for (int i = 0; i < alpha; ++i) {
#pragma unroll
        for (int j = 0; j < alpha; ++j) d[i][j] = d[i][j] * scale;
      }
    }
    transform_input_tile<m>(d);
#pragma unroll
    for (int i = 0; i < alpha; ++i) {
#pragma unroll
      for (int j = 0; j < alpha; ++j) {
        const std::int64_t row = static_cast<std::int64_t>(i * alpha + j) * chunk.tiles + tile;
        store_operand<mode, false>(v + row * chunk.depth + c, chunk.c_pad, d[i][j]);
      }
    }
  }
}

// NCHW: the largest |x| over the channels of every pixel, as the bits of a non-negative float, whose order is that of
// integers. `maxima` is zeroed before; a block takes 256 pixels and `channels_per_block` channels.
constexpr int channels_per_block = 32;

template <typename T>
__global__ void pixel_maxima_nchw(const Chunk chunk, std::int64_t pixels,   // N * H * W
                                  const T* __restrict__ x,                  // [N, C, H, W]
                                  int* __restrict__ maxima) {               // [N, H, W]
  const std::int64_t pixel = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pixel >= pixels) return;
  const std::int64_t plane = chunk.in.c, n = pixel / plane;
  const int c0 = blockIdx.y * channels_per_block, c1 = min(c0 + channels_per_block, chunk.c);
  const T* source = x + n * chunk.in.n + pixel % plane;
  float largest = 0.0f;
  for (int c = c0; c < c1; ++c) largest = fmaxf(largest, fabsf(to_float(source[c * plane])));
  atomicMax(maxima + pixel, __float_as_int(largest));
}

// NCHW. A block takes a strip of tiles of one tile row and 64 channels: the raw patch is read along W and turned in
// shared memory, so that V is written along C.
constexpr int strip_tiles = 8;
constexpr int strip_channels = 64;

template <int m>
struct InputStrip {
  static constexpr int alpha = m + 2;
  static constexpr int width = strip_tiles * m + 2;
  static constexpr int pitch = alpha * width + 1;  // odd: a warp that walks over channels touches every bank
  static constexpr int bytes = strip_channels * pitch * static_cast<int>(sizeof(float));
};

template <typename T, int m, Mode mode>
__global__ void __launch_bounds__(256) input_transform_nchw(
    const Chunk chunk, int strips_per_row, const T* __restrict__ x,  // [N, C, H, W]
    const float* __restrict__ maxima,                                // [N, H, W]
    typename Operand<mode>::type* __restrict__ v,                     // [alpha^2][T][depth]
    int* __restrict__ exponents) {                                    // [T]
  using Strip = InputStrip<m>;
  constexpr int alpha = m + 2, vec = 2;
  extern __shared__ float patch[];  // [strip_channels][alpha][width], channels at Strip::pitch
  const int tile_row = chunk.first_tile / chunk.tiles_q + blockIdx.x / strips_per_row;  // n * tiles_p + tp
  const int tq0 = blockIdx.x % strips_per_row * strip_tiles;
  const int n = tile_row / chunk.tiles_p, tp = tile_row % chunk.tiles_p;
  const int h0 = tp * m - chunk.pad_h, w0 = tq0 * m - chunk.pad_w, c0 = blockIdx.y * strip_channels;

  for (int index = threadIdx.x; index < strip_channels * alpha * Strip::width; index += blockDim.x) {
    const int j = index % Strip::width, i = index / Strip::width % alpha, c = index / (Strip::width * alpha);
    const int h = h0 + i, w = w0 + j;
    const bool inside = c0 + c < chunk.c && static_cast<unsigned>(h) < static_cast<unsigned>(chunk.h) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(chunk.w);
    patch[c * Strip::pitch + i * Strip::width + j] = inside ? to_float(x[chunk.in(n, c0 + c, h, w)]) : 0.0f;
  }

  // A warp per tile, a lane per two channels.
  const int lane = threadIdx.x % 32, slot = threadIdx.x / 32, tq = tq0 + slot;
  const int tile = tile_row * chunk.tiles_q + tq - chunk.first_tile;
  const bool active = tq < chunk.tiles_q && tile >= 0 && tile < chunk.tiles;
  float scale = 1.0f;
  if constexpr (mode != Mode::fp32) {
    float largest = 0.0f;
    for (int index = lane; index < alpha * alpha; index += 32) {
      const int h = h0 + index / alpha, w = w0 + slot * m + index % alpha;
      if (static_cast<unsigned>(h) < static_cast<unsigned>(chunk.h) &&
          static_cast<unsigned>(w) < static_cast<unsigned>(chunk.w)) {
        largest = fmaxf(largest, maxima[(static_cast<std::int64_t>(n) * chunk.h + h) * chunk.w + w]);
      }
    }
    const int exponent = scale_exponent(row_max(largest, 32, nullptr), input_target_exponent<m>);
    scale = power_of_two(exponent);
    if (active && lane == 0 && blockIdx.y == 0) exponents[tile] = exponent;
  }
  __syncthreads();
  const int c = c0 + lane * vec;
  if (!active || c >= chunk.c_pad) return;

  Pack<vec> d[alpha][alpha];
#pragma unroll
  for (int i = 0; i < alpha; ++i) {
#pragma unroll
    for (int j = 0; j < alpha; ++j) {
      const float* source = patch + lane * vec * Strip::pitch + i * Strip::width + slot * m + j;
#pragma unroll
      for (int e = 0; e < vec; ++e) d[i][j].e[e] = source[e * Strip::pitch] * scale;
    }
  }
  transform_input_tile<m>(d);
#pragma unroll
  for (int i = 0; i < alpha; ++i) {
#pragma unroll
    for (int j = 0; j < alpha; ++j) {
      const std::int64_t row = static_cast<std::int64_t>(i * alpha + j) * chunk.tiles + tile;
      store_operand<mode, false>(v + row * chunk.depth + c, chunk.c_pad, d[i][j]);
    }
  }
}

}  // namespace fastconv::winograd
