// The products of a tile: A from the patch, by pairs of halves at tabled offsets; B as it is packed.
#pragma once

#include "algos/implicit_gemm/few_channels/tile.cuh"

namespace fastconv::algos::implicit_gemm::few_channels {

// |hi| of an output's window must reach this, or be zero: else bits are lost to float16's subnormals (hi + lo: 22 bits,
// 2^-24 apart at least; hi alone: 11).
template <typename S>
constexpr float min_high = S::limbs == 2 ? 2.0f : 0.125f;

// Where a pair of halves lies in the patch, from the window's first; and which of the two are the window's.
struct Tap {
  std::uint32_t offset, mask;
};

// taps: [steps + 1][step_pairs], so that lane l%4's two of a step are neighbours.
template <typename T>
__device__ __forceinline__ void list_taps(const Params<T>& params, int steps, Tap* taps) {
  const int pitch = params.plan.pitch, pairs = params.r * params.by_row_pairs;
  for (int index = threadIdx.x; index < (steps + 1) * step_pairs; index += blockDim.x) {
    const int place = index % step_pairs, pair = index - place + place / 2 + place % 2 * (step_pairs / 2);
    std::uint32_t r = pair;
    const int half = static_cast<int>(params.by_row_pairs.divmod(r)) * 2;
    Tap tap{0, 0};  // behind the last pair: weights are zero
    if (pair < pairs) {
      const int column = params.plan.dense ? half : half / pitch * params.dilation_w * pitch + half % pitch;
      tap.offset = static_cast<int>(r) * params.dilation_h * params.plan.row_bytes + column * 2;
      tap.mask = half + 1 < params.s * pitch ? 0x7fff7fffu : 0x7fffu;
    }
    taps[index] = tap;
  }
}

template <typename S>
using Fragments = std::uint32_t[S::row_tiles][4];

template <typename S>
__device__ __forceinline__ void load_fragments(Fragments<S>& a, const unsigned char* window, int pixel_bytes,
                                               std::uint32_t first, std::uint32_t second) {
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned char* pixel = window + (2 * m + i) * pixel_bytes;
      a[m][i] = *reinterpret_cast<const std::uint32_t*>(pixel + first);
      a[m][i + 2] = *reinterpret_cast<const std::uint32_t*>(pixel + second);
    }
  }
}

// The largest |hi| of each of the lane's outputs' windows, so far.
template <typename S>
__device__ __forceinline__ void note_largest(__half2 (&largest)[quad], const Fragments<S>& high, const Tap& first,
                                             const Tap& second) {
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t a = high[m][i] & first.mask, b = high[m][i + 2] & second.mask;
      __half2& most = largest[2 * m + i];
      most = __hmax2(most, __hmax2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b)));
    }
  }
}

// window: the patch at the lane's first output. Returns in `largest` what note_largest says (scaled classes).
template <typename S>
__device__ __forceinline__ void multiply(const unsigned char* window, int plane_bytes, int pixel_bytes, const Tap* taps,
                                         const unsigned char* filters, int steps, Sums<S>& total,
                                         __half2 (&largest)[quad]) {
  using H = Half<typename S::T>;
  constexpr int limb_bytes = S::step_bytes / S::limbs;
  const int lane = threadIdx.x % 32;
  const unsigned char* b = filters + lane * 16;
  const uint4* lane_taps = reinterpret_cast<const uint4*>(taps) + lane % 4;
  uint4 two = *lane_taps;
  Fragments<S> next;
  if constexpr (S::products == 1) load_fragments<S>(next, window, pixel_bytes, two.x, two.z);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, b += S::step_bytes) {
    // Ahead by a step; behind the last one there are taps, too.
    lane_taps += step_pairs / 2;
    const uint4 now = two;
    two = *lane_taps;
    Fragments<S> high;
    if constexpr (S::products == 1) {
#pragma unroll
      for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) high[m][i] = next[m][i];
      }
      load_fragments<S>(next, window, pixel_bytes, two.x, two.z);
    } else {
      load_fragments<S>(high, window, pixel_bytes, now.x, now.z);
    }
    if constexpr (S::scaled) note_largest<S>(largest, high, {now.x, now.y}, {now.z, now.w});
    if constexpr (S::products == 3) {
      Fragments<S> low;
      load_fragments<S>(low, window + plane_bytes, pixel_bytes, now.x, now.z);
      // The tensor cores truncate their accumulator. So a step starts from zero, small products first, and joins the
      // total by an addition that rounds (docs/concepts/numerics.md).
      constexpr float zero[4] = {};
#pragma unroll
      for (int n = 0; n < S::column_tiles; n += 2) {
        const uint4 high_b = *reinterpret_cast<const uint4*>(b + n * 256);
        const uint4 low_b = *reinterpret_cast<const uint4*>(b + n * 256 + limb_bytes);
        float sum[2][S::row_tiles][4];
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          multiply_add<H>(sum[0][m], low[m], high_b.x, high_b.y, zero);
          multiply_add<H>(sum[1][m], low[m], high_b.z, high_b.w, zero);
        }
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          multiply_add<H>(sum[0][m], high[m], low_b.x, low_b.y, sum[0][m]);
          multiply_add<H>(sum[1][m], high[m], low_b.z, low_b.w, sum[1][m]);
        }
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          multiply_add<H>(sum[0][m], high[m], high_b.x, high_b.y, sum[0][m]);
          multiply_add<H>(sum[1][m], high[m], high_b.z, high_b.w, sum[1][m]);
        }
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[m][n][i] += sum[0][m][i];
            total[m][n + 1][i] += sum[1][m][i];
          }
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < S::column_tiles; n += 2) {
        const uint4 two_b = *reinterpret_cast<const uint4*>(b + n * 256);
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          multiply_add<H>(total[m][n], high[m], two_b.x, two_b.y, total[m][n]);
          multiply_add<H>(total[m][n + 1], high[m], two_b.z, two_b.w, total[m][n + 1]);
        }
      }
    }
  }
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
