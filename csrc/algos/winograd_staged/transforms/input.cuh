// V = B^T d B for a chunk of tiles, with the tile's scale and, in split mode, the split into two halves.
#pragma once

#include "algos/winograd_staged/transforms/tile_math.cuh"
#include "device/dependent_launch.cuh"
#include "device/mma.cuh"

namespace fastconv::algos::winograd_staged {

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
        store_operand<mode, false>(row, chunk.c_pad, chunk.depth > 2 * chunk.c_pad, d[i][j] * factor);
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
          for (int e = 0; e < vec; ++e) largest = larger_finite(largest, d[i][j].e[e]);
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

// For our own product: a block is a warp, which takes a tile and a group of up to 64 channels, a lane two of them. The
// scale is the warp's own business, so nobody waits for anybody. The patch comes through shared memory: by asynchronous
// copies of 16 bytes, zeros outside, or, where C is no multiple of 4, by ordinary loads.
static_assert(product_channels == 64);

// Half a warp takes a pixel: lane l brings 4 channels.
template <int m>
__device__ __forceinline__ void copy_patch(const Chunk& chunk, const float* __restrict__ x,
                                           const TilePosition& position, int first, std::uint32_t patch) {
  constexpr int alpha = m + 2, pixel_bytes = product_channels * 4;
  const int half = static_cast<int>(threadIdx.x) / 16, c = first + 4 * (static_cast<int>(threadIdx.x) % 16);
  const int h0 = position.tp * m - chunk.pad_h, w0 = position.tq * m - chunk.pad_w + half;
  const float* row = x + chunk.in(position.n, c, h0, w0);
  const int pitch = static_cast<int>(chunk.in.w);
  patch += threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < alpha; ++i, row += chunk.in.h) {
    const bool row_inside = c < chunk.c && static_cast<unsigned>(h0 + i) < static_cast<unsigned>(chunk.h);
#pragma unroll
    for (int j = 0; j < alpha; j += 2) {
      const bool inside = row_inside && static_cast<unsigned>(w0 + j) < static_cast<unsigned>(chunk.w);
      const float* pixel = inside ? row + j * pitch : x;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(patch + (i * alpha + j) * pixel_bytes),
                   "l"(pixel), "r"(inside ? 16 : 0)
                   : "memory");
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Brings what the lane will read itself: alpha x alpha positions of its two channels.
template <int m>
__device__ __forceinline__ void load_patch(const Chunk& chunk, const float* __restrict__ x,
                                           const TilePosition& position, int c, float2* patch) {
  constexpr int alpha = m + 2;
  const int h0 = position.tp * m - chunk.pad_h, w0 = position.tq * m - chunk.pad_w;
  const float* row = x + chunk.in(position.n, c, h0, w0);
  const int pitch = static_cast<int>(chunk.in.w);
#pragma unroll 1
  for (int i = 0; i < alpha; ++i, row += chunk.in.h) {
    const bool row_inside = static_cast<unsigned>(h0 + i) < static_cast<unsigned>(chunk.h);
#pragma unroll
    for (int j = 0; j < alpha; ++j) {
      const bool inside = row_inside && static_cast<unsigned>(w0 + j) < static_cast<unsigned>(chunk.w);
      const float* pixel = row + j * pitch;
      patch[(i * alpha + j) * (product_channels / 2)] = {inside && c < chunk.c ? pixel[0] : 0.0f,
                                                         inside && c + 1 < chunk.c ? pixel[1] : 0.0f};
    }
  }
}

template <int m, bool vectors>  // vectors: copies of 16 bytes are possible
__global__ void __launch_bounds__(32, 20)
    input_transform_groups(const Chunk chunk, const float* __restrict__ x,  // [N, H, W, C]
                           half_t* __restrict__ v,                          // [alpha^2][T][groups][2][group_channels]
                           int* __restrict__ exponents) {                   // [groups][exponent_pitch(T)]
  constexpr int alpha = m + 2;
  __shared__ alignas(16) float2 patches[alpha * alpha][product_channels / 2];
  if (gridDim.x <= few_blocks) launch_dependents();
  const int lane = threadIdx.x;
  unsigned number = blockIdx.x;  // neighbours take the groups of a tile, whose rows lie together
  const int group = static_cast<int>(chunk.by_groups.divmod(number)), tile = static_cast<int>(number);
  const TilePosition position = tile_position(chunk, tile);
  const int first = group * chunk.group_channels;
  float2* const patch = &patches[0][lane];
  if constexpr (vectors) {
    copy_patch<m>(chunk, x, position, first, shared_address(patches));
    __syncwarp();
  } else {
    load_patch<m>(chunk, x, position, first + 2 * lane, patch);
  }
  const bool exists = 2 * lane < chunk.group_channels;  // the copy brings channels of the next group, too
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < alpha * alpha; ++i) {
    const float2 pair = patch[i * (product_channels / 2)];
    largest = larger_finite(larger_finite(largest, pair.x), pair.y);
  }
  // Bits of floats that are not negative are in the order of the floats.
  largest = __uint_as_float(__reduce_max_sync(0xffffffffu, exists ? __float_as_uint(largest) : 0u));
  // A group of zeros has no say in the scale of its tile, which is that of the least exponent.
  const int exponent = largest == 0.0f ? 126 : scale_exponent(largest, input_target_exponent<m>);
  if (lane == 0) {
    int* row = exponents + group * static_cast<int>(exponent_pitch(chunk.tiles));
    row[tile] = exponent;
    if (tile == chunk.tiles - 1) {
      for (int i = chunk.tiles; i < exponent_pitch(chunk.tiles); ++i) row[i] = exponent;  // may be read, with the rest
    }
  }
  if (!exists) return;
  const float scale = power_of_two(exponent);
  Pack<2> d[alpha][alpha];
#pragma unroll
  for (int j = 0; j < alpha; ++j) {
    Pack<2> column[alpha], result[alpha];
#pragma unroll
    for (int i = 0; i < alpha; ++i) {
      const float2 pair = patch[(i * alpha + j) * (product_channels / 2)];  // once more: registers are what is scarce
      column[i] = Pack<2>{{pair.x, pair.y}} * scale;
    }
    winograd::Transform<m>::input(column, result);
#pragma unroll
    for (int i = 0; i < alpha; ++i) d[i][j] = result[i];
  }
  half_t* row = v + static_cast<std::int64_t>(tile) * chunk.depth + 2 * (first + lane);
  const std::int64_t pitch = static_cast<std::int64_t>(chunk.tiles) * chunk.depth;
#pragma unroll
  for (int i = 0; i < alpha; ++i) {
    Pack<2> result[alpha];
    winograd::Transform<m>::input(d[i], result);
#pragma unroll
    for (int j = 0; j < alpha; ++j, row += pitch) {
      store_operand<Mode::split, false>(row, chunk.group_channels, false, result[j]);
    }
  }
}

}  // namespace fastconv::algos::winograd_staged
