// One output tile of the implicit GEMM per block and turn: locate, then load and multiply chunk by chunk, then store.
#pragma once

#include "algos/fused_unroll/plan.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::fused_unroll {

template <typename T>
struct Params {
  ConvProblem problem;
  TileGrid grid;
  Strides4 in, out;
  Epilogue<T> epilogue;
};

// An output pixel: its sample in x, its place in y, and the input coordinates of its first tap.
struct Pixel {
  std::int64_t x, y;
  int h0, w0;
};

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};

// Four neighbours from shared memory in one access, in FP32: operands stay in T, products and sums do not.
template <typename T>
__device__ __forceinline__ void load_four(float (&values)[4], const T* source) {
  const Four<T> four = *reinterpret_cast<const Four<T>*>(source);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = to_float(four.value[i]);
}

template <typename T, int R, int TileK, int TilePixels>
struct Tile {
  static constexpr int threads = TileK * TilePixels / outputs_per_thread;
  static constexpr int channels = chunk_channels(R), taps = R * R, depth = channels * taps;
  static constexpr int k_pitch = TileK + line_padding, pixel_pitch = TilePixels + line_padding;
  static_assert(threads % 32 == 0 && threads >= TilePixels, "one thread locates one pixel");
  static_assert(k_pitch % 4 == 0 && pixel_pitch % 4 == 0, "lines keep the alignment of four elements");

  struct Shared {
    alignas(16) T weights[depth * k_pitch];     // [depth, TileK]
    alignas(16) T inputs[depth * pixel_pitch];  // [depth, TilePixels]
    Pixel pixels[TilePixels];
  };
  static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

  // Pixels beyond the last get a row that is outside of every input, so that all their taps read zero.
  static __device__ __forceinline__ void locate(const Params<T>& params, Shared& shared, std::int64_t first) {
    if (threadIdx.x >= TilePixels) return;
    const ConvProblem& problem = params.problem;
    const std::int64_t index = first + threadIdx.x, q_size = problem.q(), map = problem.p() * q_size;
    const std::int64_t n = index / map, p = (index - n * map) / q_size, q = index - n * map - p * q_size;
    Pixel pixel{0, 0, -static_cast<int>(sample_limit), 0};
    if (n < problem.n) {
      pixel = {n * params.in.n, params.out(n, 0, p, q), static_cast<int>(p * problem.stride_h - problem.pad_h),
               static_cast<int>(q * problem.stride_w - problem.pad_w)};
    }
    shared.pixels[threadIdx.x] = pixel;
  }

  // inputs [count * R*R, TilePixels] from channels [c0, c0 + count). A thread loads the R taps of a row; neighbouring
  // threads take what is adjacent in memory: pixels in NCHW, channels in NHWC.
  static __device__ __forceinline__ void load_inputs(const Params<T>& params,
                                                     const T* __restrict__ x,  // [N, C, H, W] in problem.layout
                                                     Shared& shared, std::int64_t c0, int count) {
    const ConvProblem& problem = params.problem;
    const bool nhwc = problem.layout == Layout::nhwc;
    const int height = static_cast<int>(problem.h), width = static_cast<int>(problem.w);
    const int row_stride = static_cast<int>(params.in.h), column_stride = static_cast<int>(params.in.w);
    const int dilation_h = static_cast<int>(problem.dilation_h), dilation_w = static_cast<int>(problem.dilation_w);
    for (int e = threadIdx.x; e < channels * R * TilePixels; e += threads) {
      const int c = nhwc ? e % channels : e / (TilePixels * R);
      const int r = nhwc ? e / (channels * TilePixels) : e / TilePixels % R;
      const int pixel = nhwc ? e / channels % TilePixels : e % TilePixels;
      if (c >= count) continue;
      const Pixel at = shared.pixels[pixel];
      const int h = at.h0 + r * dilation_h;
      const bool row_inside = h >= 0 && h < height;
      const T* row = x + at.x + (c0 + c) * params.in.c + (row_inside ? h : 0) * row_stride;
      T* line = shared.inputs + (c * R + r) * R * pixel_pitch + pixel;
#pragma unroll
      for (int s = 0; s < R; ++s) {
        const int w = at.w0 + s * dilation_w;
        const bool inside = row_inside && w >= 0 && w < width;
        line[s * pixel_pitch] = inside ? row[w * column_stride] : from_float<T>(0.0f);
      }
    }
  }

