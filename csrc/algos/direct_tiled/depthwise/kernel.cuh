// A thread walks down a strip of one channel's outputs (depthwise/plan.h); the filter and the open sums are in
// registers.
#pragma once

#include "algos/direct_tiled/depthwise/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"

namespace fastconv::algos::direct_tiled::depthwise {

template <typename T>
struct Params {
  const T* x;       // [N, C, H, W] in the layout of the kernel
  const T* weight;  // [C, 1, R, S]
  T* y;             // [N, C, P, Q], as x
  Epilogue<T> epilogue;
  std::int64_t x_image, y_image;  // strides, in elements
  int c, h, w, p, q, pad_h, pad_w, strip, channel_tiles;
  bool plain;      // neither residual nor SiLU
  unsigned tasks;  // of a channel (NHWC) or of all
  FastDivide by_channel_tiles, by_columns, by_strips, by_c;
};

// The sums of the output rows whose windows are open, for `columns` neighbouring outputs of a channel.
// Turn i brings the input rows i * stride .. i * stride + stride - 1 of the strip; then output row i - open +
// 1 is complete.
template <int r_, int stride_, int columns_>
struct Shape {
  static constexpr int r = r_, stride = stride_, columns = columns_;
  static constexpr int inputs = (columns - 1) * stride + r;
  static constexpr int open = (r + stride - 1) / stride;
};

template <typename S>
struct Window {
  float filter[S::r * S::r];
  float sum[S::open][S::columns] = {};

  // Row `row` (0 .. stride - 1) of a turn.
  template <typename T>
  __device__ __forceinline__ void add(int row, const T (&input)[S::inputs]) {
#pragma unroll
    for (int a = 0; a < S::open; ++a) {
      const int r = row + (S::open - 1 - a) * S::stride;
      if (r >= S::r) continue;
#pragma unroll
      for (int s = 0; s < S::r; ++s) {
#pragma unroll
        for (int j = 0; j < S::columns; ++j) {
          sum[a][j] = fmaf(to_float(input[j * S::stride + s]), filter[r * S::r + s], sum[a][j]);
        }
      }
    }
  }
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int a = 0; a < S::open; ++a) {
#pragma unroll
      for (int j = 0; j < S::columns; ++j) {
        sum[a][j] = a + 1 < S::open ? sum[a + 1][j] : 0.0f;
      }
    }
  }
};

// Walks down a strip: first_p, columns from q0 on. The rows of the next turn are on their way while this one's are
// multiplied.
template <typename S, typename T>
__device__ __forceinline__ void run_strip(const Params<T>& params, Window<S>& window, const T* x, T* y,
                                          std::int64_t y_index, int channel, int first_p, int q0, int pixel_stride) {
  const int rows = min(params.strip, params.p - first_p);
  const int h0 = first_p * S::stride - params.pad_h, w0 = q0 * S::stride - params.pad_w;
  unsigned inside = 0;  // a bit for each input column
#pragma unroll
  for (int i = 0; i < S::inputs; ++i) {
    inside |= static_cast<unsigned>(static_cast<unsigned>(w0 + i) < static_cast<unsigned>(params.w)) << i;
  }
  const float bias = params.epilogue.bias_of(channel);
  T next[S::stride][S::inputs];
  const auto fetch = [&](int i) {
#pragma unroll
    for (int row = 0; row < S::stride; ++row) {
      const int h = h0 + i * S::stride + row;
      const unsigned columns = static_cast<unsigned>(h) < static_cast<unsigned>(params.h) ? inside : 0;
      const T* source = x + (static_cast<std::int64_t>(h) * params.w + w0) * pixel_stride;
      if (S::r > 3 && S::columns > 1 && columns == (1u << S::inputs) - 1) {  // mostly, and then for the whole warp
#pragma unroll
        for (int j = 0; j < S::inputs; ++j) next[row][j] = source[j * pixel_stride];
        continue;
      }
#pragma unroll
      for (int j = 0; j < S::inputs; ++j) {
        next[row][j] = from_float<T>(0.0f);
        if (columns >> j & 1) next[row][j] = source[j * pixel_stride];
      }
    }
  };
  const int turns = rows + S::open - 1;
  fetch(0);
#pragma unroll 1  // more would not fit the instruction cache
  for (int i = 0; i < turns; ++i) {
    T input[S::stride][S::inputs];
#pragma unroll
    for (int row = 0; row < S::stride; ++row) {
#pragma unroll
      for (int j = 0; j < S::inputs; ++j) input[row][j] = next[row][j];
    }
    if (i + 1 < turns) fetch(i + 1);
#pragma unroll
    for (int row = 0; row < S::stride; ++row) window.add(row, input[row]);
    const int done = i - S::open + 1;
    if (done >= 0) {
      const std::int64_t at = y_index + (static_cast<std::int64_t>(first_p + done) * params.q + q0) * pixel_stride;
#pragma unroll
      for (int j = 0; j < S::columns; ++j) {
        if (q0 + j >= params.q) break;
        const float sum = window.sum[0][j] + bias;
        const std::int64_t index = at + j * pixel_stride;
        y[index] =
            params.plain ? from_float<T>(params.epilogue.activate.piecewise(sum)) : params.epilogue.finish(sum, index);
      }
    }
    window.turn();
  }
}

