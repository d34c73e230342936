// The finished tile: from fragments, unscaled, through shared memory, to rows of y.
#pragma once

#include "algos/implicit_gemm/portable/tile.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::portable {

// shared.filters: float32 [pixel][pitch_nhwc] or, for NCHW, [filter][pitch_nchw]
template <typename S>
__device__ __forceinline__ void stage_output(const Params<typename S::T>& params, SharedTile<S>& shared,
                                             const float (&total)[S::row_tiles][S::column_tiles][4],
                                             const int (&row_exponents)[S::rows], int first_filter) {
  auto* tile = reinterpret_cast<float*>(shared.filters);
#pragma unroll
  for (int n = 0; n < S::column_tiles; ++n) {
    const int column = n * 8 + threadIdx.x % 4 * 2;
    int exponent[2] = {0, 0};
    if constexpr (S::scaled) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int k = first_filter + column + j;
        if (k < params.k) exponent[j] = __ldg(params.exponents + S::group() * params.k + k);
      }
    }
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      const int row = row_of_lane(i);
      float2 value = make_float2(total[i / 2][n][i % 2 * 2], total[i / 2][n][i % 2 * 2 + 1]);
      if constexpr (S::scaled) {
        value.x = Unscale(row_exponents[i], exponent[0])(value.x);
        value.y = Unscale(row_exponents[i], exponent[1])(value.y);
      }
      if (params.nchw) {
        tile[column * S::pitch_nchw + row] = value.x;
        tile[(column + 1) * S::pitch_nchw + row] = value.y;
      } else {
        *reinterpret_cast<float2*>(tile + row * S::pitch_nhwc + column) = value;
      }
    }
  }
}

// `count` outputs of one pixel's neighbouring filters (or one filter's neighbouring pixels) from index on.
template <int count, bool one_filter, typename T>
__device__ __forceinline__ void finish(const Params<T>& params, const float* source, std::int64_t index, int k) {
  struct alignas(count * sizeof(T)) Elements {
    T e[count];
  };
  struct alignas(count * sizeof(float)) Floats {
    float e[count];
  };
  const Floats sum = *reinterpret_cast<const Floats*>(source);
  const Epilogue<T>& epilogue = params.epilogue;
  Elements residual{}, result;  // x + 0 is x, but for -0
  if (epilogue.residual != nullptr) residual = *reinterpret_cast<const Elements*>(epilogue.residual + index);
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float value = sum.e[i] + epilogue.bias_of(one_filter ? k : k + i);
    result.e[i] = from_float<T>(epilogue.finish_value(value, to_float(residual.e[i])));
  }
  *reinterpret_cast<Elements*>(params.y + index) = result;
}

template <typename S, int count>
__device__ __forceinline__ void store_nhwc(const Params<typename S::T>& params, const float* tile, unsigned first_pixel,
                                           int first_filter) {
  constexpr int groups = S::filter_tile / count;
#pragma unroll 4
  for (int i = threadIdx.x; i < pixel_tile * groups; i += threads) {
    const int row = i / groups, column = i % groups * count, k = first_filter + column;
    const unsigned pixel = first_pixel + row;
    if (pixel >= params.pixels || k >= params.k) continue;
    const int filter = static_cast<int>(S::group()) * params.k + k;
    finish<count, false>(params, tile + row * S::pitch_nhwc + column,
                         static_cast<std::int64_t>(pixel) * params.y_channels + filter, filter);
  }
}

template <typename S, int count>
__device__ __forceinline__ void store_nchw(const Params<typename S::T>& params, const float* tile, unsigned first_pixel,
                                           int first_filter) {
  constexpr int groups = pixel_tile / count;  // a thread keeps its pixels, and goes from filter to filter
  const int row = threadIdx.x % groups * count;
  if (first_pixel + row >= params.pixels) return;
  unsigned image = first_pixel + row;
  const unsigned pixel = params.by_pixels_per_image.divmod(image);
  const std::int64_t base = static_cast<std::int64_t>(image) * params.y_channels * params.pixels_per_image + pixel;
#pragma unroll 4
  for (int column = threadIdx.x / groups; column < S::filter_tile; column += threads / groups) {
    const int k = first_filter + column;
    if (k >= params.k) break;
    const int filter = static_cast<int>(S::group()) * params.k + k;
    finish<count, true>(params, tile + column * S::pitch_nchw + row,
                        base + static_cast<std::int64_t>(filter) * params.pixels_per_image, filter);
  }
}

template <typename S>
__device__ __forceinline__ void store_output(const Params<typename S::T>& params, const SharedTile<S>& shared,
                                             unsigned first_pixel, int first_filter) {
  const auto* tile = reinterpret_cast<const float*>(shared.filters);
  if (params.nchw) {
    if (params.quads) {
      store_nchw<S, 4>(params, tile, first_pixel, first_filter);
    } else {
      store_nchw<S, 1>(params, tile, first_pixel, first_filter);
    }
  } else if (params.quads) {
    store_nhwc<S, 4>(params, tile, first_pixel, first_filter);
  } else {
    store_nhwc<S, 1>(params, tile, first_pixel, first_filter);
  }
}

}  // namespace fastconv::algos::implicit_gemm::portable
