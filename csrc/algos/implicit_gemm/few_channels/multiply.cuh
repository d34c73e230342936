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

// Class fp32. The tensor cores truncate their accumulator. So a step starts from zero, small products first, and joins
// the totals by an addition that rounds (docs/concepts/numerics.md).
template <typename S>
__device__ __forceinline__ void multiply_split(const unsigned char* window, int patch_limb_bytes, int pixel_bytes,
                                               const uint4* lane_taps, const unsigned char* b, int steps,
                                               Sums<S>& total, __half2 (&largest)[quad]) {
  constexpr int limb_bytes = S::step_bytes / S::limbs;
#pragma unroll 1
  for (; steps > 0; --steps, lane_taps += step_pairs / 2, b += S::step_bytes) {
    const uint4 two = *lane_taps;
    Fragments<S> high, low;
    load_fragments<S>(high, window, pixel_bytes, two.x, two.z);
    load_fragments<S>(low, window + patch_limb_bytes, pixel_bytes, two.x, two.z);
    note_largest<S>(largest, high, {two.x, two.y}, {two.z, two.w});
#pragma unroll
    for (int n = 0; n < S::column_tiles; n += 2) {
      const uint4 high_b = *reinterpret_cast<const uint4*>(b + n * 256);
      const uint4 low_b = *reinterpret_cast<const uint4*>(b + n * 256 + limb_bytes);
      float sum[2][S::row_tiles][4] = {};
      const auto add = [&](const Fragments<S>& a, const uint4& two_b) {
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          multiply_add<half_t>(sum[0][m], a[m], two_b.x, two_b.y, sum[0][m]);
          multiply_add<half_t>(sum[1][m], a[m], two_b.z, two_b.w, sum[1][m]);
        }
      };
      add(low, high_b);
      add(high, low_b);
      add(high, high_b);
#pragma unroll
      for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[m][n][i] += sum[0][m][i];
          total[m][n + 1][i] += sum[1][m][i];
        }
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void multiply_single(const unsigned char* window, int pixel_bytes, const uint4* lane_taps,
                                                const unsigned char* b, int steps, Sums<S>& total,
                                                __half2 (&largest)[quad]) {
  using H = Half<typename S::T>;
  uint4 two = *lane_taps;
  Fragments<S> next;
  load_fragments<S>(next, window, pixel_bytes, two.x, two.z);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, b += S::step_bytes) {
    // Ahead by a step; behind the last one there are taps, too.
    lane_taps += step_pairs / 2;
    const uint4 now = two;
    two = *lane_taps;
    Fragments<S> a;
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = next[m][i];
    }
    load_fragments<S>(next, window, pixel_bytes, two.x, two.z);
    if constexpr (S::scaled) note_largest<S>(largest, a, {now.x, now.y}, {now.z, now.w});
#pragma unroll
    for (int n = 0; n < S::column_tiles; n += 2) {
      const uint4 two_b = *reinterpret_cast<const uint4*>(b + n * 256);
#pragma unroll
      for (int m = 0; m < S::row_tiles; ++m) {
        multiply_add<H>(total[m][n], a[m], two_b.x, two_b.y, total[m][n]);
        multiply_add<H>(total[m][n + 1], a[m], two_b.z, two_b.w, total[m][n + 1]);
      }
    }
  }
}

// window: the patch at the lane's first output. Adds what note_largest says to `largest` (scaled classes).
template <typename S>
__device__ __forceinline__ void multiply(const unsigned char* window, int patch_limb_bytes, int pixel_bytes,
                                         const Tap* taps, const unsigned char* filters, int steps, Sums<S>& total,
                                         __half2 (&largest)[quad]) {
  const int lane = threadIdx.x % 32;
  const unsigned char* b = filters + lane * 16;
  const uint4* lane_taps = reinterpret_cast<const uint4*>(taps) + lane % 4;
  if constexpr (S::products == 3) {
    multiply_split<S>(window, patch_limb_bytes, pixel_bytes, lane_taps, b, steps, total, largest);
  } else {
    multiply_single<S>(window, pixel_bytes, lane_taps, b, steps, total, largest);
  }
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