// NHWC: a warp has 32 neighbouring channels.
template <typename S, typename T>
__global__ void __launch_bounds__(warps * 32, blocks_per_processor(S::r, S::stride))
    convolve_nhwc(const __grid_constant__ Params<T> params) {
  constexpr int taps = S::r * S::r, block_channels = 32;
  __shared__ float filters[block_channels * taps];  // [channel][tap]
  unsigned block = blockIdx.x;
  const int first_channel = static_cast<int>(params.by_channel_tiles.divmod(block)) * block_channels;
  const int count = min(block_channels, params.c - first_channel) * taps;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += warps * 32) {
    filters[i] = to_float(params.weight[static_cast<std::int64_t>(first_channel) * taps + i]);
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned task = block * warps + threadIdx.x / 32;
  const int channel = first_channel + lane;
  if (task >= params.tasks || channel >= params.c) return;
  const int q0 = static_cast<int>(params.by_columns.divmod(task)) * S::columns;
  const int first_p = static_cast<int>(params.by_strips.divmod(task)) * params.strip;
  Window<S> window;
#pragma unroll
  for (int t = 0; t < taps; ++t) window.filter[t] = filters[lane * taps + t];
  const std::int64_t y_index = task * params.y_image + channel;  // what is left of the task is the image
  run_strip<S>(params, window, params.x + task * params.x_image + channel, params.y, y_index, channel, first_p, q0,
               params.c);
}

// NCHW: neighbouring threads have neighbouring columns, of one plane or of two.
template <typename S, typename T>
__global__ void __launch_bounds__(warps * 32) convolve_nchw(const __grid_constant__ Params<T> params) {
  constexpr int taps = S::r * S::r;
  unsigned task = blockIdx.x * (warps * 32) + threadIdx.x;
  if (task >= params.tasks) return;
  const int q0 = static_cast<int>(params.by_columns.divmod(task));
  const int first_p = static_cast<int>(params.by_strips.divmod(task)) * params.strip;
  const int channel = static_cast<int>(params.by_c.divmod(task));
  Window<S> window;
#pragma unroll
  for (int t = 0; t < taps; ++t) window.filter[t] = to_float(__ldg(params.weight + channel * taps + t));
  const std::int64_t x_plane = static_cast<std::int64_t>(channel) * params.h * params.w;
  const std::int64_t y_plane = static_cast<std::int64_t>(channel) * params.p * params.q;
  run_strip<S>(params, window, params.x + task * params.x_image + x_plane, params.y, task * params.y_image + y_plane,
               channel, first_p, q0, 1);
}

}  // namespace fastconv::algos::direct_tiled::depthwise
