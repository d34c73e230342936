// Mean and variance of values that many threads have parts of: of group norms.
#pragma once

#include <cuda_runtime.h>

namespace fastconv {

// Of a pixel, as many channels as one access has.
template <typename T>
struct alignas(16) Access {
  static constexpr int count = 16 / sizeof(T);
  T e[count];
};

// Of some values: their mean, and the sum of squared deviations from it. Those of parts are taken together by what they
// are, count-weighted means and sum(squares + count * (mean - common mean)^2): nothing cancels, however far from zero.
struct alignas(8) Moments {
  float mean, squares;
};

__device__ __forceinline__ float sum_over(int lanes, float value) {  // a power of two of neighbours; in all of them
  for (int offset = 1; offset < lanes; offset *= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// Of `parts` moments, by a number of neighbouring lanes, of which this is number `lane`; the same in all of them. In a
// fixed order. read(i) -> Moments, count(i): how many values.
template <typename Read, typename Count>
__device__ __forceinline__ Moments taken_together(int parts, float total, int lane, int lanes, const Read& read,
                                                  const Count& count) {
  float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
  for (int i = lane; i < parts; i += lanes) sum = fmaf(count(i), read(i).mean, sum);
  const float mean = sum_over(lanes, sum) / total;
#pragma unroll 4
  for (int i = lane; i < parts; i += lanes) {
    const Moments part = read(i);
    const float deviation = part.mean - mean;
    squares += fmaf(count(i) * deviation, deviation, part.squares);
  }
  return {mean, sum_over(lanes, squares)};
}

// Takes those of `unit` neighbouring channels together, in the first of them; each is of `count` values, so that
// nothing is divided.
template <int channels>
__device__ __forceinline__ void join_neighbours(Moments (&moments)[channels], int unit, float count) {
#pragma unroll
  for (int width = 1; width < channels; width *= 2) {
    if (width >= unit) break;
#pragma unroll
    for (int i = 0; i < channels; i += 2 * width) {
      Moments& first = moments[i];
      const Moments second = moments[i + width];
      const float deviation = 0.5f * (second.mean - first.mean);  // of both from their mean
      first.mean += deviation;
      first.squares += fmaf(static_cast<float>(2 * width) * count * deviation, deviation, second.squares);
    }
  }
}

}  // namespace fastconv