  // weights [count * R*R, TileK]; the reduction's index runs over C, R, S, as in memory. Eight neighbouring threads
  // read 8 adjacent elements of a filter (a sector of FP32), and a warp stores to 32 different banks.
  static __device__ __forceinline__ void load_weights(const Params<T>& params,
                                                      const T* __restrict__ weight,  // [K, C/G, R, S]
                                                      Shared& shared, std::int64_t k0, int valid_k, std::int64_t c0,
                                                      int count) {
    const std::int64_t filter = params.problem.c_per_group() * taps;
    const T* source = weight + k0 * filter + c0 * taps;
    constexpr int run = 8, runs = (depth + run - 1) / run;
    for (int e = threadIdx.x; e < runs * run * TileK; e += threads) {
      const int d = e % run + e / (run * TileK) * run, k = e / run % TileK;
      if (d < count * taps) {
        shared.weights[d * k_pitch + k] = k < valid_k ? source[k * filter + d] : from_float<T>(0.0f);
      }
    }
  }

  // totals[i][j] += sum over the chunk of weights[., k + i] * inputs[., pixel + j]. Added to earlier chunks only at the
  // end: a sum of block sums rounds like its longest part, not like the whole.
  static __device__ __forceinline__ void multiply(const Shared& shared, int count, int k, int pixel,
                                                  float (&totals)[4][4]) {
    float sums[4][4] = {};
    constexpr int unrolled_channels = R == 1 ? 8 : R == 2 ? 2 : 1;  // beside all taps
#pragma unroll unrolled_channels
    for (int c = 0; c < count; ++c) {
#pragma unroll
      for (int tap = 0; tap < taps; ++tap) {
        float a[4], b[4];
        load_four(a, shared.weights + (c * taps + tap) * k_pitch + k);
        load_four(b, shared.inputs + (c * taps + tap) * pixel_pitch + pixel);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) totals[i][j] += sums[i][j];
    }
  }

  // Four outputs of one pixel (NHWC) or of one channel (NCHW): adjacent in y, and written at once, if `vector`.
  // locate(i, index, k) tells the place in y and the channel of each.
  template <typename Locate>
  static __device__ __forceinline__ void store_four(const Params<T>& params, T* __restrict__ y, const float (&sums)[4],
                                                    int valid, bool vector, Locate&& locate) {
    Four<T> four;
    std::int64_t first = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= valid) continue;
      std::int64_t index, k;
      locate(i, index, k);
      if (i == 0) first = index;
      four.value[i] = params.epilogue(sums[i], index, k);
      if (!vector || valid < 4) y[index] = four.value[i];
    }
    if (vector && valid >= 4) *reinterpret_cast<Four<T>*>(y + first) = four;
  }

  // y of the 4 x 4 sums at (k, pixel) of the tile whose first output channel is k0.
  static __device__ __forceinline__ void store(const Params<T>& params,
                                               T* __restrict__ y,  // [N, K, P, Q] in problem.layout
                                               const Shared& shared, std::int64_t k0, int valid_k, int valid_pixels,
                                               int k, int pixel, const float (&sums)[4][4]) {
    const ConvProblem& problem = params.problem;
    if (problem.layout == Layout::nhwc) {
      const bool vector = problem.k % 4 == 0 && k0 % 4 == 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (pixel + j >= valid_pixels) continue;
        const float column[4]{sums[0][j], sums[1][j], sums[2][j], sums[3][j]};
        store_four(params, y, column, valid_k - k, vector, [&](int i, std::int64_t& index, std::int64_t& channel) {
          channel = k0 + k + i;
          index = shared.pixels[pixel + j].y + channel;
        });
      }
    } else {
      const bool vector = params.out.c % 4 == 0;  // P*Q: then four pixels belong to one map, and start aligned
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (k + i >= valid_k) continue;
        store_four(params, y, sums[i], valid_pixels - pixel, vector,
                   [&](int j, std::int64_t& index, std::int64_t& channel) {
                     channel = k0 + k + i;
                     index = shared.pixels[pixel + j].y + channel * params.out.c;
                   });
      }
    }
  }
};

}  // namespace fastconv::algos::fused_unroll
