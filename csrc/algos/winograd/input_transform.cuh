// V = B^T d B for a chunk of tiles, with the tile's scale and, in split mode, the split into two halves.
#pragma once

#include "algos/winograd/tile_math.cuh"

namespace fastconv::winograd {

// NHWC. A row of the block (blockDim.x lanes) takes a tile, a lane `vec` channels: loads and stores coalesce over C.
// While a tile's channels fit the row's registers, x is read once.
template <typename T, int m, Mode mode, int vec>
__global__ void __launch_bounds__(512)
    input_transform_nhwc(const Chunk chunk, const T* __restrict__ x,    // [N, H, W, C]
                         typename Operand<mode>::type* __restrict__ v,  // [alpha^2][T][depth]
                         int* __restrict__ exponents) {                 // [T]
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

  const auto scale_and_transform = [&](float scale) {
    if constexpr (mode != Mode::fp32) {
#pragma unroll
      for (int i = 0; i < alpha; ++i) {
#pragma unroll
        for (int j = 0; j < alpha; ++j) d[i][j] = d[i][j] * scale;
      }
    }
    transform_input_tile<m>(d);
  };
  const auto store = [&](int c, float factor) {
    typename Operand<mode>::type* row = v + static_cast<std::int64_t>(tile) * chunk.depth + c;
    const std::int64_t pitch = static_cast<std::int64_t>(chunk.tiles) * chunk.depth;
#pragma unroll
    for (int i = 0; i < alpha; ++i) {
#pragma unroll
      for (int j = 0; j < alpha; ++j, row += pitch) {
        store_operand<mode, false>(row, chunk.c_pad, chunk.depth, d[i][j] * factor);
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
    largest = lanes_max(largest, blockDim.x);
    if (chunk.c_pad <= step) {
      // The warp transforms with its own scale before it knows the row's, to which an exact factor leads.
      const int own = scale_exponent(largest, input_target_exponent<m>);
      scale_and_transform(power_of_two(own));
      const int exponent = scale_exponent(row_max(largest, blockDim.x, scratch), input_target_exponent<m>);
      if (active && threadIdx.x == 0) exponents[tile] = exponent;
      if (active && threadIdx.x * vec < chunk.c_pad) store(threadIdx.x * vec, power_of_two(max(exponent - own, -126)));
      return;
    }
    const int exponent = scale_exponent(row_max(largest, blockDim.x, scratch), input_target_exponent<m>);
    scale = power_of_two(exponent);
    if (active && threadIdx.x == 0) exponents[tile] = exponent;
  }
  if (!active) return;
  for (int c = threadIdx.x * vec; c < chunk.c_pad; c += step) {
    load(c);
    scale_and_transform(scale);
    store(c, 1.0f);
  }
}

}  // namespace fastconv::winograd
