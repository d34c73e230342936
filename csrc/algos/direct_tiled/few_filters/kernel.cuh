// Few filters. NHWC: the lanes of a warp have neighbouring channels, each multiplies a patch of its own by all filters,
// and the lanes' sums are added at the end: an input is one coalesced load for k_tile * r * r multiply-adds. NCHW: a
// thread has some rows of a column and walks over the channels. Filters lie in shared memory as FP32.
#pragma once

#include "algos/direct_tiled/few_filters/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"

namespace fastconv::algos::direct_tiled::few_filters {

template <typename T>
struct Params {
  const T* x;       // [N, C, H, W] in the layout of the kernel
  const T* weight;  // [K, C, R, R]
  T* y;             // [N, K, P, Q], as x
  Epilogue<T> epilogue;
  std::int64_t x_image, y_image;  // strides, in elements
  int c, h, w, k, p, q, pad_h, pad_w, c_pad;
  unsigned tasks;
  FastDivide by_q_tiles, by_p_tiles;  // NCHW: q_tiles = q
  int x_pixel, y_pixel;               // from one pixel to the next
};

// [tap][channel][k_tile]
template <int taps, int k_tile, typename T>
__device__ __forceinline__ void load_filters(const Params<T>& params, float* filters) {
  const int size = taps * params.c_pad * k_tile;
  for (int i = threadIdx.x; i < size; i += block_threads) filters[i] = 0.0f;
  __syncthreads();
  const int count = params.k * params.c * taps;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += block_threads) {
    const int tap = i % taps, channel = i / taps % params.c, k = i / taps / params.c;
    filters[(tap * params.c_pad + channel) * k_tile + k] = to_float(params.weight[i]);
  }
  __syncthreads();
}

template <int k_tile>
struct alignas(k_tile % 4 == 0 ? 16 : 4) Filters {
  float k[k_tile];
};

// One row of a patch, input row i of it, into the sums of the outputs that it is under. at(tap): that tap's filters.
template <int r, int k_tile, int rows, int columns, typename At>
__device__ __forceinline__ void multiply_row(int i, const float (&input)[columns + r - 1], const At& at,
                                             float (&sum)[rows * columns * k_tile]) {
#pragma unroll
  for (int p = 0; p < rows; ++p) {
    const int tap_row = i - p;
    if (tap_row < 0 || tap_row >= r) continue;
#pragma unroll
    for (int s = 0; s < r; ++s) {
      const Filters<k_tile> filters = at(tap_row * r + s);
#pragma unroll
      for (int q = 0; q < columns; ++q) {
#pragma unroll
        for (int k = 0; k < k_tile; ++k) {
          float& value = sum[(p * columns + q) * k_tile + k];
          value = fmaf(input[q + s], filters.k[k], value);
        }
      }
    }
  }
}

// Filters of larger kernels do not fit registers, where the compiler would like to have them.
template <int r, int rows>
constexpr int rows_at_once = r == 3 ? rows + r - 1 : 1;

// The sums of all lanes, of which a lane keeps some neighbouring ones, in value[0] and on: half of what it had in each
// step, or all of an odd number. Returns the first one's index.
template <int offset, int count, int size>
__device__ __forceinline__ int add_lanes(float (&value)[size]) {
  if constexpr (offset == 0) {
    return 0;
  } else if constexpr (count % 2 == 0) {
    const bool upper = threadIdx.x & offset;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const float first = value[i], second = value[i + count / 2];
      value[i] = (upper ? second : first) + __shfl_xor_sync(0xffffffff, upper ? first : second, offset);
    }
    return (upper ? count / 2 : 0) + add_lanes<offset / 2, count / 2>(value);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) value[i] += __shfl_xor_sync(0xffffffff, value[i], offset);
    return add_lanes<offset / 2, count>(value);
  }
}
// How many they are.
constexpr int left_of(int count) {
  for (int offset = 16; offset > 0 && count % 2 == 0; offset /= 2) count /= 2;
  return count;
}

template <typename T, int r, int k_tile>
__global__ void __launch_bounds__(block_threads, blocks_per_processor)
    convolve_nhwc(const __grid_constant__ Params<T> params) {
  constexpr int rows = tile_p, columns = tile_q(Layout::nhwc), inputs = columns + r - 1;
  constexpr int count = rows * columns * k_tile;
  extern __shared__ float4 shared[];
  float* filters = reinterpret_cast<float*>(shared);
  load_filters<r * r, k_tile>(params, filters);

  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (unsigned task = blockIdx.x * warps + threadIdx.x / 32; task < params.tasks; task += gridDim.x * warps) {
    unsigned n = task;
    const int q0 = static_cast<int>(params.by_q_tiles.divmod(n)) * columns;
    const int p0 = static_cast<int>(params.by_p_tiles.divmod(n)) * rows;
    const int h0 = p0 - params.pad_h, w0 = q0 - params.pad_w;
    unsigned inside = 0;  // a bit for each column of the patch
#pragma unroll
    for (int j = 0; j < inputs; ++j) {
      inside |= static_cast<unsigned>(static_cast<unsigned>(w0 + j) < static_cast<unsigned>(params.w)) << j;
    }
    float sum[count] = {};
#pragma unroll 1
    for (int c0 = 0; c0 < params.c_pad; c0 += 32) {
      const int channel = c0 + lane;
      const unsigned columns_inside = channel < params.c ? inside : 0;
      const T* corner = params.x + n * params.x_image + (h0 * params.w + w0) * params.x_pixel + channel;
      T next[inputs];
      const auto fetch = [&](int i) {
        const bool row_inside = static_cast<unsigned>(h0 + i) < static_cast<unsigned>(params.h);
#pragma unroll
        for (int j = 0; j < inputs; ++j) {
          next[j] = from_float<T>(0.0f);
          if (row_inside && (columns_inside >> j & 1)) next[j] = corner[(i * params.w + j) * params.x_pixel];
        }
      };
      const float* mine = filters + channel * k_tile;
      const int tap_pitch = params.c_pad * k_tile;
      fetch(0);
#pragma unroll(rows_at_once<r, rows>)
      for (int i = 0; i < rows + r - 1; ++i) {
        float input[inputs];
#pragma unroll
        for (int j = 0; j < inputs; ++j) input[j] = to_float(next[j]);
        if (i + 1 < rows + r - 1) fetch(i + 1);
        multiply_row<r, k_tile, rows, columns>(
            i, input, [&](int tap) { return *reinterpret_cast<const Filters<k_tile>*>(mine + tap * tap_pitch); }, sum);
      }
    }
    const int first = add_lanes<16, count>(sum);
#pragma unroll
    for (int e = 0; e < left_of(count); ++e) {
      const int k = (first + e) % k_tile, pixel = (first + e) / k_tile;
      const int p = p0 + pixel / columns, q = q0 + pixel % columns;
      if (k >= params.k || p >= params.p || q >= params.q) continue;
      const std::int64_t at = n * params.y_image + (static_cast<std::int64_t>(p) * params.q + q) * params.y_pixel + k;
      params.y[at] = params.epilogue(sum[e], at, k);
    }
  }
}

template <typename T, int r, int k_tile>
__global__ void __launch_bounds__(block_threads, blocks_per_processor)
    convolve_nchw(const __grid_constant__ Params<T> params) {
  constexpr int rows = tile_p, patch_rows = rows + r - 1;
  extern __shared__ float4 shared[];
  float* filters = reinterpret_cast<float*>(shared);
  load_filters<r * r, k_tile>(params, filters);

  const int x_plane = params.h * params.w, y_plane = params.p * params.q;
  for (unsigned task = blockIdx.x * block_threads + threadIdx.x; task < params.tasks;
       task += gridDim.x * block_threads) {
    unsigned n = task;
    const int q = static_cast<int>(params.by_q_tiles.divmod(n));
    const int p0 = static_cast<int>(params.by_p_tiles.divmod(n)) * rows;
    const int h0 = p0 - params.pad_h, w0 = q - params.pad_w;
    unsigned inside = 0;
#pragma unroll
    for (int j = 0; j < r; ++j) {
      inside |= static_cast<unsigned>(static_cast<unsigned>(w0 + j) < static_cast<unsigned>(params.w)) << j;
    }
    float total[rows * k_tile] = {};
    const T* corner = params.x + n * params.x_image + h0 * params.w + w0;
    T next[patch_rows][r];  // of the next channel, on its way while this one's is multiplied
    const auto fetch = [&](int c) {
      const T* source = corner + c * x_plane;
#pragma unroll
      for (int i = 0; i < patch_rows; ++i) {
        const bool row_inside = static_cast<unsigned>(h0 + i) < static_cast<unsigned>(params.h);
#pragma unroll
        for (int j = 0; j < r; ++j) {
          next[i][j] = from_float<T>(0.0f);
          if (row_inside && (inside >> j & 1)) next[i][j] = source[i * params.w + j];
        }
      }
    };
    fetch(0);
    for (int c0 = 0; c0 < params.c; c0 += chunk_channels) {
      float sum[rows * k_tile] = {};  // sums of sums round less than one long chain
      const int end = min(c0 + chunk_channels, params.c);
#pragma unroll 1
      for (int c = c0; c < end; ++c) {
        float input[patch_rows][r];
#pragma unroll
        for (int i = 0; i < patch_rows; ++i) {
#pragma unroll
          for (int j = 0; j < r; ++j) input[i][j] = to_float(next[i][j]);
        }
        if (c + 1 < params.c) fetch(c + 1);
        const float* mine = filters + c * k_tile;
        const int tap_pitch = params.c_pad * k_tile;
#pragma unroll
        for (int i = 0; i < patch_rows; ++i) {
          multiply_row<r, k_tile, rows, 1>(
              i, input[i], [&](int tap) { return *reinterpret_cast<const Filters<k_tile>*>(mine + tap * tap_pitch); },
              sum);
        }
      }
#pragma unroll
      for (int i = 0; i < rows * k_tile; ++i) total[i] += sum[i];
    }
#pragma unroll
    for (int p = 0; p < rows; ++p) {
      if (p0 + p >= params.p) break;
#pragma unroll
      for (int k = 0; k < k_tile; ++k) {
        if (k >= params.k) break;
        const std::int64_t at = n * params.y_image + static_cast<std::int64_t>(k) * y_plane + (p0 + p) * params.q + q;
        params.y[at] = params.epilogue(total[p * k_tile + k], at, k);
      }
    }
  }
}

}  // namespace fastconv::algos::direct_tiled::few_filters
